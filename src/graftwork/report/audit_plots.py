"""Histograms over buckets that grow by a factor.

In: the edges of the buckets and counts by name. Out: SVG that fills its width, drawn for a given
width so that its letters keep their size on a phone. Knows no records.
"""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from graftwork.report.svg import Scale, draw_nothing, drawing, element, label, line, round_ticks
from graftwork.report.wording import number

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 200.0, 44.0, 14.0, 12.0, 38.0


def draw_buckets(
    edges: Sequence[int], counts: Mapping[str, Sequence[int]], *, title: str, unit: str, width: float = 760
) -> Markup:
    """Buckets side by side, the named counts stacked; empty buckets at both ends are left out."""
    totals = [sum(values) for values in zip(*counts.values(), strict=True)]
    filled = [i for i, total in enumerate(totals) if total]
    if not filled:
        return draw_nothing(title, width)
    first, last = max(filled[0] - 1, 0), min(filled[-1] + 2, len(edges))
    marks = [mark for mark in round_ticks(0, max(totals), count=4) if mark == int(mark)]
    x = Scale(first, last, LEFT, width - RIGHT)
    y = Scale(0, max(*marks, *totals), HEIGHT - BOTTOM, TOP)
    parts: list[Markup] = []
    for mark in marks:
        parts.append(line(LEFT, y(mark), width - RIGHT, y(mark), class_="grid" if mark else "axis"))
        parts.append(label(number(mark), x=LEFT - 8, y=y(mark) + 4, class_="tick", anchor="end"))
    every = max(1, round((last - first) / (10 if width > 500 else 5)))
    for i in range(first, last, every):
        parts.append(label(number(edges[i]), x=x(i), y=HEIGHT - BOTTOM + 18, class_="tick", anchor="middle"))
    for i in range(first, last):
        parts += _draw_bar(i, counts, x=x, y=y)
    parts.append(label(unit, x=width - RIGHT, y=HEIGHT - 4, class_="tick", anchor="end"))
    return drawing(
        *parts,
        width=width,
        height=HEIGHT,
        title=title,
        description=f"{number(sum(totals))} rows between {number(edges[filled[0]])} and "
        f"{number(edges[filled[-1] + 1]) if filled[-1] + 1 < len(edges) else 'more'} {unit}",
    )


def _draw_bar(i: int, counts: Mapping[str, Sequence[int]], *, x: Scale, y: Scale) -> list[Markup]:
    floor, parts = 0, []
    left, right = x(i) + 0.6, x(i + 1) - 0.6
    for place, values in enumerate(counts.values()):
        if values[i]:
            roof, base = y(floor + values[i]), y(floor)
            parts.append(
                element("rect", x=left, y=roof, width=right - left, height=base - roof, class_=f"s{place}")
            )
            floor += values[i]
    return parts
