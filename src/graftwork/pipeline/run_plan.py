"""The whole run in time: which steps have to be done, and how long each is expected to take.

In: an open project and the pipeline's steps. Out: a RunPlan. Nothing is done, trained or loaded. A step is
up to date by the same rule as in the pipeline; what comes after a step that is not has to be done too.
"""

import uuid
from collections.abc import Sequence
from pathlib import Path

from graftwork.costmodel.processor import why_plain_on_cpu
from graftwork.model.probe import describe_device, name_device
from graftwork.model.shape import linear_names, read_shape
from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.plan_card import card_rates, plan_tuning
from graftwork.pipeline.stage_facts import REPLY_SHARE, LogSize, gather_facts, known_device, size_of_logs
from graftwork.pipeline.step import PipelineStep, StepOutputs, StepWalk
from graftwork.pipeline.steps.plan import kind_of_run, repeated_steps
from graftwork.plan.estimate import RunStart, minutes_by_part, tokens_per_second
from graftwork.plan.residuals import SPEED
from graftwork.plan.stages import MEASURED, StageFacts, add_up, estimate_stage, pool_stage, residual_name
from graftwork.process.preload import is_supported
from graftwork.records.base import Figure, Record
from graftwork.records.plan import (
    DeviceFacts,
    ModelShape,
    Plan,
    ProcessorStep,
    Residual,
    RunPlan,
    StagePlan,
    StageState,
    Workload,
)
from graftwork.records.report import Verdict
from graftwork.store.runs import STAGE

ROUGH_SPREAD = 2.0
"""Further factor, either way, on what is estimated from the size of the logs."""
MOST_LENGTHS = 2000
WITH_BASE = ("evaluate", "try")
"""Stages whose time depends on the base."""


def expect_stage(work: OpenProject, facts: StageFacts, stage: str) -> tuple[Figure, Figure, int]:
    """The estimate without past runs, the one with them, and how many these were."""
    prior = estimate_stage(stage, facts)
    past = work.residuals.recent(device=_device_of(stage), base=_kind(work, stage))
    return prior, *pool_stage(stage, prior, past)


def record_stage(work: OpenProject, stage: str, prior: Figure, *, seconds: float) -> None:
    """Record the measured time of a stage next to the estimate."""
    if stage not in MEASURED:
        return
    found = Residual(name=residual_name(stage), planned=prior, actual=seconds)
    work.residuals.add(
        f"{STAGE}{stage}:{uuid.uuid4().hex}",
        device=_device_of(stage),
        base=_kind(work, stage),
        found=[found],
        when=timestamp(),
    )


def _device_of(stage: str) -> str:
    """What the time of a stage depends on: a card where a model answers, else the processor."""
    return name_device().name if stage in WITH_BASE else describe_device().name


def time_spent(stage: str, output: Record, seconds: float) -> float:
    """What the stage would have taken with nothing left from before: answers that were kept count too."""
    if stage != "evaluate" or not isinstance(output, Evaluated):
        return seconds
    subjects = (output.report.baseline, output.report.candidate, *output.report.others)
    answering = sum(subject.generation.seconds for subject in subjects if subject.subject != "log")
    return max(seconds, answering)


def estimate_training(work: OpenProject, shape: ModelShape, *, size: LogSize, device: DeviceFacts) -> Figure:
    """Seconds of training from the size of the logs, where nothing is prepared yet: rough."""
    settings, data = work.settings.train, work.settings.data
    length = max(round(size.tokens_a_row), 2)
    length = min(length, data.max_tokens or length)
    rows = max(round(size.rows * (1 - data.test - data.validation)), 1)
    rows = min(rows, settings.max_rows or rows)
    counted = min(rows, MOST_LENGTHS)
    load = Workload(
        lengths=(length,) * counted,
        trained_tokens=max(round(length * REPLY_SHARE), 1) * counted,
        batch_rows=settings.batch_rows,
        epochs=settings.epochs,
        rank=settings.rank,
        targets=linear_names(shape) if settings.targets == "all" else settings.targets,
        adapted_layers=min(settings.upper_layers or shape.layers, shape.layers),
        method=settings.method,
        processor=_own_step(work, shape, device, tokens=length * counted),
    )
    recent = work.residuals.recent(device=device.name, base=kind_of_run(work))
    rates, repeated = card_rates(work, device, shape), repeated_steps(settings)
    tuning = plan_tuning(work, device, shape, load, rates=rates)
    speed = tokens_per_second(
        shape,
        load,
        device,
        learned=tuple(residual.actual for residual in recent if residual.name == SPEED),
        tuning=tuning,
        rates=rates,
    )
    start = RunStart(device.kind, tuning=tuning, forked=is_supported(), repeated_steps=repeated)
    parts = minutes_by_part(shape, load, speed, start).values()
    # `load` holds at most `MOST_LENGTHS` of the rows.
    scale = 60 * rows / counted
    return Figure(
        value=sum(part.value for part in parts) * scale,
        low=sum(part.low for part in parts) * scale / ROUGH_SPREAD,
        high=sum(part.high for part in parts) * scale * ROUGH_SPREAD,
        unit="s",
    )


def _own_step(
    work: OpenProject, shape: ModelShape, device: DeviceFacts, *, tokens: int
) -> ProcessorStep | None:
    """The step that is written for processors, where such a run would take it: with the usual savings."""
    settings = work.settings.train
    plain = why_plain_on_cpu(shape, method=settings.method, dtype="float32", alone=settings.processes == 1)
    if device.kind != "cpu" or plain is not None:
        return None
    return ProcessorStep(
        packed=True,
        kept="memory",
        distinct_tokens=tokens,
        restarted=repeated_steps(settings) is not None,
    )


def _kind(work: OpenProject, stage: str) -> str:
    """Stages of one kind can be compared."""
    return f"{STAGE}{stage}:{work.base.revision[:12]}" if stage in WITH_BASE else f"{STAGE}{stage}"


NOTHING = Figure.exact(0.0, "s")


def plan_run(
    work: OpenProject,
    steps: Sequence[PipelineStep],
    *,
    only_after_deploy: Sequence[str],
    made: StepOutputs | None = None,
) -> RunPlan:
    """Every step with its state and its seconds, and all of them in minutes.

    `made` holds the outputs of the steps that are up to date, where that is known already.
    """
    if made is None:
        # Whether a dataset is up to date depends on the base, which the estimate reads too.
        walk, _ = StepWalk(work), work.base
        for step in steps:
            walk.take_if_fresh(step)
        made = walk.made
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
        stages=tuple(stages), minutes=add_up({stage.stage: stage.seconds for stage in stages}), rough=rough
    )


def _training(work: OpenProject, made: StepOutputs, size: LogSize) -> Figure:
    """As the plan has it, where there is one of the dataset as it is."""
    plan = made.outputs.get("plan")
    if isinstance(plan, Plan):
        minutes = plan.minutes
        return Figure(value=60 * minutes.value, low=60 * minutes.low, high=60 * minutes.high, unit="s")
    shape = read_shape(Path(work.base.folder))
    return estimate_training(work, shape, size=size, device=known_device(work))


def describe_remaining(plan: RunPlan) -> str:
    """One sentence: how long the rest takes, and which stages take most of it."""
    left = [stage for stage in plan.stages if stage.seconds.value > 0]
    longest = sorted(left, key=lambda item: -item.seconds.value)[:3]
    named = ", ".join(f"{stage.stage} {stage.seconds.value / 60:.1f}" for stage in longest)
    minutes = plan.minutes
    return f"about {minutes.value:.1f} minutes to go ({minutes.low:.1f} to {minutes.high:.1f})" + (
        f": {named}" if named else ""
    )
