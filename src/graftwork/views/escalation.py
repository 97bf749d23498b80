"""Escalation as drawings: quality against the share of requests that escalate, and against cost.

In: a forecast with a curve. Out: SVG, as a file of its own or within a page. Bars are intervals on the test
cases; the chosen threshold is marked.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from graftwork.records.routing import EscalationForecast, EscalationOption, EscalationPoint
from graftwork.views.svg import (
    Scale,
    drawing,
    element,
    label,
    line,
    path,
    round_ticks,
    tick_text,
)

WIDTH, HEIGHT = 640.0, 400.0
_LEFT, _TOP, _BELOW = 64.0, 44.0, 56.0
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.axis{stroke:#888}.grid{stroke:#e4e4e4}"
    ".whisker{stroke:#9ab}.trend{stroke:#1668a8;fill:none;stroke-width:2}.dot.after{fill:#1668a8}"
    ".dot.off{fill:#c2410c}.mark{stroke:#777;stroke-dasharray:5 4}.dot.before{fill:#777}"
)
"""For a file of its own; pages have a style for the same classes."""


class _Axis(NamedTuple):
    """What is drawn from left to right."""

    name: str
    ticks: Sequence[float]
    write: Callable[[float], str]
    place: Callable[[EscalationPoint], float]


def draw_curve(forecast: EscalationForecast) -> str:
    """A file: quality by the share of requests that the large model answers."""
    drawn = draw_by_share(forecast)
    style = element("style", _STYLE)
    opened = str(drawn).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return opened.replace("</desc>", f"</desc>{style}", 1) + "\n"


def draw_by_share(forecast: EscalationForecast, *, width: float = WIDTH) -> Markup:
    axis = _Axis(
        "requests that the large model answers",
        (0.0, 0.25, 0.5, 0.75, 1.0),
        lambda share: f"{share:.0%}",
        lambda point: point.escalated.value,
    )
    return _draw(forecast, axis, width=width)


def draw_by_cost(forecast: EscalationForecast, *, width: float = WIDTH) -> Markup | None:
    """None where the cost of one of the models is not known."""
    curve, alone = forecast.curve, (forecast.options[0], forecast.large_alone)
    assert curve is not None
    costs = [point.cost_per_1000 for point in (*curve.points, curve.chosen)]
    costs += [option.cost_per_1000 for option in alone]
    known = [cost for cost in costs if cost is not None]
    if len(known) != len(costs) or max(known) <= 0:
        return None
    ticks = round_ticks(0.0, max(known))
    axis = _Axis(
        "$ for 1,000 requests",
        ticks,
        lambda cost: f"${tick_text(cost, ticks)}",
        lambda point: point.cost_per_1000 or 0.0,
    )
    singles = [(option.cost_per_1000 or 0.0, option.quality.value) for option in alone]
    return _draw(forecast, axis, width=width, singles=singles)


def _draw(
    forecast: EscalationForecast,
    axis: _Axis,
    *,
    width: float,
    singles: Sequence[tuple[float, float]] = (),
) -> Markup:
    curve = forecast.curve
    assert curve is not None
    right, bottom = width - 24.0, HEIGHT - _BELOW
    small, large = forecast.options[0].quality.value, forecast.large_alone.quality.value
    points = sorted(curve.points, key=lambda point: (axis.place(point), point.quality.value))
    bounds = [edge for point in points for edge in (point.quality.low, point.quality.high)]
    ticks = round_ticks(min(*bounds, small, large), min(max(*bounds, small, large), 1.0))
    x = Scale(axis.ticks[0], axis.ticks[-1], _LEFT, right)
    y = Scale(ticks[0], ticks[-1], bottom, _TOP)
    parts: list[Markup] = []
    for tick in ticks:
        parts += [line(_LEFT, y(tick), right, y(tick), class_="grid")]
        parts += [label(f"{tick:.0%}", x=_LEFT - 8, y=y(tick) + 4, anchor="end")]
    for tick in axis.ticks:
        parts.append(label(axis.write(tick), x=x(tick), y=bottom + 20, anchor="middle"))
    parts.append(line(_LEFT, bottom, right, bottom, class_="axis"))
    # The curve leads from the small model, on the left, to the large one: the labels keep out of its way.
    for name, value, at, anchor in (
        (forecast.small, small, right, "end"),
        (forecast.large, large, _LEFT + 6, "start"),
    ):
        parts.append(line(_LEFT, y(value), right, y(value), class_="mark"))
        parts.append(label(f"{name} alone", x=at, y=y(value) - 5, anchor=anchor))
    for point in points:
        at = x(axis.place(point))
        parts.append(line(at, y(point.quality.low), at, y(point.quality.high), class_="whisker before"))
    parts.append(path([(x(axis.place(p)), y(p.quality.value)) for p in points], class_="trend"))
    dots = [(axis.place(point), point.quality.value, "dot after", 3.0) for point in points]
    dots += [(at, value, "dot before", 4.0) for at, value in singles]
    dots.append((axis.place(curve.chosen), curve.chosen.quality.value, "dot off", 6.0))
    parts += _mark_threshold(x(axis.place(curve.chosen)), curve.chosen.threshold, bottom, middle=width / 2)
    parts += [element("circle", cx=x(at), cy=y(v), r=radius, class_=name) for at, v, name, radius in dots]
    parts.append(label(f"{forecast.metric} of the pair", x=_LEFT, y=24))
    parts.append(label(axis.name, x=right, y=bottom + 42, anchor="end"))
    description = describe_chosen(forecast)
    return drawing(
        *parts,
        width=width,
        height=HEIGHT,
        title=f"Quality by {axis.name}",
        description=description,
        class_="escalation",
    )


def _mark_threshold(at: float, threshold: float, bottom: float, *, middle: float) -> list[Markup]:
    late = at > middle
    text = label(
        f"threshold {threshold:.3f}",
        x=at - 6 if late else at + 6,
        y=bottom - 8,
        anchor="end" if late else "start",
    )
    return [line(at, _TOP, at, bottom, class_="mark"), text]


def describe_chosen(forecast: EscalationForecast) -> str:
    assert forecast.curve is not None
    chosen = forecast.curve.chosen
    cost = "" if chosen.cost_per_1000 is None else f", ${chosen.cost_per_1000:.2f} for 1,000"
    return (
        f"threshold {chosen.threshold:.3f}: {chosen.escalated.value:.1%} escalate, {forecast.metric} "
        f"{chosen.quality.value:.1%}{cost}"
    )


def show_escalation(forecast: EscalationForecast, *, widths: Sequence[float] = (WIDTH,)) -> dict[str, Any]:
    """What the template of a forecast needs."""
    figures = []
    if forecast.curve is not None:
        for draw in (draw_by_share, draw_by_cost):
            figures += [drawn for width in widths if (drawn := draw(forecast, width=width)) is not None]
    return {
        "forecast": forecast,
        "escalation_rows": _rows(forecast),
        "escalation_chosen": "" if forecast.curve is None else describe_chosen(forecast),
        "escalation_figures": figures,
    }


def _rows(forecast: EscalationForecast) -> list[dict[str, Any]]:
    rows = []
    for option in forecast.options:
        checks = " or ".join(option.checks)
        name = f"{forecast.large} where {checks} fails" if checks else f"{forecast.small} alone"
        is_chosen = (
            forecast.curve is None and bool(checks) and set(option.checks) == set(forecast.chosen.checks)
        )
        rows.append(_row(name, option, chosen=is_chosen))
    if forecast.curve is not None:
        checks = "".join(f", or {check} fails" for check in forecast.chosen.checks)
        below = f"{forecast.large} below a log-probability of {forecast.curve.chosen.threshold:.3f}{checks}"
        rows.append(_row(below, forecast.curve.chosen, chosen=True))
    return [*rows, _row(f"{forecast.large} alone", forecast.large_alone)]


def _row(name: str, found: EscalationOption | EscalationPoint, *, chosen: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "escalated": found.escalated,
        "quality": found.quality,
        "cost": found.cost_per_1000,
        "cost_low": found.cost_low,
        "cost_high": found.cost_high,
        "chosen": chosen,
    }
