"""Cycles of the coordinator on the terminal."""

import time
from typing import Any

from rich.console import Console

from graftwork.cli.show.tables import fit_words, print_line, quote, table
from graftwork.cycle.state import CycleState, CycleStepState
from graftwork.pipeline.cycle.session import CyclePlan, CycleStatus
from graftwork.text.wording import duration

COLOURS = {"promoted": "green", "nothing_new": "dim", "running": "cyan", "failed": "red", "refused": "red"}
STEP_COLOURS = {"done": "green", "running": "cyan", "failed": "red", "skipped": "dim", "waiting": "dim"}


def show_cycle(console: Console, cycle: CycleState) -> None:
    rows = table(
        "step", "state", "took", "result", title=f"cycle {cycle.number} of {cycle.model}: {cycle.cause}"
    )
    for step in cycle.steps:
        colour = STEP_COLOURS[step.status]
        rows.add_row(step.name, f"[{colour}]{step.status}[/]", _took(step), quote(_describe(step)))
    console.print(fit_words(console, rows))
    for given in cycle.approvals:
        why = f": {given.why}" if given.why else ""
        print_line(
            console, f"{quote(given.step)} was approved by {quote(given.who + why)}, {_moment(given.at)}"
        )
    colour = COLOURS.get(cycle.outcome, "yellow")
    reason = f": {quote(cycle.reason)}" if cycle.reason else ""
    print_line(console, f"[{colour}]{cycle.outcome.replace('_', ' ')}[/]{reason}")


def show_status(console: Console, found: CycleStatus) -> None:
    if found.state.open_cycle is not None:
        show_cycle(console, found.state.open_cycle)
    running = f"runs here (process {found.running})" if found.running else "does not run in this folder"
    print_line(console, f"the coordinator of {quote(found.project)} {running}")
    print_line(console, f"next: {quote(found.next)}")
    if found.history:
        rows = table("cycle", "model", "began", "took", "outcome", "reason", right=("cycle",))
        for cycle in found.history:
            took = duration(cycle.finished_at - cycle.started_at) if cycle.finished_at is not None else ""
            colour = COLOURS.get(cycle.outcome, "yellow")
            outcome = f"[{colour}]{cycle.outcome.replace('_', ' ')}[/]"
            began = _moment(cycle.started_at)
            rows.add_row(str(cycle.number), cycle.model, began, took, outcome, quote(cycle.reason))
        console.print(fit_words(console, rows))
    for entry in found.state.log[-5:]:
        text = " ".join(part for part in (entry.action, entry.what) if part)
        why = f" ({entry.why})" if entry.why else ""
        print_line(console, f"{_moment(entry.at)}  {quote(entry.who)}: {quote(text + why)}")


def show_plan(console: Console, plan: CyclePlan) -> None:
    print_line(console, f"due now: {quote(plan.due)}" if plan.due else "no cycle is due now")
    print_line(console, f"next: {quote(plan.next)}")
    if plan.new_rows is not None:
        print_line(console, f"new usable rows: {plan.new_rows:,}")
    if plan.drift is not None:
        print_line(console, f"drift: at least {plan.drift:.0%}")
    states = {state.step: state for state in plan.steps}
    rows = table("step", "state", "because", title=f"a cycle of {plan.models[0]} at {plan.place}")
    for name in plan.cycle_steps:
        known = states.get(name)
        waits = "waits for approval" if name in plan.approve else ""
        because = "; ".join(known.because) if known is not None else ""
        rows.add_row(name, known.state if known is not None else "", quote(waits or because))
    console.print(fit_words(console, rows))
    print_line(console, f"delivered to: {quote(', '.join(plan.deliver)) or 'no serving machine'}")
    print_line(console, f"notices go to: {quote(', '.join(plan.notified)) or 'the terminal only'}")


def _took(step: CycleStepState) -> str:
    if step.started_at is None or step.finished_at is None:
        return ""
    return duration(max(step.finished_at - step.started_at, 0.0))


def _describe(step: CycleStepState) -> str:
    if step.error:
        return f"{step.error.get('what', '')} ({step.failures} failures)"
    return ", ".join(
        f"{name} {_short(value)}" for name, value in step.summary.items() if value not in ("", None)
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


PRINTERS = {
    "CycleState": show_cycle,
    "CycleStatus": show_status,
    "CyclePlan": show_plan,
}
