"""Decide what the coordinator does next: begin a cycle, do a step, wait or close the cycle; and its notices.

Input: the state, the settings, facts about the project and the moment. Output: one action, or the difference
of two states as messages for people. Knows no stores, no clock and no models.
"""

from typing import NamedTuple
from zoneinfo import ZoneInfo

from graftwork.cycle.cron import parse_cron
from graftwork.cycle.settings import CANARY, DELIVER, PROMOTE, CycleSettings
from graftwork.cycle.state import CoordinatorState, CycleOutcome, CycleState, Notice, is_free

AFTER_DEPLOY = ("release", "try", CANARY, PROMOTE, DELIVER)
"""Steps that are skipped unless the gate says deploy."""
CHECK_SECONDS = 600.0
"""How often `cycle.when` is checked."""
FAR_AWAY = 366 * 86400.0


class CycleFacts(NamedTuple):
    """What triggers compare; None if it was not measured."""

    rows: int | None = None
    """Usable rows in all."""
    drift: float | None = None


class Rest(NamedTuple):
    """Nothing to do before `until`."""

    until: float
    why: str


class AwaitApproval(NamedTuple):
    """A person has to allow the step."""

    step: str


class Begin(NamedTuple):
    model: str
    cause: str


class DoStep(NamedTuple):
    step: str


class SkipStep(NamedTuple):
    step: str
    why: str


class Close(NamedTuple):
    outcome: CycleOutcome
    reason: str


Action = Rest | AwaitApproval | Begin | DoStep | SkipStep | Close


def next_action(
    state: CoordinatorState, settings: CycleSettings, facts: CycleFacts, *, now: float, here: str
) -> Action:
    if state.paused is not None:
        why = f": {state.paused.why}" if state.paused.why else ""
        return Rest(now + FAR_AWAY, f"paused by {state.paused.who}{why}")
    if state.open_cycle is not None:
        return _in_cycle(state.open_cycle, settings, now=now, here=here)
    if state.queue:
        return Begin(state.queue[0], state.queue_cause)
    if cause := find_cause(state, settings, facts, now=now):
        return Begin("", cause)
    due = next_scheduled(state, settings, now=now)
    if settings.when.is_set:
        checked = max(now + CHECK_SECONDS, rests_until(state))
        return Rest(min(checked, due) if due is not None else checked, "nothing is due")
    if due is None:
        due, why = now + FAR_AWAY, "nothing starts a cycle automatically: set cycle.schedule or cycle.when"
    else:
        why = "waiting for the schedule"
    return Rest(due, why)


def find_cause(state: CoordinatorState, settings: CycleSettings, facts: CycleFacts, *, now: float) -> str:
    """Why a cycle is due now; empty if it is not."""
    due = next_scheduled(state, settings, now=now)
    if due is not None and due <= now:
        return f"schedule {settings.schedule}"
    if now < rests_until(state):
        return ""
    when, new = settings.when, count_new(state, facts)
    if when.new_rows is not None and new is not None and new >= when.new_rows:
        return f"{new:,} new usable rows"
    if when.drift is not None and facts.drift is not None and facts.drift > when.drift:
        return f"drift: at least {facts.drift:.0%} of live prompts are unlike the training data"
    return ""


REST_SECONDS = 12 * 3600
"""Minimum time after a cycle before an event starts another one; the schedule is not affected."""


def rests_until(state: CoordinatorState) -> float:
    """Until then no event begins a cycle: what it would change was just tried."""
    last = state.cycle.finished_at if state.cycle is not None else None
    return 0.0 if last is None else last + REST_SECONDS


def count_new(state: CoordinatorState, facts: CycleFacts) -> int | None:
    return None if facts.rows is None else max(facts.rows - state.rows_counted, 0)


def next_scheduled(state: CoordinatorState, settings: CycleSettings, *, now: float) -> float | None:
    """The next time of the schedule. Times that were missed while nothing ran count once."""
    return next_date(settings, after=state.served_until or now)


def next_date(settings: CycleSettings, *, after: float) -> float | None:
    """The first time of the schedule after this moment."""
    if settings.schedule is None:
        return None
    return parse_cron(settings.schedule).next_after(after, ZoneInfo(settings.timezone))


def _in_cycle(cycle: CycleState, settings: CycleSettings, *, now: float, here: str) -> Action:
    step = cycle.current
    if step is None:
        return _close(cycle)
    if not is_free(step, here, now):
        return Rest(step.until, f"{step.holder} does {step.name}")
    if step.status == "waiting" and (why := why_skipped(cycle, step.name, settings)):
        return SkipStep(step.name, why)
    if step.name in settings.approve and step.name not in {approval.step for approval in cycle.approvals}:
        return AwaitApproval(step.name)
    if step.status == "waiting" and step.not_before > now:
        why = f"{step.name}: {step.summary.get('why', 'waiting')}"
        if step.failures:
            what = step.error.get("what", "")
            why = f"{step.name} failed {step.failures} time(s): {what}; retrying"
        return Rest(step.not_before, why)
    return DoStep(step.name)


def why_skipped(cycle: CycleState, step: str, settings: CycleSettings) -> str:
    """Why this cycle does without the step; empty if it does not."""
    if cycle.summary("plan").get("same_as_last"):
        return "nothing has changed since the last cycle"
    decision = cycle.summary("gate").get("decision")
    if step in AFTER_DEPLOY and decision != "deploy":
        return f"the gate said {str(decision).replace('_', ' ')}"
    if step == CANARY and settings.canary is None:
        return "no canary is configured"
    if step == DELIVER:
        if cycle.summary(PROMOTE).get("action") == "rolled_back":
            return "the release was rolled back"
        if not settings.deliver:
            return "no serving machine is configured"
    return ""


def _close(cycle: CycleState) -> Close:
    if cycle.summary("plan").get("same_as_last"):
        return Close("nothing_new", "data and settings have not changed since the last cycle")
    gate = cycle.summary("gate")
    if gate.get("decision") != "deploy":
        decision = str(gate.get("decision")).replace("_", " ")
        return Close("not_promoted", f"the gate said {decision}: {gate.get('reason', '')}")
    for step in (DELIVER, PROMOTE):
        summary = cycle.summary(step)
        if summary.get("action") == "rolled_back":
            return Close("rolled_back", str(summary.get("why", "")))
    release = str(cycle.summary("release").get("id", ""))[:12]
    return Close("promoted", f"release {release} is live")


STUCK = ("failed", "refused")


def find_notices(
    before: CoordinatorState, after: CoordinatorState, settings: CycleSettings, *, now: float
) -> tuple[Notice, ...]:
    """The notices for what happened between the two states, of the kinds that the settings ask for."""
    cycle = after.cycle
    if cycle is None:
        return ()
    previous = before.cycle if before.cycle is not None and before.cycle.number == cycle.number else None
    notices = _of_steps(previous, cycle, now)
    if not cycle.is_open and (previous is None or previous.is_open):
        kind = "failed" if cycle.outcome in STUCK else "finished"
        what = f"cycle {cycle.number} ended: {cycle.outcome.replace('_', ' ')}"
        notices.append(_notice(kind, cycle, now, what, key="end", why=cycle.reason, fix="graft up status"))
    if after.paused is not None and before.paused is None and after.paused.who == COORDINATOR:
        notices.append(_notice("paused", cycle, now, "the coordinator paused itself", why=after.paused.why))
    return tuple(notice for notice in notices if notice.kind in settings.notify.kinds)


COORDINATOR = "coordinator"
"""Who pauses the cycle after too many failures."""


def approval_notice(cycle: CycleState, step: str, *, now: float) -> Notice:
    return _notice(
        "approval",
        cycle,
        now,
        f"{step} waits for approval",
        key=step,
        why=_describe_gate(cycle),
        fix=f"graft up approve {step}, or graft up cancel",
    )


def _of_steps(previous: CycleState | None, cycle: CycleState, now: float) -> list[Notice]:
    notices = []
    for step in cycle.steps:
        earlier = previous.step(step.name) if previous is not None else None
        if earlier is not None and earlier.status == step.status and earlier.failures == step.failures:
            continue
        if step.name == "gate" and step.status == "done":
            notices.append(_notice("gate", cycle, now, _describe_gate(cycle)))
        action = step.summary.get("action")
        if step.name in (PROMOTE, DELIVER) and step.status == "done" and action:
            release = str(step.summary.get("release", ""))[:12]
            kind = "rolled_back" if action == "rolled_back" else "promoted"
            text = "was rolled back" if kind == "rolled_back" else f"is {step.summary.get('alias', 'live')}"
            if step.name == DELIVER and kind == "promoted":
                text = f"is served by {', '.join(step.summary.get('to', ()))}"
            why = str(step.summary.get("why", ""))
            notices.append(_notice(kind, cycle, now, f"release {release} {text}", key=step.name, why=why))
        if step.failures and step.status == "waiting":
            what = f"{step.name} failed ({step.error.get('what', 'a bug')}); retrying"
            key = f"{step.name}-{step.failures}"
            notices.append(_notice("failed", cycle, now, what, key=key, why=str(step.error.get("why", ""))))
    return notices


def _describe_gate(cycle: CycleState) -> str:
    gate = cycle.summary("gate")
    if not gate:
        return ""
    return f"the gate said {str(gate['decision']).replace('_', ' ')}: {gate.get('reason', '')}"


def _notice(
    kind: str, cycle: CycleState, now: float, what: str, *, key: str = "", why: str = "", fix: str = ""
) -> Notice:
    return Notice.model_validate(
        {
            "id": "-".join(part for part in (str(cycle.number), kind, key) if part),
            "kind": kind,
            "cycle": cycle.number,
            "at": now,
            "what": what,
            "why": why,
            "fix": fix,
        }
    )
