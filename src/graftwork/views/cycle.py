"""The training cycle: its steps, its status, what it would do next, and earlier cycles."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.text.wording import duration, moment
from graftwork.views.document import Document, State, Table, Timestamp, quote

if TYPE_CHECKING:
    from graftwork.cycle.session import CyclePlan, CycleStatus

COLOURS = {"promoted": "green", "nothing_new": "dim", "running": "cyan", "failed": "red", "refused": "red"}
STEP_COLOURS = {"done": "green", "running": "cyan", "failed": "red", "skipped": "dim", "waiting": "dim"}
HASH = 64


def view_cycle(cycle: CycleState) -> Document:
    viewed = Document(f"cycle {cycle.number} of {cycle.model}")
    viewed.table(
        ("step", "state", "took", "result"),
        [
            (step.name, State(step.status, STEP_COLOURS[step.status]), _took(step), quote(_describe(step)))
            for step in cycle.steps
        ],
        title=f"cycle {cycle.number} of {cycle.model}: {cycle.cause}",
    )
    for given in cycle.approvals:
        why = f": {given.why}" if given.why else ""
        viewed.line(f"{quote(given.step)} was approved by {quote(given.who + why)}, {moment(given.at)}")
    colour = COLOURS.get(cycle.outcome, "yellow")
    reason = f": {quote(cycle.reason)}" if cycle.reason else ""
    viewed.line(f"[{colour}]{cycle.outcome.replace('_', ' ')}[/]{reason}")
    return viewed


def view_status(found: "CycleStatus") -> Document:
    viewed = Document("Cycle")
    if found.state.open_cycle is not None:
        viewed.add(view_cycle(found.state.open_cycle))
    running = f"runs here (process {found.running})" if found.running else "does not run in this folder"
    viewed.line(f"the coordinator of {quote(found.project)} {running}", f"next: {quote(found.next)}")
    if found.history:
        viewed.add(list_cycles(found.history))
    for entry in found.state.log[-5:]:
        text = " ".join(part for part in (entry.action, entry.what) if part)
        why = f" ({entry.why})" if entry.why else ""
        viewed.line(f"{moment(entry.at)}  {quote(entry.who)}: {quote(text + why)}")
    return viewed


def list_cycles(history: Sequence[CycleState]) -> Table:
    columns = ("cycle", "model", "began", "took", "outcome", "reason")
    rows = [
        (
            str(cycle.number),
            quote(cycle.model),
            Timestamp(cycle.started_at),
            duration(cycle.finished_at - cycle.started_at) if cycle.finished_at is not None else "",
            State(cycle.outcome.replace("_", " "), COLOURS.get(cycle.outcome, "yellow")),
            quote(cycle.reason),
        )
        for cycle in history
    ]
    return Table(columns, rows, right=("cycle",))


def view_plan(plan: "CyclePlan") -> Document:
    viewed = Document("Cycle")
    viewed.line(f"due now: {quote(plan.due)}" if plan.due else "no cycle is due now")
    viewed.line(f"next: {quote(plan.next)}")
    if plan.new_rows is not None:
        viewed.line(f"new usable rows: {plan.new_rows:,}")
    if plan.drift is not None:
        viewed.line(f"drift: at least {plan.drift:.0%}")
    states = {state.step: state for state in plan.steps}
    rows = []
    for name in plan.cycle_steps:
        state = states.get(name)
        because = "; ".join(state.because) if state is not None else ""
        because = "waits for approval" if name in plan.approve else because
        rows.append((name, state.state if state is not None else "", quote(because)))
    viewed.table(("step", "state", "because"), rows, title=f"a cycle of {plan.models[0]} at {plan.place}")
    viewed.line(
        f"delivered to: {quote(', '.join(plan.deliver)) or 'no serving machine'}",
        f"notices go to: {quote(', '.join(plan.notified)) or 'the terminal only'}",
    )
    return viewed


def _took(step: CycleStepState) -> str:
    if step.started_at is None or step.finished_at is None:
        return ""
    return duration(max(step.finished_at - step.started_at, 0.0))


def _describe(step: CycleStepState) -> str:
    if step.error:
        return f"{step.error.get('what', '')} ({step.failures} failures)"
    return list_facts(step.summary)


def list_facts(summary: Mapping[str, Any]) -> str:
    """Summarize the result of a step in one line."""
    return ", ".join(f"{name} {_short(value)}" for name, value in summary.items() if value not in ("", None))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    text = str(value)
    return text[:12] if len(text) == HASH else text
