"""Two releases compared, for people: the word first, then the evidence, then how each arm did."""

from collections.abc import Callable

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.evaluate.ab import ABResult, ArmFacts

MOST_EVIDENCE = 1_000_000
"""More than this is not told apart: nobody needs it."""


def show_ab(console: Console, found: ABResult) -> None:
    mark = "[bold green]✓[/]" if found.winner is not None else "[bold yellow]?[/]"
    print_line(console, f"{mark} [bold]{quote(found.sentence)}[/]", soft_wrap=True)
    if found.experiment is not None:
        print_line(console, f"  dealt by lot in experiment {quote(found.experiment)}", soft_wrap=True)
    asked = f"; cases asked {found.asked}" if found.traffic == "cases" else ""
    print_line(console, f"  {_say_counts(found)}; ungraded {found.ungraded}{asked}", soft_wrap=True)
    print_line(
        console,
        f"  B less A: {found.low:+.1%} to {found.high:+.1%} ({found.confidence:.0%}, at all times); "
        f"p {found.p_value:.3g}, {_say_evidence(found)}",
        soft_wrap=True,
    )
    if found.arms:
        _show_arms(console, found.arms)
    for remark in found.remarks:
        print_line(console, f"[yellow]![/] {quote(remark)}", soft_wrap=True)


def _say_counts(found: ABResult) -> str:
    """Live, each arm was right or wrong; on cases, one of the two was better or neither."""
    if found.traffic == "cases":
        names = {"wins": "B better", "losses": "A better", "ties": "tied"}
        return ", ".join(f"{names.get(name, name)} {count:.10g}" for name, count in found.counts.items())
    return "; ".join(
        f"{arm} right {found.counts.get(f'{arm.lower()}_successes', 0):.10g}, "
        f"wrong {found.counts.get(f'{arm.lower()}_failures', 0):.10g}"
        for arm in ("A", "B")
    )


def _say_evidence(found: ABResult) -> str:
    """The stake of the bet against "no difference", beside what it must grow to."""
    enough = f"{1 / (1 - found.confidence):.3g}"
    if found.winner is None:
        return f"evidence {found.e_value:.2g} of the {enough} that decide it"
    if found.e_value >= MOST_EVIDENCE:
        return f"evidence over {MOST_EVIDENCE:,}; {enough} decide it"
    return f"evidence {found.e_value:.0f}; {enough} decide it"


def _show_arms(console: Console, arms: dict[str, ArmFacts]) -> None:
    """A column for each arm: fits a narrow terminal."""
    heads = tuple(f"{name} {arm.release[:12]}" for name, arm in arms.items())
    rows = table("", *heads, right=heads)
    figures: tuple[tuple[str, Callable[[ArmFacts], str]], ...] = (
        ("sessions", lambda arm: f"{arm.sessions:,}"),
        ("exchanges", lambda arm: f"{arm.exchanges:,}"),
        ("failed", lambda arm: _share(arm.failures, arm.exchanges)),
        ("hung up", lambda arm: _share(arm.hung_up, arm.exchanges)),
        ("with feedback", lambda arm: _share(arm.feedback, arm.exchanges)),
        ("first token, median", lambda arm: _time(arm.first_token_ms)),
        ("answer, median", lambda arm: _time(arm.median_ms)),
        ("answer, 95 % within", lambda arm: _time(arm.p95_ms)),
    )
    for name, say in figures:
        rows.add_row(name, *(say(arm) for arm in arms.values()))
    console.print(rows)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.1%})" if part else "0"


def _time(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "–"
    return f"{milliseconds / 1000:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.0f} ms"
