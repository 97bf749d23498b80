"""Who answers which request, and how well: routers, shadow traffic, and escalation.

A forecast of escalation is drawn as quality against the share of requests that escalate, and against cost.
Bars are intervals on the test cases; the chosen threshold is marked.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup

from graftwork.records.live import (
    EscalationForecast,
    EscalationLive,
    EscalationOption,
    EscalationPoint,
    MeasuredShare,
    ShadowCheck,
    ShadowSummary,
    TrainedRouter,
)
from graftwork.text.wording import plural
from graftwork.views.charts import (
    Scale,
    draw_nothing,
    draw_stacks,
    drawing,
    element,
    label,
    line,
    path,
    round_ticks,
    tick_text,
)
from graftwork.views.document import Document, Drawing, Name, State, quote

if TYPE_CHECKING:
    from graftwork.serve.keys import ApiKey

MARKS = {
    "better": State("better", "bold green"),
    "worse": State("worse", "bold red"),
    "open": State("not decided", "dim"),
}


def view_router(trained: TrainedRouter) -> Document:
    viewed, card = Document("Router"), trained.card
    viewed.table(
        ("held-out questions", "share", "95 % interval", "of"),
        [
            (name, f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}", str(share.n))
            for name, share in (
                ("right, likeliest model", card.accuracy),
                ("right where it is sure", card.sure_accuracy),
                (f"unsure, answered by {quote(card.main)}", card.unsure),
            )
        ],
    )
    chosen = sorted({name for counts in card.confusion.values() for name in counts})
    viewed.table(
        ("question of", *map(quote, chosen)),
        [
            (quote(truth), *(str(counts.get(name, "·")) for name in chosen))
            for truth, counts in card.confusion.items()
        ],
    )
    viewed.line(
        f"threshold {card.threshold:.2f}, chosen on {card.chosen_on} validation questions for "
        f"{card.target:.0%}; calibration error {card.calibration_error:.3f}; "
        f"{trained.milliseconds:.2f} ms a decision"
    )
    viewed.line(f"written to {quote(trained.path)}", wrap=False)
    return viewed


def view_shadow(found: ShadowSummary) -> Document:
    viewed = Document("Shadow")
    names = f"{quote(found.challenger[:12])} against {quote(found.champion[:12]) or 'no champion'}"
    counts = f"{found.copies:,} copies, {found.failed:,} failed, {found.interrupted:,} interrupted"
    viewed.line(f"shadow: {names}: {found.sessions:,} sessions compared ({counts})", wrap=False)
    if found.sessions and found.checks:
        heads = ("users got", "shadow", "difference", "pairs")
        viewed.table(
            ("check", *heads, ""),
            [(quote(check.check), *_figures(check), MARKS[check.outcome]) for check in found.checks],
            right=heads,
        )
        viewed.line(
            f"[dim]differences in points, {found.confidence:.0%} for all checks together, valid at any time; "
            f"median answer {_time(found.champion_ms)} and {_time(found.challenger_ms)}[/]",
            wrap=False,
        )
    viewed.line(*(f"[yellow]![/] {quote(remark)}" for remark in found.remarks), wrap=False)
    return viewed


def _figures(check: ShadowCheck) -> tuple[str, str, str, int]:
    if check.champion is None or check.challenger is None:
        return "–", "–", "–", 0
    ahead = 100 * (check.challenger - check.champion)
    interval = f"{100 * check.low:+.1f} to {100 * check.high:+.1f}"
    return f"{check.champion:.1%}", f"{check.challenger:.1%}", f"{ahead:+.1f} ({interval})", check.pairs


def _time(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:.2f} s"


WIDTH, HEIGHT = 640.0, 400.0
_LEFT, _TOP, _BELOW = 64.0, 44.0, 56.0
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#222}.axis{stroke:#888}.grid{stroke:#e4e4e4}"
    ".whisker{stroke:#9ab}.trend{stroke:#1668a8;fill:none;stroke-width:2}.dot.after{fill:#1668a8}"
    ".dot.off{fill:#c2410c}.mark{stroke:#777;stroke-dasharray:5 4}.dot.before{fill:#777}"
)
"""For a separate file; pages have a style for the same classes."""


class _Axis(NamedTuple):
    """The horizontal axis."""

    name: str
    ticks: Sequence[float]
    write: Callable[[float], str]
    place: Callable[[EscalationPoint], float]


def draw_curve(forecast: EscalationForecast) -> str:
    """Draw a file: quality by the share of requests that the large model answers."""
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
    """None if the cost of one of the models is not known."""
    curve, single_models = forecast.curve, (forecast.options[0], forecast.large_alone)
    assert curve is not None
    costs = [point.cost_per_1000 for point in (*curve.points, curve.chosen)]
    costs += [option.cost_per_1000 for option in single_models]
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
    singles = [(option.cost_per_1000 or 0.0, option.quality.value) for option in single_models]
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


def view_forecast(forecast: EscalationForecast) -> Document:
    """Each model alone and the pair, then the curve of thresholds."""
    small, large, curve = quote(forecast.small), quote(forecast.large), forecast.curve
    viewed = Document(f"{forecast.small} first, {forecast.large} if needed")
    rows = []
    for option in forecast.options:
        checks = quote(" or ".join(option.checks))
        name = f"{small}, {large} where {checks} fails" if checks else f"{small} alone"
        chosen = curve is None and bool(checks) and set(option.checks) == set(forecast.chosen.checks)
        rows.append(_answer_row(name, option, chosen=chosen))
    if curve is not None:
        checks = "".join(f", or {quote(check)} fails" for check in forecast.chosen.checks)
        below = f"{large} below a log-probability of {curve.chosen.threshold:.3f}{checks}"
        rows.append(_answer_row(below, curve.chosen, chosen=True))
    figures = ("escalated", Name(quote(forecast.metric)), "$ for 1,000")
    rows.append(_answer_row(f"{large} alone", forecast.large_alone))
    viewed.table(("answers", *figures), rows, right=figures)
    gain = f"{_points(forecast.gain_over_small)} points ({_range(forecast.gain_low, forecast.gain_high)})"
    loss = f"{_points(-forecast.loss_to_large)} points ({_range(-forecast.loss_high, -forecast.loss_low)})"
    viewed.line(
        f"on {forecast.cases} held-out cases the pair is {gain} against {small} alone and {loss} against "
        f"{large} alone",
        *(f"[dim]·[/] {quote(remark)}" for remark in forecast.remarks),
        wrap=False,
    )
    if curve is None:
        return viewed
    auc = "" if curve.auc is None else f"; it ranks a right answer above a wrong one in {curve.auc:.0%}"
    first = "" if curve.prefix_tokens is None else f" of the first {plural(curve.prefix_tokens, 'token')}"
    viewed.heading("Threshold of the log-probability" + first)
    viewed.line(
        f"Chosen on {plural(curve.validation_cases, 'validation case')} ({curve.validation_escalated:.1%} "
        f"escalated, at most {curve.max_rate:.0%}; {quote(forecast.metric)} {curve.validation_quality:.1%}), "
        f"shown on {plural(curve.chosen.quality.n, 'test case')}{auc}",
        wrap=False,
    )
    for draw in (draw_by_share, draw_by_cost):
        if draw(forecast) is not None:
            viewed.add(Drawing(partial(draw, forecast)))
    viewed.table(
        ("log-probability below", *figures),
        [
            _answer_row(f"{point.threshold:.3f}", point, chosen=point.threshold == curve.chosen.threshold)
            for point in curve.points
        ],
        right=figures,
    )
    return viewed


def _answer_row(
    name: str, found: EscalationOption | EscalationPoint, *, chosen: bool = False
) -> tuple[str, ...]:
    cost = "?" if found.cost_per_1000 is None else f"{found.cost_per_1000:.2f}"
    if found.cost_low is not None and found.cost_high is not None:
        cost += f" [dim]({found.cost_low:.2f}–{found.cost_high:.2f})[/]"
    mark = " [bold green]chosen[/]" if chosen else ""
    return f"{name}{mark}", _share(found.escalated), _share(found.quality), cost


def _share(share: MeasuredShare) -> str:
    return f"{share.value:.1%} [dim]({100 * share.low:.0f}–{100 * share.high:.0f})[/]"


def _range(low: float, high: float) -> str:
    return f"{_points(low)} to {_points(high)}"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"  # + 0.0: never "-0.0"


def view_live(found: EscalationLive) -> Document:
    """Compare a forecast with live traffic."""
    viewed = Document("Escalation")
    agrees = {
        True: State("as predicted", "green"),
        False: State("not as predicted", "red"),
        None: State("not known", "dim"),
    }
    viewed.table(
        ("", "predicted", "live", "n", ""),
        [
            (
                figure.name,
                _measured(figure.predicted, figure.predicted_low, figure.predicted_high),
                _measured(figure.live, figure.live_low, figure.live_high),
                figure.n,
                agrees[figure.agrees],
            )
            for figure in found.figures
        ],
    )
    viewed.line(f"{found.requests:,} requests since the forecast of {quote(found.predicted_at)}")
    viewed.line(*(f"[dim]·[/] {quote(remark)}" for remark in found.remarks), wrap=False)
    return viewed


def _measured(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} ({low:.3g} to {high:.3g})"


def view_keys(keys: "Sequence[ApiKey]") -> Document:
    viewed = Document("API keys")
    if not keys:
        viewed.line("there are no keys; `graft serve keys create NAME` makes one")
    viewed.table(
        ("name", "id", "state", "scopes", "models", "budget", "expires"),
        [
            (
                quote(key.name),
                key.id,
                key.state,
                " ".join(key.scopes),
                quote(" ".join(key.models) or "all"),
                _say_budget(key),
                key.expires_at or "never",
            )
            for key in keys
        ],
    )
    return viewed


def _say_budget(key: "ApiKey") -> str:
    limits = {name: limit for name, limit in key.budget.model_dump().items() if limit is not None}
    return ", ".join(f"{limit:,} {name.replace('_per_', '/')}" for name, limit in limits.items()) or "none"


def draw_days(by_day: Mapping[str, int], *, width: float) -> Markup:
    """Exchanges by day."""
    days = list(by_day.items())[-30:]
    if not days:
        return draw_nothing("Exchanges by day", width)
    every = max(len(days) // 6, 1) if len(days) > 10 else 1
    return draw_stacks(
        {"exchanges": [count for _, count in days]},
        {place + 0.5: day[5:] for place, (day, _) in enumerate(days) if place % every == 0},
        title="Exchanges by day",
        description=f"{days[0][0]} to {days[-1][0]}, at most {max(count for _, count in days)} a day",
        width=width,
    )
