"""Routers, shadow traffic and escalation on the terminal: who answers which request, and how well."""

from rich.console import Console
from rich.table import Table

from graftwork.records.live import ShadowCheck, ShadowSummary
from graftwork.records.routing import (
    EscalationCurve,
    EscalationForecast,
    EscalationLive,
    EscalationOption,
    MeasuredShare,
    TrainedRouter,
)
from graftwork.views.document import quote
from graftwork.views.terminal import print_line, table


def show_router(console: Console, trained: TrainedRouter) -> None:
    card = trained.card
    table = Table("held-out questions", "share", "95 % interval", "of", box=None)
    for name, share in (
        ("right, likeliest model", card.accuracy),
        ("right where it is sure", card.sure_accuracy),
        (f"unsure, answered by {card.main}", card.unsure),
    ):
        table.add_row(name, f"{share.value:.1%}", f"{share.low:.1%} to {share.high:.1%}", str(share.n))
    console.print(table)
    chosen = sorted({name for found in card.confusion.values() for name in found})
    confusion = Table("question of", *chosen, box=None)
    for truth, found in card.confusion.items():
        confusion.add_row(truth, *[str(found.get(name, "·")) for name in chosen])
    console.print(confusion)
    console.print(
        f"threshold {card.threshold:.2f}, chosen on {card.chosen_on} validation questions for "
        f"{card.target:.0%}; calibration error {card.calibration_error:.3f}; "
        f"{trained.milliseconds:.2f} ms a decision",
        highlight=False,
    )
    console.print(f"written to {trained.path}", highlight=False, soft_wrap=True)


_MARKS = {"better": "[bold green]better[/]", "worse": "[bold red]worse[/]", "open": "[dim]not decided[/]"}


def show_shadow(console: Console, found: ShadowSummary) -> None:
    names = f"{quote(found.challenger[:12])} against {quote(found.champion[:12]) or 'no champion'}"
    counts = f"{found.copies:,} copies, {found.failed:,} failed, {found.interrupted:,} interrupted"
    print_line(console, f"shadow: {names}: {found.sessions:,} sessions compared ({counts})", soft_wrap=True)
    if found.sessions and found.checks:
        heads = ("users got", "shadow", "difference", "pairs")
        rows = table("check", *heads, "", right=heads)
        for check in found.checks:
            rows.add_row(quote(check.check), *_figures(check), _MARKS[check.outcome])
        console.print(rows)
        print_line(
            console,
            f"[dim]differences in points, {found.confidence:.0%} for all checks together, valid at any time; "
            f"median answer {_time(found.champion_ms)} and {_time(found.challenger_ms)}[/]",
            soft_wrap=True,
        )
    for remark in found.remarks:
        print_line(console, f"[yellow]![/] {quote(remark)}", soft_wrap=True)


def _figures(check: ShadowCheck) -> tuple[str, str, str, str]:
    if check.champion is None or check.challenger is None:
        return "–", "–", "–", "0"
    ahead = 100 * (check.challenger - check.champion)
    interval = f"{100 * check.low:+.1f} to {100 * check.high:+.1f}"
    return (
        f"{check.champion:.1%}",
        f"{check.challenger:.1%}",
        f"{ahead:+.1f} ({interval})",
        f"{check.pairs:,}",
    )


def _time(milliseconds: float | None) -> str:
    return "–" if milliseconds is None else f"{milliseconds / 1000:.2f} s"


def show_forecast(console: Console, found: EscalationForecast) -> None:
    table = Table("answers", "escalated", found.metric, "$ for 1,000", box=None)
    for option in found.options:
        checks = " or ".join(option.checks)
        name = f"{found.small}, {found.large} where {checks} fails" if checks else f"{found.small} alone"
        table.add_row(quote(name), _share(option.escalated), _share(option.quality), _cost(option))
    large = found.large_alone
    table.add_row(quote(f"{found.large} alone"), "", _share(large.quality), _cost(large))
    console.print(table)
    gain = f"{_points(found.gain_over_small)} points ({_range(found.gain_low, found.gain_high)})"
    loss = f"{_points(-found.loss_to_large)} points ({_range(-found.loss_high, -found.loss_low)})"
    print_line(
        console,
        f"on {found.cases} held-out cases the pair is {gain} against {quote(found.small)} alone and {loss} "
        f"against {quote(found.large)} alone",
        soft_wrap=True,
    )
    for remark in found.remarks:
        print_line(console, f"[dim]·[/] {quote(remark)}", soft_wrap=True)
    if found.curve is not None:
        _show_curve(console, found.curve, found)


def _show_curve(console: Console, curve: EscalationCurve, found: EscalationForecast) -> None:
    table = Table("log-probability below", "escalated", found.metric, "$ for 1,000", box=None)
    for point in curve.points:
        mark = " [bold]chosen[/]" if point.threshold == curve.chosen.threshold else ""
        cost = "?" if point.cost_per_1000 is None else f"{point.cost_per_1000:.2f}"
        table.add_row(f"{point.threshold:.3f}{mark}", _share(point.escalated), _share(point.quality), cost)
    console.print(table)
    auc = "" if curve.auc is None else f"; it ranks a right answer above a wrong one in {curve.auc:.0%}"
    print_line(
        console,
        f"chosen on {curve.validation_cases} validation cases ({curve.validation_escalated:.1%} escalated, "
        f"at most {curve.max_rate:.0%}; {quote(found.metric)} {curve.validation_quality:.1%}), shown on "
        f"{curve.chosen.quality.n} test cases{auc}",
        soft_wrap=True,
    )


def show_live(console: Console, found: EscalationLive) -> None:
    table = Table("", "predicted", "live", "n", "", box=None)
    for figure in found.figures:
        predicted = _measured(figure.predicted, figure.predicted_low, figure.predicted_high)
        live = _measured(figure.live, figure.live_low, figure.live_high)
        mark = {True: "[green]as predicted[/]", False: "[red]not as predicted[/]", None: "[dim]not known[/]"}
        table.add_row(figure.name, predicted, live, f"{figure.n:,}", mark[figure.agrees])
    console.print(table)
    print_line(console, f"{found.requests:,} requests since the forecast of {quote(found.predicted_at)}")
    for remark in found.remarks:
        print_line(console, f"[dim]·[/] {quote(remark)}", soft_wrap=True)


def _measured(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.3g}" if low is None or high is None else f"{value:.3g} ({low:.3g} to {high:.3g})"


def _share(share: MeasuredShare) -> str:
    return f"{share.value:.1%} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def _range(low: float, high: float) -> str:
    return f"{_points(low)} to {_points(high)}"


def _points(share: float) -> str:
    return f"{round(100 * share, 1) + 0.0:+.1f}"  # + 0.0: never "-0.0"


def _cost(option: EscalationOption) -> str:
    return "?" if option.cost_per_1000 is None else f"{option.cost_per_1000:.2f}"
