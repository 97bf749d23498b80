"""A forecast of escalation as a table: each model alone, and the pair under more and more checks."""

from rich.console import Console
from rich.table import Table

from graftwork.cli.show.tables import print_line, quote
from graftwork.records.escalation import EscalationForecast, EscalationOption
from graftwork.records.measured import MeasuredShare


def show_forecast(console: Console, found: EscalationForecast) -> None:
    table = Table("answers", "escalated", found.metric, "$ for 1,000", box=None)
    for option in found.options:
        checks = " or ".join(option.checks)
        name = f"{found.small}, {found.large} where {checks} fails" if checks else f"{found.small} alone"
        table.add_row(quote(name), _share(option.escalated), _share(option.quality), _cost(option))
    large = found.large_alone
    table.add_row(quote(f"{found.large} alone"), "", _share(large.quality), _cost(large))
    console.print(table)
    gain = f"{100 * found.gain_over_small:+.1f} points ({_range(found.gain_low, found.gain_high)})"
    loss = f"{-100 * found.loss_to_large:+.1f} points ({_range(-found.loss_high, -found.loss_low)})"
    print_line(
        console,
        f"on {found.cases} held-out cases the pair is {gain} against {quote(found.small)} alone and {loss} "
        f"against {quote(found.large)} alone",
        soft_wrap=True,
    )
    for remark in found.remarks:
        print_line(console, f"[dim]·[/] {quote(remark)}", soft_wrap=True)


def _share(share: MeasuredShare) -> str:
    return f"{share.value:.1%} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def _range(low: float, high: float) -> str:
    return f"{100 * low:+.1f} to {100 * high:+.1f}"


def _cost(option: EscalationOption) -> str:
    return "?" if option.cost_per_1000 is None else f"{option.cost_per_1000:.2f}"


PRINTERS = {"EscalationForecast": show_forecast}
