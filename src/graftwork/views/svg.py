"""Drawing by hand: elements, scales and round tick marks.

In: numbers. Out: escaped SVG markup whose colours come from the page's CSS variables, so that one
drawing serves light and dark. Does not know what is drawn.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def draw_both(draw: Callable[[float], Markup], *, wide: float = 760.0, narrow: float = 340.0) -> Markup:
    """A drawing twice, for a desk and for a phone; the style shows the one that fits."""
    pair = Markup('<div class="wide">{}</div><div class="narrow">{}</div>')
    return pair.format(draw(wide), draw(narrow))


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


class PlotInterval(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


class BeforeAfter(NamedTuple):
    """One row of the forest plot; values are shares of 1. `note` is at the right."""

    name: str
    before: PlotInterval
    after: PlotInterval
    limit: float | None
    note: str


class PlannedActual(NamedTuple):
    """One figure of the plan and what came of it, both as ratios to the planned value."""

    name: str
    low: float
    high: float
    actual: float
    note: str


def draw_before_after(rows: Sequence[BeforeAfter], *, width: float = 760) -> Markup:
    """Rates with their intervals, base above adapter, the limit as a line across both."""
    if not rows:
        return draw_nothing("Metrics before and after", width)
    layout = RowLayout(width=width, count=len(rows), body=40.0, note_width=128.0)
    x = Scale(0, 1, layout.start, layout.end)
    parts = []
    for mark in (0, 0.25, 0.5, 0.75, 1):
        parts += layout.mark(x(mark), f"{100 * mark:.0f} %")
    for i, row in enumerate(rows):
        parts += layout.name(i, row.name, row.note)
        middle = layout.middle(i)
        if row.limit is not None:
            parts.append(line(x(row.limit), middle - 17, x(row.limit), middle + 17, class_="limit"))
        for span, place, name in ((row.before, middle - 8, "before"), (row.after, middle + 8, "after")):
            parts += _whisker(x, span, place, name)
    return drawing(
        *parts,
        width=width,
        height=layout.height,
        title="Metrics before and after",
        description="; ".join(
            f"{row.name} from {100 * row.before.value:.1f} to {100 * row.after.value:.1f} percent"
            for row in rows
        ),
    )


def draw_plan(rows: Sequence[PlannedActual], *, width: float = 760) -> Markup:
    """Planned range as a band around 1, the actual value as a dot; equal ratios at equal distances."""
    if not rows:
        return draw_nothing("Plan against reality", width)
    layout = RowLayout(width=width, count=len(rows), body=22.0, note_width=78.0)
    values = [value for row in rows for value in (row.low, row.high, row.actual) if value > 0]
    farthest = max([max(1 / value, value) for value in values] or [1.0])
    marks = next((ratios for ratios in _RATIOS if ratios[-1] >= farthest * 1.05), _RATIOS[-1])
    x = Scale(1 / marks[-1], marks[-1], layout.start, layout.end, log=True)
    parts = []
    for ratio in (*(1 / mark for mark in reversed(marks)), 1.0, *marks):
        parts += layout.mark(
            x(ratio), "as planned" if ratio == 1 else f"× {round(ratio, 2):g}", strong=ratio == 1
        )
    for i, row in enumerate(rows):
        inside = row.low - 1e-9 <= row.actual <= row.high + 1e-9
        middle = layout.middle(i)
        left, right = x(row.low) - 1.5, x(row.high) + 1.5
        parts += layout.name(i, row.name, row.note)
        parts.append(
            element("rect", x=left, y=middle - 6, width=right - left, height=12, rx=3, class_="band")
        )
        parts.append(
            element("circle", cx=x(row.actual), cy=middle, r=5, class_=f"dot {'after' if inside else 'off'}")
        )
    return drawing(
        *parts,
        width=width,
        height=layout.height,
        title="Plan against reality",
        description="; ".join(f"{row.name}: {row.actual:.2f} times the planned value" for row in rows),
    )


_RATIOS = ((1.25, 1.5), (1.4, 2.0), (1.7, 3.0), (2.2, 5.0), (3.2, 10.0), (10.0, 100.0), (32.0, 1000.0))


class RowLayout:
    """Named rows under each other: names next to the plot where there is room, above it on a phone."""

    def __init__(self, *, width: float, count: int, body: float, note_width: float) -> None:
        self._beside = width > 500
        self._step = body + (14.0 if self._beside else 34.0)
        self._head = 0.0 if self._beside else 22.0
        self._body = body
        self._width = width
        self.start = 172.0 if self._beside else 6.0
        self.end = width - (note_width if self._beside else 10.0)
        self.floor = 4 + self._step * count
        self.height = self.floor + 24

    def middle(self, row: int) -> float:
        return 4 + row * self._step + self._head + (self._step - self._head) / 2

    def name(self, row: int, name: str, note: str) -> list[Markup]:
        y = self.middle(row) + 4.5 if self._beside else 4 + row * self._step + 18
        parts = [
            label(name, x=0, y=y, class_="name"),
            label(note, x=self._width, y=y, class_="note", anchor="end"),
        ]
        if row:
            above = 4 + row * self._step
            parts.append(line(0, above, self._width, above, class_="grid"))
        return parts

    def mark(self, x: float, text: str, *, strong: bool = False) -> list[Markup]:
        return [
            line(x, 4, x, self.floor, class_="axis" if strong else "grid"),
            label(text, x=x, y=self.height - 6, class_="tick", anchor="middle"),
        ]


def _whisker(x: Scale, span: PlotInterval, y: float, name: str) -> list[Markup]:
    return [
        line(x(span.low), y, x(span.high), y, class_=f"whisker {name}"),
        line(x(span.low), y - 4, x(span.low), y + 4, class_=f"whisker {name}"),
        line(x(span.high), y - 4, x(span.high), y + 4, class_=f"whisker {name}"),
        element("circle", cx=x(span.value), cy=y, r=5, class_=f"dot {name}"),
    ]
