"""The comparison of places as tables: the best of each place, what the best costs, what would change it."""

from collections.abc import Sequence

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.plan.cost.assess import best_of_each_place, count, dollars, duration
from graftwork.plan.cost.types import PlaceComparison, PlaceRow, billed_how

SHOWN = 14
NOTED = 3
"""Places whose rules are told: those that one would go to."""
RIGHT = ("hours", "$/h", "a run", "done in", "runs", "return")


def show_comparison(console: Console, found: PlaceComparison, *, everything: bool = False) -> None:
    lines = found.rows if everything else best_of_each_place(found.rows)
    shown = lines if everything else _with_a_few_that_fail(lines)
    print_line(console, _title(found))
    console.print(_rows(found, shown))
    print_line(console, f"[dim]{_dates(shown)}; ranges in --json[/]")
    hidden = len(found.rows) - len(shown)
    if hidden > 0:
        print_line(console, f"[dim]{hidden} more offers with --all, everything with --json[/]")
    print_line(console, f"\n[bold]{quote(found.verdict)}[/] {quote(found.reason)}", soft_wrap=False)
    best = next((row for row in found.rows if row.eligible), None)
    if best is not None:
        _show_best(console, best)
    _show_disk(console, found)
    if found.sensitivity:
        print_line(console, "\n[bold]What changes the winner[/]")
        for change in found.sensitivity:
            print_line(console, f"  · {quote(change.words)}")
    print_line(console, "\n[bold]Assumed[/]")
    for words in (*found.assumptions, *found.notes[:1]):
        print_line(console, f"  · {quote(words)}")
    wanted = {row.title for row in (found.rows if everything else shown[:NOTED])}
    for words in found.notes[1:]:
        if words.split(":")[0] in wanted:
            print_line(console, f"  [dim]· {quote(words)}[/]")


def _with_a_few_that_fail(lines: Sequence[PlaceRow]) -> tuple[PlaceRow, ...]:
    """All that will do, up to the number shown, and then those that will not: the reason is an answer too."""
    good = [row for row in lines if row.eligible][:SHOWN]
    mine = [row for row in lines if row.kind == "own" and row not in good]
    bad = [row for row in lines if not row.eligible and row not in mine]
    return (*good, *mine, *bad[: max(SHOWN - len(good), 4)])


def _title(found: PlaceComparison) -> str:
    run = found.run
    return (
        f"[bold]{quote(run['model'])}[/], {quote(run['method'])}, {run['rows']} rows of "
        f"{run['tokens_a_row']} tokens, {count(run['epochs'], 'epoch')}"
    )


def _rows(found: PlaceComparison, shown: Sequence[PlaceRow]) -> object:
    budget, value = found.terms.budget_usd, found.terms.value_usd
    columns = ["place", "card", "hours", "$/h", "a run", "done in"]
    columns += ["runs"] if budget is not None else []
    columns += ["return"] if value is not None else []
    made = table(*columns, "verdict", right=RIGHT)
    for row in shown:
        cells = [
            quote(_place(row)),
            quote(f"{row.gpus} × {row.gpu}" if row.gpus > 1 else row.gpu),
            f"{row.training_hours.value:.1f}" if row.fits else "–",
            f"{row.usd_per_hour.value:.2f}{'[yellow]*[/]' if row.stale else ''}",
            dollars(row.cost_usd.value) if row.fits else "–",
            duration(row.hours_to_result.value) if row.fits else "–",
        ]
        if budget is not None:
            cells.append(_runs(row))
        if value is not None:
            cells.append(f"{row.return_usd.value:,.0f}" if row.return_usd and row.fits else "–")
        mark = "[green]" if row.verdict == "best" else "[dim]" if not row.eligible else ""
        words = quote("; ".join((row.verdict, *_limits(row)[:1])))
        made.add_row(*cells, f"{mark}{words}[/]" if mark else words)
    return made


def _runs(row: PlaceRow) -> str:
    if row.runs_in_budget is None:
        return "any" if row.billing == "free" and row.fits else "–"
    return f"{row.runs_in_budget.value:,.0f}"


def _limits(row: PlaceRow) -> tuple[str, ...]:
    """The rules that this run meets: one session that is long enough is no limit."""
    if not row.fits or not row.recommended:
        return ()
    return tuple(words for words in row.limits if not words.startswith("1 session "))


def _place(row: PlaceRow) -> str:
    return row.title + billed_how(row.title, row.billing)


def _dates(shown: Sequence[PlaceRow]) -> str:
    """How old the prices are: one line instead of a column."""
    dated = sorted({row.price_dated for row in shown})
    words = f"prices of {dated[0]}" if len(dated) == 1 else f"prices of {dated[0]} to {dated[-1]}"
    return f"{words}{'; * is old: look it up' if any(row.stale for row in shown) else ''}"


def _spread(best: PlaceRow) -> str:
    hours, cost = best.training_hours, best.cost_usd
    return f"{hours.low:.1f} to {hours.high:.1f} hours, {dollars(cost.low)} to {dollars(cost.high)}"


def _show_best(console: Console, best: PlaceRow) -> None:
    parts = ", ".join(
        f"{name} {dollars(part.value)}" for name, part in best.cost_parts_usd.items() if part.value >= 0.005
    )
    print_line(console, f"  range     {_spread(best)}")
    print_line(console, f"  cost      {parts or 'nothing'}")
    rhythm = best.intervals
    print_line(
        console,
        f"  save      every {rhythm.checkpoint_minutes.value:.0f} min "
        f"({rhythm.checkpoint_steps.value:.0f} steps), {rhythm.checkpoints} in all",
    )
    print_line(
        console,
        f"  evaluate  every {rhythm.evaluation_minutes.value:.0f} min "
        f"({rhythm.evaluation_steps.value:.0f} steps), {rhythm.evaluations} in all",
    )
    if best.billing == "spot":
        print_line(
            console,
            f"  taken away {best.interruptions.value:.2f} times ({best.interruptions.low:.2f}–"
            f"{best.interruptions.high:.2f}), {60 * best.lost_hours.value:.0f} minutes lost "
            f"({100 * best.lost_hours.value / best.training_hours.value:.1f} % of the training); "
            f"the rate is {best.rate_source}",
        )
    print_line(console, f"  price     {quote(best.price_source)}, {best.price_dated}")


def _show_disk(console: Console, found: PlaceComparison) -> None:
    disk = found.disk
    parts = ", ".join(
        f"{name} {part.value:.1f}" for name, part in disk.parts_gib.items() if part.value >= 0.05
    )
    total = disk.total_gib
    print_line(console, f"  disk      {total.value:.0f} GiB ({total.low:.0f}–{total.high:.0f}): {parts}")
