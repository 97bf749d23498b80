"""Prints repairs: what a teacher would be asked and cost, and what became of each row."""

from collections import Counter
from collections.abc import Sequence

from rich.console import Console

from graftwork.cli.show.tables import print_line, quote, table
from graftwork.records.repair import AUGMENT, CUT_OFF, RepairOutcome, RepairPlan, RepairRow, TeacherSpending

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
    # Rows that would be asked come first.
    for row in sorted(plan.rows, key=lambda row: row.state != "ask")[:MOST_ROWS]:
        cost = "" if row.cost is None else f"${row.cost:.4f}"
        listed.add_row(
            f"line {row.origin.line}" if single else quote(str(row.origin)),
            row.fault,
            quote(row.group or ""),
            _STATES[row.state],
            f"{row.tokens_in:,}" if row.tokens_in else "",
            f"{row.tokens_out:,}" if row.tokens_out else "",
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
        print_line(
            console,
            f"estimated cost: [bold]{_say_dollars(plan.cost)}[/], at most {_say_dollars(plan.cost_at_most)}",
        )
        print_line(console, f"[dim]at {quote(plan.price)}[/]")
    else:
        print_line(
            console, "cost: not known; give --price-in and --price-out, or name a teacher with a price"
        )
    for limit in plan.limits:
        print_line(console, f"[yellow]budget too small:[/] {quote(limit)}")
    if plan.overlong:
        _warn_of_length(console, f"about {plan.overlong:,} of the answers will probably make rows that are")
    added = {row.group for row in plan.rows if row.fault == AUGMENT}
    for role, count in plan.small_groups.items():
        if role not in added:
            rows = "1 usable row" if count == 1 else f"{count} usable rows"
            print_line(
                console, f"small role: {quote(role)} has {rows}; --augment role={quote(role)} adds some"
            )


def show_outcome(console: Console, outcome: RepairOutcome) -> None:
    _show_states(console, outcome.rows)
    reasons = Counter(row.why.split(":")[0] for row in outcome.rows if row.state == "refused")
    for reason, count in reasons.most_common(8):
        print_line(console, f"  refused, {quote(reason)}: {count:,}")
    if any(CUT_OFF in reason for reason in reasons):
        print_line(console, "  a larger data.repair.teacher.max_tokens (--max-tokens) lets answers end")
    after = "" if outcome.usable_after is None else f"; usable rows {outcome.usable_before:,} → "
    after += "" if outcome.usable_after is None else f"{outcome.usable_after:,}"
    print_line(console, f"[bold]{outcome.written:,} rows[/] written to {quote(outcome.file)}{after}")
    if outcome.overlong:
        _warn_of_length(console, f"about {outcome.overlong:,} of these rows are")
    print_line(console, _say_spent(outcome.spent))
    if outcome.undecided:
        what = "row is" if outcome.undecided == 1 else "rows are"
        again = "run the same command again"
        if outcome.states.get("over_budget"):
            again = "raise the budget (--max-cost or --max-total-tokens) and " + again
        print_line(console, f"[yellow]{outcome.undecided:,} {what} not decided[/]: {again}")
    if outcome.written and not outcome.in_logs:
        print_line(console, f"add {quote(outcome.file)} to data.logs in graft.yaml to train on these rows")


def _warn_of_length(console: Console, which: str) -> None:
    print_line(
        console,
        f"[yellow]too long:[/] {which} longer than data.max_tokens, and `graft data prepare` drops such "
        "rows; raise data.max_tokens in graft.yaml",
    )


def _show_states(console: Console, rows: Sequence[RepairRow]) -> None:
    counts = Counter(row.state for row in rows)
    for state, words in _STATES.items():
        if counts[state]:  # type: ignore[index]
            why = _list_reasons(rows) if state == "skipped" else ""
            print_line(console, f"  {counts[state]:,} {words}{quote(why)}")  # type: ignore[index]


def _list_reasons(rows: Sequence[RepairRow]) -> str:
    """Why rows are not asked, the most frequent reason first."""
    reasons = Counter(row.why for row in rows if row.state == "skipped" and row.why)
    listed = (why if len(reasons) == 1 else f"{why} ({count:,})" for why, count in reasons.most_common())
    return f": {', '.join(listed)}" if reasons else ""


def _say_dollars(dollars: float) -> str:
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"


def _say_spent(spent: TeacherSpending) -> str:
    cost = "" if spent.cost is None else f", {_say_dollars(spent.cost)}"
    lost = f"; {spent.lost} requests were lost by a kill and count in full" if spent.lost else ""
    return (
        f"spent so far: {spent.requests:,} requests, {spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
        f"{cost}{lost}"
    )


PRINTERS = {"RepairPlan": show_plan, "RepairOutcome": show_outcome}
