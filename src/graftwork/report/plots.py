"""The plots of the page: loss, lengths, metrics before and after, plan against reality.

In: plain numbers and names. Out: SVG that fills its width. Each is drawn for a given width, so that
its letters keep their size on a phone. Knows no records.
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from markupsafe import Markup

from graftwork.report.svg import Scale, drawing, element, label, line, path, round_ticks, smooth
from graftwork.report.wording import number


class Restart(NamedTuple):
    """Where a run ended and from which step it went on."""

    killed_after: int
    resumed_at: int


class Span(NamedTuple):
    """A value and its interval."""

    value: float
    low: float
    high: float


class BeforeAfter(NamedTuple):
    """One row of the forest plot; values are shares of 1. `note` stands at the right."""

    name: str
    before: Span
    after: Span
    limit: float | None
    note: str


class Against(NamedTuple):
    """One figure of the plan and what came of it, both as ratios to the planned value."""

    name: str
    low: float
    high: float
    actual: float
    note: str


def draw_loss(
    steps: Sequence[tuple[int, float]],
    *,
    restarts: Sequence[Restart] = (),
    held_out: tuple[float | None, float | None] = (None, None),
    width: float = 760,
) -> Markup:
    """Loss by step: each step thin, the trend thick, held-out loss as dots before and after."""
    if not steps:
        return _nothing("Training loss", width)
    height, left, right, top, bottom = 300.0, 44.0, 14.0, 26.0, 38.0
    seen = [loss for _, loss in steps if math.isfinite(loss)]
    seen += [loss for loss in held_out if loss is not None]
    marks = round_ticks(min([0.0, *seen]), max(seen, default=1.0), count=5)
    last = max(step for step, _ in steps)
    x = Scale(0, max(last, 1), left, width - right)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    parts = _grid_y(y, marks, left, width - right)
    for mark in round_ticks(0, last, count=8 if width > 500 else 4):
        if mark <= last and mark == int(mark):
            parts.append(
                label(number(mark), x=x(mark), y=height - bottom + 18, class_="tick", anchor="middle")
            )
    parts.append(label("step", x=width - right, y=height - 4, class_="tick", anchor="end"))
    ordered = sorted(dict(steps).items())
    parts.append(path([(x(s), y(v)) for s, v in ordered], class_="trace"))
    trend = smooth([v for _, v in ordered], reach=max(len(ordered) // 16, 1))
    parts.append(path([(x(s), y(v)) for (s, _), v in zip(ordered, trend, strict=True)], class_="trend"))
    parts += _restart_marks(restarts, x=x, top=top, floor=height - bottom, width=width)
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
        description=f"{len(ordered)} steps, from {number(ordered[0][1])} to {number(ordered[-1][1])}"
        + "".join(f"; killed after step {r.killed_after}, resumed at {r.resumed_at}" for r in restarts),
    )


def draw_lengths(lengths: dict[str, Sequence[int]], *, width: float = 760) -> Markup:
    """How long the rows are, in tokens, the splits stacked."""
    together = sorted(value for values in lengths.values() for value in values)
    if not together:
        return _nothing("Lengths", width)
    height, left, right, top, bottom = 240.0, 44.0, 14.0, 26.0, 38.0
    marks = round_ticks(together[0], together[-1], count=10 if width > 500 else 5)
    bins = _cut_bins(marks[0], marks[-1], wanted=36 if width > 500 else 20)
    counts = {name: _count(values, bins) for name, values in lengths.items()}
    highest = max(map(sum, zip(*counts.values(), strict=True)))
    rows = round_ticks(0, highest, count=4)
    x = Scale(bins[0], bins[-1], left, width - right)
    y = Scale(0, rows[-1], height - bottom, top)
    parts = _grid_y(y, [mark for mark in rows if mark == int(mark)], left, width - right)
    for mark in marks:
        parts.append(label(number(mark), x=x(mark), y=height - bottom + 18, class_="tick", anchor="middle"))
    for i in range(len(bins) - 1):
        floor = 0
        for place, name in enumerate(counts):
            if count := counts[name][i]:
                x0, x1 = x(bins[i]) + 0.6, x(bins[i + 1]) - 0.6
                roof, base = y(floor + count), y(floor)
                parts.append(
                    element("rect", x=x0, y=roof, width=x1 - x0, height=base - roof, class_=f"split s{place}")
                )
                floor += count
    middle = median(together)
    parts.append(line(x(middle), top - 4, x(middle), height - bottom, class_="mark"))
    late = x(middle) > width * 0.7
    parts.append(
        label(
            f"median {number(middle)}",
            x=x(middle) + (-6 if late else 6),
            y=top + 4,
            class_="note",
            anchor="end" if late else "start",
        )
    )
    parts.append(label("tokens", x=width - right, y=height - 4, class_="tick", anchor="end"))
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Row lengths",
        description=f"{len(together)} rows of {together[0]} to {together[-1]} tokens, "
        f"median {number(middle)}",
    )


def draw_before_after(rows: Sequence[BeforeAfter], *, width: float = 760) -> Markup:
    """Rates with their intervals, base above adapter, the limit as a line across both."""
    if not rows:
        return _nothing("Metrics before and after", width)
    step, left, right, top = 74.0, 8.0, 14.0, 8.0
    height = top + step * len(rows) + 26
    x = Scale(0, 1, left, width - right)
    parts = []
    for mark in (0, 0.25, 0.5, 0.75, 1):
        parts.append(line(x(mark), top, x(mark), height - 24, class_="grid"))
        anchor = "start" if mark == 0 else "end" if mark == 1 else "middle"
        parts.append(label(f"{100 * mark:.0f} %", x=x(mark), y=height - 6, class_="tick", anchor=anchor))
    for i, row in enumerate(rows):
        y = top + i * step
        parts.append(label(row.name, x=left, y=y + 17, class_="name"))
        parts.append(label(row.note, x=width - right, y=y + 17, class_="note", anchor="end"))
        for span, place, name in ((row.before, y + 35, "before"), (row.after, y + 53, "after")):
            parts += _whisker(x, span, place, name)
        if row.limit is not None:
            at = x(row.limit)
            parts.append(line(at, y + 25, at, y + 63, class_="limit"))
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Metrics before and after",
        description="; ".join(
            f"{row.name} from {100 * row.before.value:.1f} to {100 * row.after.value:.1f} percent"
            for row in rows
        ),
    )


def draw_plan(rows: Sequence[Against], *, width: float = 760) -> Markup:
    """Planned range as a band around 1, what came of it as a dot; equal ratios at equal distances."""
    if not rows:
        return _nothing("Plan against reality", width)
    step, left, right, top = 50.0, 8.0, 14.0, 8.0
    height = top + step * len(rows) + 26
    farthest = max(max(1 / max(v, 1e-3), v) for row in rows for v in (row.low, row.high, row.actual) if v > 0)
    reach = next((r for r in (1.5, 2.0, 3.0, 5.0, 10.0, 100.0) if r >= farthest * 1.05), 1000.0)
    x = Scale(1 / reach, reach, left + 6, width - right - 6, log=True)
    parts = []
    for ratio in (1 / reach, 1 / math.sqrt(reach), 1, math.sqrt(reach), reach):
        parts.append(line(x(ratio), top, x(ratio), height - 24, class_="axis" if ratio == 1 else "grid"))
        text = "as planned" if ratio == 1 else f"× {ratio:.2g}"
        anchor = "start" if ratio == 1 / reach else "end" if ratio == reach else "middle"
        parts.append(label(text, x=x(ratio), y=height - 6, class_="tick", anchor=anchor))
    for i, row in enumerate(rows):
        y = top + i * step
        inside = row.low - 1e-9 <= row.actual <= row.high + 1e-9
        parts.append(label(row.name, x=left, y=y + 17, class_="name"))
        parts.append(label(row.note, x=width - right, y=y + 17, class_="note", anchor="end"))
        band = max(x(row.high) - x(row.low), 3.0)
        parts.append(
            element(
                "rect",
                x=x(row.low) - (1.5 if band == 3.0 else 0),
                y=y + 27,
                width=band,
                height=12,
                rx=3,
                class_="band",
            )
        )
        parts.append(
            element("circle", cx=x(row.actual), cy=y + 33, r=5, class_=f"dot {'after' if inside else 'off'}")
        )
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Plan against reality",
        description="; ".join(f"{row.name}: {row.actual:.2f} times the planned value" for row in rows),
    )


def _whisker(x: Scale, span: Span, y: float, name: str) -> list[Markup]:
    return [
        line(x(span.low), y, x(span.high), y, class_=f"whisker {name}"),
        line(x(span.low), y - 4, x(span.low), y + 4, class_=f"whisker {name}"),
        line(x(span.high), y - 4, x(span.high), y + 4, class_=f"whisker {name}"),
        element("circle", cx=x(span.value), cy=y, r=5, class_=f"dot {name}"),
    ]


def _restart_marks(
    restarts: Sequence[Restart], *, x: Scale, top: float, floor: float, width: float
) -> list[Markup]:
    parts = []
    for restart in restarts:
        at, back = x(restart.killed_after), x(restart.resumed_at - 1)
        parts.append(
            element("rect", x=back, y=top, width=max(at - back, 0.5), height=floor - top, class_="replay")
        )
        parts.append(line(at, top - 6, at, floor, class_="kill"))
        late = at > width * 0.6
        parts.append(
            label(
                f"killed after step {restart.killed_after}, resumed at {restart.resumed_at}",
                x=at + (-6 if late else 6),
                y=top + 2,
                class_="note kill-note",
                anchor="end" if late else "start",
            )
        )
    return parts


def _grid_y(y: Scale, marks: Sequence[float], left: float, right: float) -> list[Markup]:
    parts = []
    for mark in marks:
        parts.append(line(left, y(mark), right, y(mark), class_="grid" if mark else "axis"))
        parts.append(label(number(mark), x=left - 8, y=y(mark) + 4, class_="tick", anchor="end"))
    return parts


def _cut_bins(low: float, high: float, *, wanted: int) -> list[float]:
    width = max(math.ceil((high - low) / wanted), 1)
    count = math.ceil((high - low) / width)
    return [low + i * width for i in range(count + 1)]


def _count(values: Sequence[int], bins: Sequence[float]) -> list[int]:
    counts = [0] * (len(bins) - 1)
    width = bins[1] - bins[0]
    for value in values:
        counts[min(int((value - bins[0]) / width), len(counts) - 1)] += 1
    return counts


def _nothing(title: str, width: float) -> Markup:
    return drawing(
        label("nothing was recorded", x=width / 2, y=34, class_="note", anchor="middle"),
        width=width,
        height=60,
        title=title,
        description="nothing was recorded",
    )
