"""Drawing by hand: elements, scales and round tick marks.

In: numbers. Out: escaped SVG markup whose colours come from the page's CSS variables, so that one
drawing serves light and dark. Does not know what is drawn.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

Child = Markup | str


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """`class_` is written as class, `text_anchor` as text-anchor; everything is escaped."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _write(value))
        for name, value in attributes.items()
        if value is not None
    )
    if not children:
        return Markup("<{}{}/>").format(Markup(tag), written)
    inside = Markup("").join(escape(child) for child in children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), written, inside)


def drawing(
    *children: Child, width: float, height: float, title: str, description: str, class_: str = ""
) -> Markup:
    """The frame. Title and description are what a screen reader says."""
    return element(
        "svg",
        element("title", title),
        element("desc", description),
        *children,
        role="img",
        aria_label=f"{title}. {description}",
        class_=f"plot {class_}".strip(),
        viewBox=f"0 0 {_write(width)} {_write(height)}",
    )


def draw_nothing(title: str, width: float) -> Markup:
    return drawing(
        label("nothing was recorded", x=width / 2, y=34, class_="note", anchor="middle"),
        width=width,
        height=60,
        title=title,
        description="nothing was recorded",
    )


def label(text: str, *, x: float, y: float, class_: str = "", anchor: str = "start") -> Markup:
    return element("text", text, x=x, y=y, class_=class_ or None, text_anchor=anchor)


def line(x1: float, y1: float, x2: float, y2: float, *, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def path(points: Iterable[tuple[float, float]], *, class_: str) -> Markup:
    steps = " ".join(f"{'L' if i else 'M'}{_write(x)} {_write(y)}" for i, (x, y) in enumerate(points))
    return element("path", d=steps, class_=class_)


@dataclass(frozen=True)
class Scale:
    """Values to places. `log` puts equal ratios at equal distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(max(at, 1e-12))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def round_ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round numbers from at most `low` to at least `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1.0):
        low, high = low - 0.5, high + 0.5
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 2.5, 5) if m * power >= rough * 0.999), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, last + 1)]


def tick_text(mark: float, marks: Sequence[float]) -> str:
    """All ticks of an axis with as many decimals as the finest of them needs."""
    digits = max(len(f"{m:.4f}".rstrip("0").partition(".")[2]) for m in marks)
    return f"{mark:,.{digits}f}".replace(",", "\u202f").replace("-", "−")


def smooth(values: Sequence[float], *, reach: int) -> list[float]:
    """The mean of each value and up to `reach` neighbours on either side, as many on both: no lag."""
    means = []
    for i in range(len(values)):
        near = min(reach, i, len(values) - 1 - i)
        window = values[i - near : i + near + 1]
        means.append(sum(window) / len(window))
    return means


def _write(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
