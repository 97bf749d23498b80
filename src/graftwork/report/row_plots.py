"""Plots of named rows: metrics before and after, plan against reality.

In: plain numbers and names. Out: SVG that fills its width, drawn for a given width so that its letters
keep their size on a phone. Knows no records.
"""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from graftwork.report.svg import Scale, draw_nothing, drawing, element, label, line


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


def draw_before_after(rows: Sequence[BeforeAfter], *, width: float = 760) -> Markup:
    """Rates with their intervals, base above adapter, the limit as a line across both."""
    if not rows:
        return draw_nothing("Metrics before and after", width)
    layout = _Rows(width=width, count=len(rows), body=40.0, note_width=128.0)
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


def draw_plan(rows: Sequence[Against], *, width: float = 760) -> Markup:
    """Planned range as a band around 1, the actual value as a dot; equal ratios at equal distances."""
    if not rows:
        return draw_nothing("Plan against reality", width)
    layout = _Rows(width=width, count=len(rows), body=22.0, note_width=78.0)
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


class _Rows:
    """Named rows under each other: names beside the plot where there is room, above it on a phone."""

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


def _whisker(x: Scale, span: Span, y: float, name: str) -> list[Markup]:
    return [
        line(x(span.low), y, x(span.high), y, class_=f"whisker {name}"),
        line(x(span.low), y - 4, x(span.low), y + 4, class_=f"whisker {name}"),
        line(x(span.high), y - 4, x(span.high), y + 4, class_=f"whisker {name}"),
        element("circle", cx=x(span.value), cy=y, r=5, class_=f"dot {name}"),
    ]
