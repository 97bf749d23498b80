"""Which steps are up to date, which are not and since which change, and what doing them takes.

In: an open workplace. Out: the state of each step in the order of the pipeline. Reads the logs to hash
them, and does nothing else: asking never starts a step.
"""

from dataclasses import replace
from typing import Literal

from graftwork.model.base import is_ready
from graftwork.pipeline import pipeline
from graftwork.pipeline.run_identity import starts_from_main
from graftwork.pipeline.step import Made, Step
from graftwork.pipeline.workplace import Workplace
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, Stale
from graftwork.records.plan import Plan
from graftwork.records.verdict import Verdict
from graftwork.store.runs import StepEntry

State = Literal["fresh", "stale", "missing", "not_due"]

MOST_REASONS = 3
READ_THE_BASE = ("audit", "prepare")
"""Steps whose inputs hold the base's revision: asking for it would make the base ready first."""


class StepState(Record):
    """`because` says what changed since a stale step was done, or why a step is not due."""

    step: str
    title: str
    state: State
    because: tuple[str, ...] = ()
    finished_at: str | None = None
    seconds: float | None = None
    expected_seconds: float | None = None
    """What doing it will take: by the plan, or as it took the last time. None where neither is known."""


def examine_steps(work: Workplace, *, upto: str | None = None) -> tuple[StepState, ...]:
    """The state of every step that `upto` needs, or of all."""
    wanted = pipeline.with_needs(upto) if upto else {step.name for step in pipeline.STEPS}
    walk = _Walk(work)
    return tuple(walk.examine(step) for step in pipeline.STEPS if step.name in wanted)


def require_fresh(work: Workplace, *, upto: str, update: str) -> None:
    """Refuse where something that `upto` needs is out of date; `update` is the command that does it."""
    if starts_from_main(work):
        require_fresh(replace(work, asked_model=None), upto="train", update=update)
    states = examine_steps(work, upto=upto)
    open_ones = [state for state in states if state.state in ("stale", "missing")]
    # Judging itself takes no time: what is only judged anew is not out of date.
    if upto == "gate" and not [state for state in open_ones if state.step != "gate"]:
        return
    if not open_ones:
        return
    raise Stale(
        f"{_list_steps(open_ones)} {'is' if len(open_ones) == 1 else 'are'} not up to date",
        why="; ".join(_explain(state) for state in open_ones if state.step != "gate"),
        fix=f"`{update}` does {'it' if len(open_ones) == 1 else 'them'} first"
        + (f" (about {_in_words(taken)})" if (taken := expect_seconds(open_ones)) else "")
        + "; `graft status` shows every step",
        where=work.model,
    )


def expect_seconds(states: list[StepState] | tuple[StepState, ...]) -> float | None:
    """What doing these takes together; None where nothing is known of one that takes long."""
    known = [state.expected_seconds for state in states if state.expected_seconds is not None]
    unknown = [state.step for state in states if state.expected_seconds is None]
    return None if not known or {"train", "evaluate"} & set(unknown) else sum(known)


class _Walk:
    """Goes through the steps as a run does, on what is there."""

    def __init__(self, work: Workplace) -> None:
        self._work = work
        self._made, self._identities = Made({}), dict[str, str]()
        self._open: set[str] = set()
        self._plan: Plan | None = None

    def examine(self, step: Step) -> StepState:
        entry = self._work.ledger.get(pipeline.name_entry(self._work, step.name))
        state = self._judge(step, entry)
        if state.state != "fresh":
            self._open.add(step.name)
        return state

    def _judge(self, step: Step, entry: StepEntry | None) -> StepState:
        found = StepState(
            step=step.name,
            title=step.title,
            state="missing",
            finished_at=entry.finished_at if entry else None,
            seconds=entry.seconds if entry else None,
            expected_seconds=self._expect(step, entry),
        )
        if step.name in pipeline.ONLY_AFTER_DEPLOY and not self._may_deploy():
            return found.model_copy(update={"state": "not_due", "because": ("the gate has not said deploy",)})
        if entry is None:
            return found
        because = self._find_changes(step, entry)
        return found.model_copy(update={"state": "stale" if because else "fresh", "because": because})

    def _find_changes(self, step: Step, entry: StepEntry) -> tuple[str, ...]:
        """What speaks against the last result of a step; nothing where it is up to date."""
        open_needs = [name for name in step.needs if name in self._open]
        if open_needs:
            return tuple(f"`{name}` has to be done before it" for name in open_needs)
        if step.name in READ_THE_BASE and not is_ready(self._work.settings.base):
            return ("the base model is not on this machine yet",)
        try:
            output = step.makes.model_validate(entry.output)
            changes = self._compare_inputs(step, entry)
        except ValueError:
            return ("it was done by another version of graftwork",)
        except GraftError as error:
            return (error.what,)
        if not changes and not step.still_there(self._work, output):
            changes = ("its files are gone",)
        if not changes:
            self._made.outputs[step.name] = output
            self._identities[step.name] = step.identity(output)
            self._plan = output if isinstance(output, Plan) else self._plan
        return changes

    def _compare_inputs(self, step: Step, entry: StepEntry) -> tuple[str, ...]:
        now = step.inputs_of(self._work, self._made, self._identities)
        if now.fingerprint == entry.fingerprint:
            return ()
        known = self._work.ledger.get(pipeline.name_inputs(self._work, step.name))
        changes = now.changes_since(known.output) if known is not None else ()
        return _cut(changes) or ("its settings or inputs have changed",)

    def _may_deploy(self) -> bool:
        verdict = self._made.outputs.get("gate")
        return isinstance(verdict, Verdict) and verdict.decision == "deploy"

    def _expect(self, step: Step, entry: StepEntry | None) -> float | None:
        if step.name == "train" and self._plan is not None:
            return self._plan.minutes.value * 60
        return entry.seconds if entry else None


def _cut(reasons: tuple[str, ...]) -> tuple[str, ...]:
    rest = len(reasons) - MOST_REASONS
    return reasons if rest <= 0 else (*reasons[:MOST_REASONS], f"and {rest} more changes")


def _list_steps(states: list[StepState]) -> str:
    return ", ".join(f"`{state.step}`" for state in states)


def _explain(state: StepState) -> str:
    if state.state == "missing":
        return f"`{state.step}` was never done"
    return f"`{state.step}` is stale: {', '.join(state.because)}"


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
