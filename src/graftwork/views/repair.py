"""Repairs of rows by a teacher: what would be asked and what it costs, and what came of it."""

from collections import Counter
from collections.abc import Sequence

from graftwork.records.dataset import AUGMENT, CUT_OFF, RepairOutcome, RepairPlan, RepairRow
from graftwork.views.document import Document, quote

MOST_ROWS = 12
STATES = {
    "ask": "to be asked",
    "cached": "answered before",
    "shared": "same prompt as another row",
    "skipped": "not needed",
    "accepted": "accepted",
    "refused": "refused",
    "unanswered": "no answer; the next run asks again",
    "over_budget": "not asked: the budget is spent",
}


def view_repair_plan(plan: RepairPlan) -> Document:
    viewed = Document("Repair")
    single = len({row.origin.file for row in plan.rows}) == 1
    viewed.table(
        ("row", "fault", "role", "state", "tokens in", "tokens out", "cost"),
        [
            (
                f"line {row.origin.line}" if single else quote(row.origin),
                row.fault,
                quote(row.group or ""),
                STATES[row.state],
                row.tokens_in or "",
                row.tokens_out or "",
                "" if row.cost is None else f"${row.cost:.4f}",
            )
            # Rows that would be asked come first.
            for row in sorted(plan.rows, key=lambda row: row.state != "ask")[:MOST_ROWS]
        ],
        right=("tokens in", "tokens out"),
    )
    if len(plan.rows) > MOST_ROWS:
        viewed.line(f"… and {len(plan.rows) - MOST_ROWS} more rows (--json lists all)")
    faults = ", ".join(f"{fault} {count:,}" for fault, count in plan.faults.items())
    viewed.line(
        f"[bold]{len(plan.rows):,} rows[/] to repair: {faults}; {plan.usable:,} usable now",
        *_count_states(plan.rows),
        f"{plan.requests:,} requests for {plan.prompts:,} prompts, {plan.cached:,} answered before; about "
        f"{plan.tokens_in:,} tokens in and {plan.tokens_out:,} out (at most {plan.tokens_out_at_most:,})",
    )
    if plan.cost is not None and plan.cost_at_most is not None:
        viewed.line(
            f"estimated cost: [bold]{_say_dollars(plan.cost)}[/], at most {_say_dollars(plan.cost_at_most)}",
            f"[dim]at {quote(plan.price)}[/]",
        )
    else:
        viewed.line("cost: not known; give --price-in and --price-out, or name a teacher with a price")
    viewed.line(*(f"[yellow]budget too small:[/] {quote(limit)}" for limit in plan.limits))
    if plan.overlong:
        viewed.line(
            _warn_of_length(f"about {plan.overlong:,} of the answers will probably make rows that are")
        )
    added = {row.group for row in plan.rows if row.fault == AUGMENT}
    for role, count in plan.small_groups.items():
        if role not in added:
            rows = "1 usable row" if count == 1 else f"{count} usable rows"
            viewed.line(f"small role: {quote(role)} has {rows}; --augment role={quote(role)} adds some")
    return viewed


def view_repair(outcome: RepairOutcome) -> Document:
    viewed = Document("Repair")
    reasons = Counter(row.why.split(":")[0] for row in outcome.rows if row.state == "refused")
    viewed.line(
        *_count_states(outcome.rows),
        *(f"  refused, {quote(reason)}: {count:,}" for reason, count in reasons.most_common(8)),
    )
    if any(CUT_OFF in reason for reason in reasons):
        viewed.line("  a larger data.repair.teacher.max_tokens (--max-tokens) lets answers end")
    after = outcome.usable_after
    usable = "" if after is None else f"; usable rows {outcome.usable_before:,} → {after:,}"
    viewed.line(f"[bold]{outcome.written:,} rows[/] written to {quote(outcome.file)}{usable}")
    if outcome.overlong:
        viewed.line(_warn_of_length(f"about {outcome.overlong:,} of these rows are"))
    spent = outcome.spent
    cost = "" if spent.cost is None else f", {_say_dollars(spent.cost)}"
    lost = f"; {spent.lost} requests were lost by a kill and count in full" if spent.lost else ""
    viewed.line(
        f"spent so far: {spent.requests:,} requests, {spent.tokens_in:,} tokens in, {spent.tokens_out:,} out"
        f"{cost}{lost}"
    )
    if outcome.undecided:
        what = "row is" if outcome.undecided == 1 else "rows are"
        again = "run the same command again"
        if outcome.states.get("over_budget"):
            again = "raise the budget (--max-cost or --max-total-tokens) and " + again
        viewed.line(f"[yellow]{outcome.undecided:,} {what} not decided[/]: {again}")
    if outcome.written and not outcome.in_logs:
        viewed.line(f"add {quote(outcome.file)} to data.logs in graft.yaml to train on these rows")
    return viewed


def _warn_of_length(which: str) -> str:
    return (
        f"[yellow]too long:[/] {which} longer than data.max_tokens, and `graft data prepare` drops such "
        "rows; raise data.max_tokens in graft.yaml"
    )


def _count_states(rows: Sequence[RepairRow]) -> list[str]:
    counts = Counter[str](row.state for row in rows)
    # Why rows are not asked, the most frequent reason first.
    skipped = Counter(row.why for row in rows if row.state == "skipped" and row.why)
    listed = (why if len(skipped) == 1 else f"{why} ({count:,})" for why, count in skipped.most_common())
    why = {"skipped": f": {', '.join(listed)}"} if skipped else {}
    return [
        f"  {counts[state]:,} {words}{quote(why.get(state, ''))}"
        for state, words in STATES.items()
        if counts[state]
    ]


def _say_dollars(dollars: float) -> str:
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"
