"""Plots of a run's course: looks during training, and one figure after the other by step or minute.

In: plain numbers and names. Out: SVG that fills its width. Small drawings stand side by side on a
desk and below each other on a phone, so one size serves both. Knows no records.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from graftwork.report.svg import (
    Scale,
    draw_nothing,
    drawing,
    element,
    label,
    line,
    path,
    round_ticks,
    smooth,
    tick_text,
)
from graftwork.report.wording import number

SMALL = 340.0
MOST_POINTS = 400


class Spot(NamedTuple):
    """One look: where, how good, and whether it is the best, or could not be compared at all."""

    step: int
    value: float
    best: bool = False
    compared: bool = True


def draw_looks(spots: Sequence[Spot], *, name: str, last: int, width: float = 760) -> Markup:
    """A rate by step, each look a dot; the best with a ring, those that do not count hollow."""
    title = f"Looks during training: {name}"
    seen = [spot for spot in spots if math.isfinite(spot.value)]
    if not seen:
        return draw_nothing(title, width)
    height, left, right, top, bottom = 200.0, 40.0, 12.0, 26.0, 38.0
    marks = round_ticks(min([0.0, *(s.value for s in seen)]), max([1.0, *(s.value for s in seen)]), count=4)
    x = Scale(0, max(last, 1), left, width - right)
    y = Scale(marks[0], marks[-1], height - bottom, top)
    parts = draw_frame(x, y, marks, last=last, along="step", width=width, height=height)
    compared = [spot for spot in seen if spot.compared]
    parts.append(path([(x(spot.step), y(spot.value)) for spot in compared], class_="trace"))
    parts += mark_spots(seen, x, y, width=width)
    best = next((spot for spot in seen if spot.best), None)
    told = f"{len(seen)} looks"
    if best:
        told += f", the best {number(best.value)} at step {best.step}"
    return drawing(*parts, width=width, height=height, title=title, description=told)


def mark_spots(spots: Sequence[Spot], x: Scale, y: Scale, *, width: float) -> list[Markup]:
    parts = []
    for spot in spots:
        kind = "look" if spot.compared else "look aside"
        parts.append(element("circle", cx=x(spot.step), cy=y(spot.value), r=3.5, class_=f"dot {kind}"))
        if not spot.best:
            continue
        late = x(spot.step) > width / 2
        parts.append(element("circle", cx=x(spot.step), cy=y(spot.value), r=7, class_="ring"))
        parts.append(
            label(
                f"best look {number(spot.value)}",
                x=x(spot.step) + (-10 if late else 10),
                y=max(y(spot.value) - 10, 12),
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
    """One figure over the run: each value thin, its trend thick, where the run was killed dashed."""
    ordered = sorted((at, value) for at, value in dict(points).items() if math.isfinite(value))
    ordered = ordered[:: max(len(ordered) // MOST_POINTS, 1)]
    if not ordered:
        return draw_nothing(title, width)
    height, left, right, top, bottom = 168.0, 46.0, 10.0, 12.0, 34.0
    values = [value for _, value in ordered]
    # Very small figures, learning rates above all, are told in thousandths and less.
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
    told = f"from {low} to {high} over {number(last)} {along}s; at the end {number(values[-1], unit)}"
    return drawing(*parts, width=width, height=height, title=title, description=told)


def draw_frame(
    x: Scale, y: Scale, marks: Sequence[float], *, last: float, along: str, width: float, height: float
) -> list[Markup]:
    """Grid and names of both axes."""
    parts = []
    for mark in marks:
        parts.append(line(x.start, y(mark), x.end, y(mark), class_="grid" if mark else "axis"))
        parts.append(label(tick_text(mark, marks), x=x.start - 8, y=y(mark) + 4, class_="tick", anchor="end"))
    below = round_ticks(0, last, count=8 if width > 500 else 4)
    for mark in below:
        if x.low <= mark <= last and (along != "step" or mark == int(mark)):
            text = tick_text(mark, below)
            parts.append(label(text, x=x(mark), y=y.start + 16, class_="tick", anchor="middle"))
    parts.append(label(along, x=x.end, y=height - 3, class_="tick", anchor="end"))
    return parts


SMALLEST_POWER = -300


def _power_of(largest: float) -> int:
    """The power of ten that is taken out of a figure, so that its ticks stay short."""
    if not largest or 0.01 <= largest < 100_000:
        return 0
    # Numbers that are hardly there have no power of ten left to be divided by.
    return max(math.floor(math.log10(largest)), SMALLEST_POWER)


def _raise(power: int) -> str:
    return str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
