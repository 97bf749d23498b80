"""The steps of the pipeline as the diagram shows them: a state, a sign and a sentence each."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from graftwork.api.overview import Freshness, StepGlance
from graftwork.records.verdict import Verdict

ShownState = Literal["fresh", "done", "stale", "running", "refused", "missing", "waiting"]

SIGNS: dict[ShownState, str] = {
    "fresh": "✓",
    "done": "✓",
    "stale": "↻",
    "running": "▶",
    "refused": "✗",
    "missing": "○",
    "waiting": "…",
}
WORDS: dict[ShownState, str] = {
    "fresh": "up to date",
    "done": "done",
    "stale": "out of date",
    "running": "running",
    "refused": "refused",
    "missing": "not done yet",
    "waiting": "not due",
}


class ShownStep(NamedTuple):
    step: str
    title: str
    state: ShownState
    sign: str
    words: str
    because: str
    is_cause: bool
    """Whether `because` is a cause of its own, not only an earlier step that is out of date."""
    finished_at: str | None
    seconds: float | None


def draw_steps(
    glances: Sequence[StepGlance], verdict: Verdict | None, fresh: Freshness | None
) -> list[ShownStep]:
    """Without `fresh` it is only known which steps were done."""
    known = {state.step: state for state in fresh.steps} if fresh is not None else {}
    shown = []
    open_steps = {state.step for state in known.values() if state.state in ("running", "stale", "missing")}
    for glance in glances:
        state: ShownState = "done" if glance.finished_at else "missing"
        because, is_cause = "", False
        examined = known.get(glance.step)
        if examined is not None:
            state = "waiting" if examined.state == "not_due" else examined.state
            before = [f"`{name}`" for name in glance.needs if name in open_steps]
            is_cause = state == "stale" and not before
            because = "; ".join(examined.because)
            if before and state == "stale":
                because = f"needs {' and '.join(before)} first"
        elif glance.only_after_deploy and not glance.finished_at:
            state = "waiting"
        if glance.step == "gate" and state in ("fresh", "done") and verdict and verdict.decision != "deploy":
            state, because = "refused", f"{verdict.decision.replace('_', ' ')}: {verdict.reason}"
        shown.append(
            ShownStep(
                glance.step,
                glance.title,
                state,
                SIGNS[state],
                WORDS[state],
                because,
                is_cause,
                glance.finished_at,
                glance.seconds,
            )
        )
    return shown
