"""Charts as SVG: elements, scales and tick marks, and what is drawn with them.

Input: plain numbers and names. Output: escaped markup whose colors come from the page's CSS variables, so
that one drawing serves light and dark. Each is drawn for a given width, so that its letters keep their size
on a phone. Knows no records.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import NamedTuple

from markupsafe import Markup, escape

from graftwork.records.run import TrainingEvaluation
from graftwork.text.wording import number, plural, truncate
from graftwork.views.document import Bar, Gantt

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
    """The frame. Title and description are for screen readers."""
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


def draw_both(draw: Callable[..., Markup], *, wide: float = 760.0, narrow: float = 340.0) -> Markup:
    """A drawing twice, for desktop and phone; the style shows the one that fits."""
    pair = Markup('<div class="wide">{}</div><div class="narrow">{}</div>')
    return pair.format(draw(width=wide), draw(width=narrow))


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
    """Maps values to positions. `log` puts equal ratios at equal distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, position = self.low, self.high, value
        if self.log:
            low, high, position = math.log(low), math.log(high), math.log(max(position, 1e-12))
        share = (position - low) / (high - low) if high > low else 0.5
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
    """Mean of each value and up to `reach` neighbors on either side, always symmetric, so without lag."""
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


class RowLayout:
    """Named rows below each other: names next to the plot if there is room, above it on a phone."""

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


SMALL = 340.0
MOST_CURVE_POINTS = 400


def draw_looks(
    looks: Sequence[TrainingEvaluation],
    *,
    name: str,
    last: int,
    best_step: int | None = None,
    width: float = 760,
) -> Markup:
    """A rate by step, one dot per evaluation; the best has a ring, incomparable ones are hollow."""
    title = f"{name} during training"
    seen = [look for look in looks if math.isfinite(look.value)]
    if not seen:
        return draw_nothing(title, width)
    height, left, right, top, bottom = 200.0, 40.0, 12.0, 26.0, 38.0
    marks = round_ticks(min([0.0, *(s.value for s in seen)]), max([1.0, *(s.value for s in seen)]), count=4)
    x = Scale(0, max(last, 1), left, width - right)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    parts = draw_frame(x, y, marks, last=last, along="step", width=width, height=height)
    compared = [look for look in seen if look.compared]
    parts.append(path([(x(look.step), y(look.value)) for look in compared], class_="trace"))
    parts += mark_looks(seen, x, y, best_step=best_step, width=width)
    best = next((look for look in seen if look.step == best_step), None)
    described = f"{len(seen)} evaluations"
    if best:
        described += f", the best {number(best.value)} at step {best.step}"
    return drawing(*parts, width=width, height=height, title=title, description=described)


def mark_looks(
    looks: Sequence[TrainingEvaluation], x: Scale, y: Scale, *, best_step: int | None, width: float
) -> list[Markup]:
    parts = []
    for look in looks:
        kind = "look" if look.compared else "look aside"
        parts.append(element("circle", cx=x(look.step), cy=y(look.value), r=3.5, class_=f"dot {kind}"))
        if look.step != best_step:
            continue
        late = x(look.step) > width / 2
        parts.append(element("circle", cx=x(look.step), cy=y(look.value), r=7, class_="ring"))
        parts.append(
            label(
                f"best evaluation {number(look.value)}",
                x=x(look.step) + (-10 if late else 10),
                y=max(y(look.value) - 10, 12),
                class_="note",
                anchor="end" if late else "start",
            )
        )
    return parts


def draw_course(
    points: Sequence[tuple[float, float]],
    *,
    title: str,
    unit: str = "",
    along: str = "step",
    breaks: Sequence[float] = (),
    width: float = SMALL,
) -> Markup:
    """One figure over the run: each value thin, its trend thick, dashed where the run was killed."""
    ordered = sorted((at, value) for at, value in dict(points).items() if math.isfinite(value))
    ordered = ordered[:: max(len(ordered) // MOST_CURVE_POINTS, 1)]
    if not ordered:
        return draw_nothing(title, width)
    height, left, right, top, bottom = 168.0, 46.0, 10.0, 12.0, 34.0
    values = [value for _, value in ordered]
    # Very small figures, learning rates above all, are shown in thousandths and less.
    power = _power_of(max(map(abs, values)))
    marks = round_ticks(min([0.0, *values]) / 10**power, max(values) / 10**power, count=4)
    last = ordered[-1][0]
    x = Scale(min(0.0, ordered[0][0]), max(last, 1e-9), left, width - right)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    parts = draw_frame(x, y, marks, last=last, along=along, width=width, height=height)
    if power:
        parts.append(label(f"× 10{_raise(power)}", x=left + 4, y=top + 2, class_="tick"))
    places = [(x(at), y(value / 10**power)) for at, value in ordered]
    trend = smooth([spot for _, spot in places], reach=max(len(places) // 16, 1))
    parts.append(path(places, class_="trace"))
    parts.append(path([(spot[0], level) for spot, level in zip(places, trend, strict=True)], class_="trend"))
    parts += [line(x(at), top, x(at), height - bottom, class_="kill") for at in breaks]
    low, high = number(min(values)), number(max(values), unit)
    described = f"from {low} to {high} over {number(last)} {along}s; at the end {number(values[-1], unit)}"
    return drawing(*parts, width=width, height=height, title=title, description=described)


def draw_frame(
    x: Scale, y: Scale, marks: Sequence[float], *, last: float, along: str, width: float, height: float
) -> list[Markup]:
    """Grid and names of both axes."""
    parts = _grid_y(y, marks, x.start, x.end)
    below = round_ticks(0, last, count=8 if width > 500 else 4)
    for mark in below:
        if x.low <= mark <= last and (along != "step" or mark == int(mark)):
            text = tick_text(mark, below)
            parts.append(label(text, x=x(mark), y=y.start + 16, class_="tick", anchor="middle"))
    parts.append(label(along, x=x.end, y=height - 3, class_="tick", anchor="end"))
    return parts


SMALLEST_POWER = -300


def _power_of(largest: float) -> int:
    """The power of ten that is factored out, so that ticks stay short."""
    if not largest or 0.01 <= largest < 100_000:
        return 0
    # Numbers that are hardly there have no power of ten left to be divided by.
    return max(math.floor(math.log10(largest)), SMALLEST_POWER)


def _raise(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


MOST_POINTS = 1000
"""A screen has no more columns than this: longer runs are thinned."""


def draw_loss(
    steps: Sequence[tuple[int, float]],
    *,
    restarts: Sequence[tuple[int, int]] = (),
    held_out: tuple[float | None, float | None] = (None, None),
    looks: Sequence[TrainingEvaluation] = (),
    best_step: int | None = None,
    width: float = 760,
) -> Markup:
    """Loss by step: each step thin, the trend thick, held-out loss as dots before, after and between.

    `restarts` are the steps after which the run was killed and at which it resumed.
    """
    # A replayed step was logged twice; a loss that is not a number has no place on a plot.
    ordered = sorted((step, loss) for step, loss in dict(steps).items() if math.isfinite(loss))
    ordered = ordered[:: max(len(ordered) // MOST_POINTS, 1)]
    if not ordered:
        return draw_nothing("Training loss", width)
    height, left, right, top, bottom = 310.0, 36.0, 8.0, 34.0, 38.0
    seen = [loss for _, loss in ordered]
    seen += [loss for loss in held_out if loss is not None]
    looks = [look for look in looks if math.isfinite(look.value)]
    seen += [look.value for look in looks]
    marks = round_ticks(min([0.0, *seen]), max(seen), count=5)
    last = max(step for step, _ in steps)
    x = Scale(0, max(last, 1), left, width - right)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    parts = draw_frame(x, y, marks, last=last, along="step", width=width, height=height)
    parts.append(path([(x(s), y(v)) for s, v in ordered], class_="trace"))
    trend = smooth([v for _, v in ordered], reach=max(len(ordered) // 16, 1))
    parts.append(path([(x(s), y(v)) for (s, _), v in zip(ordered, trend, strict=True)], class_="trend"))
    parts += _restart_marks(restarts, x=x, top=top, floor=height - bottom, width=width)
    parts += mark_looks(looks, x, y, best_step=best_step, width=width)
    for place, loss, name in ((0, held_out[0], "before"), (last, held_out[1], "after")):
        if loss is not None:
            anchor = "start" if name == "before" else "end"
            shift = 9 if name == "before" else -2
            parts.append(element("circle", cx=x(place), cy=y(loss), r=4.5, class_=f"dot {name}"))
            parts.append(
                label(
                    f"held out {number(loss)}",
                    x=x(place) + shift,
                    y=y(loss) - 9,
                    class_="note",
                    anchor=anchor,
                )
            )
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Training loss",
        description=f"{last} steps, from {number(ordered[0][1])} to {number(ordered[-1][1])}"
        + "".join(
            f"; best evaluation {number(s.value)} at step {s.step}" for s in looks if s.step == best_step
        )
        + "".join(f"; killed after step {killed}, resumed at {resumed}" for killed, resumed in restarts),
    )


def draw_lengths(lengths: dict[str, Sequence[int]], *, width: float = 760) -> Markup:
    """Lengths of rows in tokens, with the splits stacked."""
    all_lengths = sorted(value for values in lengths.values() for value in values)
    if not all_lengths:
        return draw_nothing("Row lengths", width)
    marks = round_ticks(all_lengths[0], all_lengths[-1], count=10 if width > 500 else 5)
    step = max(math.ceil((marks[-1] - marks[0]) / (36 if width > 500 else 20)), 1)
    bars = math.ceil((marks[-1] - marks[0]) / step)
    counts = {name: [0] * bars for name in lengths}
    for name, values in lengths.items():
        for value in values:
            counts[name][min(int((value - marks[0]) / step), bars - 1)] += 1
    middle = median(all_lengths)
    return draw_stacks(
        counts,
        {(mark - marks[0]) / step: number(mark) for mark in marks},
        title="Row lengths",
        unit="tokens",
        description=f"{len(all_lengths)} rows of {all_lengths[0]} to {all_lengths[-1]} tokens, "
        f"median {number(middle)}",
        note=((middle - marks[0]) / step, f"median {number(middle)}"),
        width=width,
    )


def draw_stacks(
    counts: Mapping[str, Sequence[int]],
    ticks: Mapping[float, str],
    *,
    title: str,
    description: str,
    unit: str = "",
    note: tuple[float, str] | None = None,
    width: float = 760,
) -> Markup:
    """Bars side by side, the named counts stacked. `ticks` and `note` are placed at numbers of bars."""
    totals = [sum(values) for values in zip(*counts.values(), strict=True)]
    if not any(totals):
        return draw_nothing(title, width)
    height, left, right, top, bottom = 220.0, 44.0, 14.0, 26.0, 38.0
    marks = [mark for mark in round_ticks(0, max(totals), count=4) if mark == int(mark)]
    x = Scale(0, len(totals), left, width - right)
    y = Scale(0, max(*marks, *totals), height - bottom, top)
    parts = _grid_y(y, marks, left, width - right)
    for place, text in ticks.items():
        parts.append(label(text, x=x(place), y=height - bottom + 18, class_="tick", anchor="middle"))
    for bar in range(len(totals)):
        floor, start, end = 0, x(bar) + 0.6, x(bar + 1) - 0.6
        for place, values in enumerate(counts.values()):
            if values[bar]:
                roof, base = y(floor + values[bar]), y(floor)
                parts.append(
                    element(
                        "rect", x=start, y=roof, width=end - start, height=base - roof, class_=f"s{place}"
                    )
                )
                floor += values[bar]
    if note is not None:
        note_x, late = x(note[0]), x(note[0]) > width * 0.7
        parts.append(line(note_x, top - 18, note_x, height - bottom, class_="mark"))
        anchor = "end" if late else "start"
        parts.append(label(note[1], x=note_x + (-6 if late else 6), y=top - 8, class_="note", anchor=anchor))
    parts.append(label(unit, x=width - right, y=height - 4, class_="tick", anchor="end"))
    return drawing(*parts, width=width, height=height, title=title, description=description)


def _restart_marks(
    restarts: Sequence[tuple[int, int]], *, x: Scale, top: float, floor: float, width: float
) -> list[Markup]:
    parts = []
    for killed_after, resumed_at in restarts:
        killed_x, back = x(killed_after), x(resumed_at - 1)
        parts.append(
            element(
                "rect", x=back, y=top, width=max(killed_x - back, 0.5), height=floor - top, class_="replay"
            )
        )
        parts.append(line(killed_x, top - 18, killed_x, floor, class_="kill"))
        late = killed_x > width / 2
        text = f"killed after step {killed_after}, resumed at {resumed_at}"
        if width < 500:
            text = f"killed, back to step {resumed_at}"
        parts.append(
            label(
                text,
                x=killed_x + (-6 if late else 6),
                y=top - 10,
                class_="note kill-note",
                anchor="end" if late else "start",
            )
        )
    return parts


def _grid_y(y: Scale, marks: Sequence[float], left: float, right: float) -> list[Markup]:
    parts = []
    for mark in marks:
        parts.append(line(left, y(mark), right, y(mark), class_="grid" if mark else "axis"))
        parts.append(label(tick_text(mark, marks), x=left - 8, y=y(mark) + 4, class_="tick", anchor="end"))
    return parts


LANE, DAYS = 34.0, 28.0
"""The height of a lane, and of the names of the days above all lanes."""
HUES = (205, 25, 145, 280, 95, 340, 55, 180, 240)
NARROW = 600
"""Below this width names and days are shortened."""


def draw_legend(chart: Gantt) -> Markup:
    """A square in the color of each name."""
    return Markup(" ").join(
        element(
            "span",
            element(
                "svg",
                element("rect", width=10, height=10, rx=3, fill=f"hsl({hue} 55% 45%)"),
                width="10",
                height="10",
                viewBox="0 0 10 10",
            ),
            f" {name}",
        )
        for name, hue in _hues(chart).items()
    )


def _hues(chart: Gantt) -> dict[str, int]:
    return {name: HUES[number % len(HUES)] for number, name in enumerate(chart.names)}


def draw_gantt(chart: Gantt, *, width: float = 980) -> Markup:
    """One row for each lane, a bar for each span, one column for each day."""
    narrow, hues = width < NARROW, _hues(chart)
    left, longest = (84.0, 11) if narrow else (130.0, 18)
    height = DAYS + LANE * max(len(chart.lanes), 1) + 8
    x = Scale(chart.start.timestamp(), chart.end.timestamp(), left, width - 4)
    parts, day = list[Markup](), chart.start
    while day <= chart.end:
        begins = x(day.timestamp())
        parts.append(line(begins, DAYS - 6, begins, height - 4, class_="grid"))
        if day < chart.end:
            shown = day.strftime("%a")[:2] if narrow else day.strftime("%a %d")
            parts.append(label(shown, x=begins + 4, y=16, class_="tick"))
        day += timedelta(days=1)
    for place, lane in enumerate(chart.lanes):
        y = DAYS + place * LANE
        parts.append(label(truncate(lane, longest), x=0, y=y + 21, class_="name"))
        parts.append(line(left, y + LANE, width - 4, y + LANE, class_="grid"))
        parts += [_draw_span(bar, hues[bar.name], x, y) for bar in chart.bars if bar.lane == lane]
    if chart.now is not None and chart.start < chart.now < chart.end:
        now = x(chart.now.timestamp())
        parts.append(line(now, DAYS - 6, now, height - 4, class_="limit"))
    described = f"{plural(len(chart.bars), 'session')} at {plural(len(chart.lanes), 'place')}"
    return drawing(
        *parts, width=width, height=height, title=chart.title, description=described, class_="gantt"
    )


def _draw_span(bar: Bar, hue: int, x: Scale, y: float) -> Markup:
    start, end = x(bar.start), x(bar.end)
    drawn = element(
        "rect",
        element("title", bar.title),
        x=start,
        y=y + 5,
        width=max(end - start - 1, 2.0),
        height=LANE - 10,
        rx=4,
        fill=f"hsl({hue} 55% {60 if bar.done else 45}%)",
        class_="by-hand" if bar.outlined else None,
    )
    if end - start < 8 * len(bar.name):
        return drawn
    return drawn + element(
        "text", bar.name, x=(start + end) / 2, y=y + 21, text_anchor="middle", fill="white", font_size="11"
    )
