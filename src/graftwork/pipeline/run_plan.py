"""The whole run in time: which steps have to be done, and how long each is expected to take.

In: an open workplace and the pipeline's steps. Out: a RunPlan. Nothing is done, trained or loaded. A step is
up to date by the same rule as in the pipeline; what comes after a step that is not has to be done too.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from graftwork.model.shape import read_shape
from graftwork.pipeline.stage_times import (
    LogSize,
    estimate_training,
    expect_stage,
    gather_facts,
    known_device,
    size_of_logs,
)
from graftwork.pipeline.step import Made, Step
from graftwork.pipeline.workplace import Workplace
from graftwork.plan.stages import add_up
from graftwork.records.base import Figure
from graftwork.records.errors import GraftError
from graftwork.records.plan import Plan, RunPlan, StagePlan, StageState
from graftwork.records.verdict import Verdict

NOTHING = Figure.exact(0.0, "s")


def find_up_to_date(work: Workplace, steps: Sequence[Step], entry_of: Callable[[Step], str]) -> Made:
    """The outputs of the steps that would not be done again."""
    made, identities = Made({}), dict[str, str]()
    for step in steps:
        if any(need not in identities for need in step.needs):
            continue
        last = work.ledger.get(entry_of(step))
        if last is None:
            continue
        try:
            if last.fingerprint != step.inputs_of(work, made, identities).fingerprint:
                continue
            output = step.makes.model_validate(last.output)
            if not step.still_there(work, output):
                continue
        except (GraftError, ValueError):
            # A record of another version, or something is missing: the step says so when it is done.
            continue
        made.outputs[step.name] = output
        identities[step.name] = step.identity(output)
    return made


def plan_run(
    work: Workplace,
    steps: Sequence[Step],
    *,
    entry_of: Callable[[Step], str],
    only_after_deploy: Sequence[str],
    made: Made | None = None,
) -> RunPlan:
    """Every step with its state and its seconds, and all of them in minutes.

    `made` holds the outputs of the steps that are up to date, where that is known already.
    """
    made = find_up_to_date(work, steps, entry_of) if made is None else made
    size = size_of_logs(work)
    facts = gather_facts(work, made, size=size)
    verdict = made.outputs.get("gate")
    refused = isinstance(verdict, Verdict) and verdict.decision != "deploy"
    stages = []
    for step in steps:
        state: StageState = "to do"
        if step.name in made.outputs:
            state = "up to date"
        elif step.name in only_after_deploy:
            state = "not needed" if refused else "if the gate says deploy"
        seconds, runs = NOTHING, 0
        if state in ("to do", "if the gate says deploy"):
            if step.name == "train":
                seconds = _training(work, made, size)
            else:
                _, seconds, runs = expect_stage(work, facts, step.name)
        stages.append(StagePlan(stage=step.name, title=step.title, seconds=seconds, state=state, runs=runs))
    rough = "prepare" not in made.outputs or ("plan" not in made.outputs and "train" not in made.outputs)
    return RunPlan(
        stages=tuple(stages), minutes=add_up({one.stage: one.seconds for one in stages}), rough=rough
    )


def _training(work: Workplace, made: Made, size: LogSize) -> Figure:
    """As the plan has it, where there is one of the dataset as it is."""
    plan = made.outputs.get("plan")
    if isinstance(plan, Plan):
        minutes = plan.minutes
        return Figure(value=60 * minutes.value, low=60 * minutes.low, high=60 * minutes.high, unit="s")
    shape = read_shape(Path(work.base.folder))
    return estimate_training(work, shape, size=size, device=known_device(work))


def say_left(plan: RunPlan) -> str:
    """One sentence: how long the rest takes, and which stages take most of it."""
    left = [one for one in plan.stages if one.seconds.value > 0]
    longest = sorted(left, key=lambda one: -one.seconds.value)[:3]
    named = ", ".join(f"{one.stage} {one.seconds.value / 60:.1f}" for one in longest)
    minutes = plan.minutes
    return f"about {minutes.value:.1f} minutes to go ({minutes.low:.1f} to {minutes.high:.1f})" + (
        f": {named}" if named else ""
    )
