"""Which notices a change of the state makes: the difference of two states as messages for people."""

from graftwork.cycle.settings import DELIVER, PROMOTE, CycleSettings
from graftwork.cycle.state import CoordinatorState, CycleState, Notice

STUCK = ("failed", "refused")


def find_notices(
    before: CoordinatorState, after: CoordinatorState, settings: CycleSettings, *, now: float
) -> tuple[Notice, ...]:
    """The notices for what happened between the two states, of the kinds that the settings ask for."""
    cycle = after.cycle
    if cycle is None:
        return ()
    known = before.cycle if before.cycle is not None and before.cycle.number == cycle.number else None
    found = [*_of_steps(known, cycle, now), *_of_end(known, cycle, now)]
    if after.paused is not None and before.paused is None and after.paused.who == COORDINATOR:
        found.append(_notice("paused", cycle, now, "the coordinator paused itself", why=after.paused.why))
    return tuple(notice for notice in found if notice.kind in settings.notify.kinds)


COORDINATOR = "coordinator"
"""Who pauses after too many failures."""


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


def _of_steps(known: CycleState | None, cycle: CycleState, now: float) -> list[Notice]:
    found = []
    for step in cycle.steps:
        earlier = known.step(step.name) if known is not None else None
        if earlier is not None and earlier.status == step.status and earlier.failures == step.failures:
            continue
        if step.name == "gate" and step.status == "done":
            found.append(_notice("gate", cycle, now, _describe_gate(cycle)))
        action = step.summary.get("action")
        if step.name in (PROMOTE, DELIVER) and step.status == "done" and action:
            release = str(step.summary.get("release", ""))[:12]
            kind = "rolled_back" if action == "rolled_back" else "promoted"
            text = "was rolled back" if kind == "rolled_back" else f"is {step.summary.get('alias', 'live')}"
            if step.name == DELIVER and kind == "promoted":
                text = f"is served by {', '.join(step.summary.get('to', ()))}"
            why = str(step.summary.get("why", ""))
            found.append(_notice(kind, cycle, now, f"release {release} {text}", key=step.name, why=why))
        if step.failures and step.status == "waiting":
            what = f"{step.name} failed ({step.error.get('what', 'a bug')}); trying again"
            key = f"{step.name}-{step.failures}"
            found.append(_notice("failed", cycle, now, what, key=key, why=str(step.error.get("why", ""))))
    return found


def _of_end(known: CycleState | None, cycle: CycleState, now: float) -> list[Notice]:
    if cycle.is_open or (known is not None and not known.is_open):
        return []
    kind = "failed" if cycle.outcome in STUCK else "finished"
    what = f"cycle {cycle.number} ended: {cycle.outcome.replace('_', ' ')}"
    return [_notice(kind, cycle, now, what, key="end", why=cycle.reason, fix="graft up status")]


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
