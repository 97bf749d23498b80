"""Intervals of several subjects, metric by metric, on one axis from 0 to 100 %.

In: plain numbers and names. Out: SVG for a given width. Knows no records.
"""

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from graftwork.report.row_plots import Span
from graftwork.report.svg import Scale, draw_nothing, drawing, element, label, line

LINE = 17.0
"""Between the intervals of one metric."""
HEAD = 26.0
FOOT = 24.0
TITLE = "Metrics with their intervals"


class Shown(NamedTuple):
    """One subject's figure; `kind` is the class that colours it, `note` stands at the right."""

    kind: str
    subject: str
    span: Span
    note: str


class MetricRow(NamedTuple):
    name: str
    shown: Sequence[Shown]


def draw_intervals(rows: Sequence[MetricRow], *, width: float = 760) -> Markup:
    """The name of each metric above its intervals, one a subject, in the order given."""
    if not rows:
        return draw_nothing(TITLE, width)
    floor = 4 + sum(HEAD + LINE * len(row.shown) + 8 for row in rows)
    x = Scale(0, 1, 6, width - 92)
    parts = []
    for mark in (0, 0.25, 0.5, 0.75, 1):
        parts.append(line(x(mark), 4, x(mark), floor, class_="axis" if mark in (0, 1) else "grid"))
        parts.append(
            label(f"{100 * mark:.0f} %", x=x(mark), y=floor + FOOT - 6, class_="tick", anchor="middle")
        )
    top = 4.0
    for row in rows:
        parts.append(label(row.name, x=x(0) + 6, y=top + HEAD - 10, class_="name"))
        for place, shown in enumerate(row.shown):
            parts += _draw_span(x, shown, y=top + HEAD + LINE * (place + 0.5), width=width)
        top += HEAD + LINE * len(row.shown) + 8
    told = (f"{row.name}: " + ", ".join(f"{one.subject} {one.note}" for one in row.shown) for row in rows)
    return drawing(*parts, width=width, height=floor + FOOT, title=TITLE, description="; ".join(told))


def _draw_span(x: Scale, shown: Shown, *, y: float, width: float) -> list[Markup]:
    span, kind = shown.span, shown.kind
    return [
        line(x(span.low), y, x(span.high), y, class_=f"whisker {kind}"),
        line(x(span.low), y - 4, x(span.low), y + 4, class_=f"whisker {kind}"),
        line(x(span.high), y - 4, x(span.high), y + 4, class_=f"whisker {kind}"),
        element("circle", cx=x(span.value), cy=y, r=5, class_=f"dot {kind}"),
        label(shown.note, x=width, y=y + 4.5, class_="note", anchor="end"),
    ]
