"""Shadow traffic as a table: what users got against a challenger's answers to the same requests."""

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.records.shadow import ShadowCheck, ShadowSummary

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
