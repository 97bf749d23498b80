"""Prints repairs: what a teacher would be asked and cost, and what became of each row."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.records.repair import RepairOutcome, RepairPlan, RepairRow, TeacherSpending

MOST_ROWS = 12
_STATES = {
    "ask": "to be asked",
    "cached": "answered before",
    "shared": "same prompt as another row",
    "skipped": "not needed",
    "accepted": "accepted",
    "refused": "refused",
    "unanswered": "no answer; the next run asks again",
    "over_budget": "not asked: the budget is spent",
}


def show_plan(console: Console, plan: RepairPlan) -> None:
    listed = table(
        "row", "fault", "role", "state", "tokens in", "tokens out", "cost", right=("tokens in", "tokens out")
    )
    single = len({row.origin.file for row in plan.rows}) == 1
    for row in plan.rows[:MOST_ROWS]:
        cost = "" if row.cost is None else f"${row.cost:.4f}"
        listed.add_row(
            f"line {row.origin.line}" if single else quote(str(row.origin)),
            row.fault,
            quote(row.group or ""),
            row.state,
            f"{row.tokens_in:,}",
            f"{row.tokens_out:,}",
            cost,
        )
    console.print(listed)
    if len(plan.rows) > MOST_ROWS:
        print_line(console, f"… and {len(plan.rows) - MOST_ROWS} more rows (--json lists all)")
    faults = ", ".join(f"{fault} {count:,}" for fault, count in plan.faults.items())
    print_line(console, f"[bold]{len(plan.rows):,} rows[/] to repair: {faults}; {plan.usable:,} usable now")
    _show_states(console, plan.rows)
    print_line(
        console,
        f"{plan.requests:,} requests for {plan.prompts:,} prompts, {plan.cached:,} answered before; about "
        f"{plan.tokens_in:,} tokens in and {plan.tokens_out:,} out (at most {plan.tokens_out_at_most:,})",
    )
    if plan.cost is not None and plan.cost_at_most is not None:
        print_line(console, f"estimated cost: [bold]${plan.cost:.2f}[/], at most ${plan.cost_at_most:.2f}")
        print_line(console, f"[dim]at {quote(plan.price)}[/]")
    else:
        print_line(
            console, "cost: not known; give --price-in and --price-out, or name a teacher with a price"
        )
    for limit in plan.limits:
        print_line(console, f"[yellow]budget too small:[/] {quote(limit)}")
    for role, count in plan.small_groups.items():
        print_line(
            console,
            f"small role: {quote(role)} has {count} usable rows; --augment role={quote(role)} adds some",
        )


def show_outcome(console: Console, outcome: RepairOutcome) -> None:
    _show_states(console, outcome.rows)
    reasons = Counter(row.why.split(":")[0] for row in outcome.rows if row.state == "refused")
    for reason, count in reasons.most_common(8):
        print_line(console, f"  refused, {quote(reason)}: {count:,}")
    after = "" if outcome.usable_after is None else f"; usable rows {outcome.usable_before:,} → "
    after += "" if outcome.usable_after is None else f"{outcome.usable_after:,}"
    print_line(console, f"[bold]{outcome.written:,} rows[/] written to {quote(outcome.file)}{after}")
    print_line(console, _say_spent(outcome.spent))
    if outcome.undecided:
        print_line(
            console, f"[yellow]{outcome.undecided:,} rows are not decided[/]: run the same command again"
        )
    if not outcome.in_logs:
        print_line(console, f"add {quote(outcome.file)} to data.logs in graft.yaml to train on these rows")


def _show_states(console: Console, rows: Sequence[RepairRow]) -> None:
    counts = Counter(row.state for row in rows)
    for state, words in _STATES.items():
        if counts[state]:  # type: ignore[index]
            print_line(console, f"  {counts[state]:,} {words}")  # type: ignore[index]


def _say_spent(spent: TeacherSpending) -> str:
    cost = "" if spent.cost is None else f", ${spent.cost:.2f}"
    lost = f"; {spent.lost} requests were lost by a kill and count in full" if spent.lost else ""
    return (
        f"spent so far: {spent.requests:,} requests, {spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
        f"{cost}{lost}"
    )


PRINTERS = {"RepairPlan": show_plan, "RepairOutcome": show_outcome}
