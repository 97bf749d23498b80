"""The whole run in time: which steps have to be done, and how long each is expected to take.

In: an open project and the pipeline's steps. Out: a RunPlan. Nothing is done, trained or loaded. A step is
up to date by the same rule as in the pipeline; what comes after a step that is not has to be done too.
"""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from graftwork.costmodel.processor import why_plain_here
from graftwork.data.ingest.files import STANDARD_INPUT
from graftwork.data.ingest.read import find_files
from graftwork.model.probe import describe_device
from graftwork.model.shape import linear_names, read_shape
from graftwork.pipeline.evaluation import Evaluated
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.plan_card import base_config
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.plan import kind_of_run
from graftwork.plan.estimate import minutes_by_part, tokens_per_second
from graftwork.plan.residuals import SPEED
from graftwork.plan.stages import MEASURED, StageFacts, add_up, estimate_stage, pool_stage, residual_name
from graftwork.records.base import Figure, Record
from graftwork.records.errors import GraftError
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
from graftwork.records.units import MIB
from graftwork.records.verdict import Verdict
from graftwork.store.runs import STAGE

SAMPLE_BYTES = 4 * MIB
SAMPLE_ROWS = 200
CHARACTERS_A_TOKEN = 3.5
REPLY_SHARE = 0.2
"""Of a logged row, where nothing is prepared yet."""
ROUGH_SPREAD = 2.0
"""Further factor, either way, on what is estimated from the size of the logs."""
MOST_LENGTHS = 2000
WITH_BASE = ("evaluate", "try")
"""Stages whose time depends on the base."""


class LogSize(NamedTuple):
    """Of all log files together; rows and their text are counted in a sample."""

    bytes: int
    rows: int
    text_share: float = 1.0
    """Of the bytes: sentences, without keys, ids and times."""

    @property
    def tokens_a_row(self) -> float:
        return self.bytes * self.text_share / max(self.rows, 1) / CHARACTERS_A_TOKEN


def size_of_logs(work: OpenProject) -> LogSize:
    """From the files' sizes and the lines of their beginnings."""
    total, seen, lines = 0, 0, 0
    text, read = 0, 0
    for name in find_files(work.settings.data.logs, root=work.project.root):
        if name == STANDARD_INPUT:
            continue
        path = work.project.root / name
        total += path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(max(SAMPLE_BYTES - seen, 0))
        seen += len(beginning)
        lines += beginning.count(b"\n") + (not beginning.endswith(b"\n") and bool(beginning))
        for line in beginning.splitlines()[:SAMPLE_ROWS]:
            with suppress(ValueError):
                text += _text_bytes(orjson.loads(line))
                read += len(line)
    return LogSize(total, round(lines * total / seen) if seen else 0, text / read if text else 1.0)


def _text_bytes(value: Any) -> int:
    """Characters of all texts of more than one word."""
    if isinstance(value, str):
        return len(value) if " " in value else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_text_bytes(part) for part in parts)


def known_device(work: OpenProject) -> DeviceFacts:
    """As the last plan of this project measured it; else what can be known at once."""
    entry = work.ledger.get("plan")
    here = describe_device(threads=work.settings.train.threads)
    if entry is None:
        return here
    planned = Plan.model_validate(entry.output).device
    return planned if planned.threads == here.threads else here


def gather_facts(work: OpenProject, made: StepOutputs, *, size: LogSize) -> StageFacts:
    """From the prepared dataset where there is one, else from the size of the logs."""
    settings = work.settings
    prepared = made.outputs.get("prepare")
    plan = made.outputs.get("plan")
    test = prepared.dataset.splits.get("test") if isinstance(prepared, PreparedData) else None
    if test is not None and test.rows:
        cases, reply = test.rows, test.trained_tokens / test.rows
        prompt = test.tokens / test.rows - reply
    else:
        a_row = size.tokens_a_row
        cases, reply = round(size.rows * settings.data.test), a_row * REPLY_SHARE
        prompt = a_row - reply
    further = [name for name in settings.evaluate.subjects if name not in ("base", "adapter", "log")]
    champion = bool(work.releases.aliases())
    return StageFacts(
        log_bytes=size.bytes,
        shape=read_shape(Path(work.base.folder)),
        device=plan.device if isinstance(plan, Plan) else known_device(work),
        cases=min(cases, settings.evaluate.max_cases or cases),
        subjects=2 + champion + len([name for name in further if name != "champion"]),
        prompt_tokens=max(prompt, 1.0),
        # A base that was never trained on the task goes on for longer.
        answer_tokens=min(1.5 * max(reply, 1.0), float(settings.evaluate.max_new_tokens)),
        timed_cases=settings.evaluate.latency_cases,
        repeats=settings.evaluate.repeats if settings.evaluate.sampling.temperature > 0 else 1,
    )


def expect_stage(work: OpenProject, facts: StageFacts, stage: str) -> tuple[Figure, Figure, int]:
    """The estimate without past runs, the one with them, and how many these were."""
    prior = estimate_stage(stage, facts)
    past = work.residuals.recent(device=describe_device().name, base=_kind(work, stage))
    return prior, *pool_stage(stage, prior, past)


def record_stage(work: OpenProject, stage: str, prior: Figure, *, seconds: float) -> None:
    """Record the measured time of a stage next to the estimate."""
    if stage not in MEASURED:
        return
    found = Residual(name=residual_name(stage), planned=prior, actual=seconds)
    work.residuals.add(
        f"{STAGE}{stage}:{uuid.uuid4().hex}",
        device=describe_device().name,
        base=_kind(work, stage),
        found=[found],
        when=timestamp(),
    )


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
        processor=_own_step(work, device, tokens=length * counted),
    )
    recent = work.residuals.recent(device=device.name, base=kind_of_run(work))
    speed = tokens_per_second(
        shape, load, device, learned=tuple(residual.actual for residual in recent if residual.name == SPEED)
    )
    parts = minutes_by_part(shape, load, speed, kind=device.kind).values()
    # `load` holds at most `MOST_LENGTHS` of the rows.
    scale = 60 * rows / counted
    return Figure(
        value=sum(part.value for part in parts) * scale,
        low=sum(part.low for part in parts) * scale / ROUGH_SPREAD,
        high=sum(part.high for part in parts) * scale * ROUGH_SPREAD,
        unit="s",
    )


def _own_step(work: OpenProject, device: DeviceFacts, *, tokens: int) -> ProcessorStep | None:
    """The step that is written for processors, where such a run would take it: with the usual savings."""
    settings = work.settings.train
    plain = why_plain_here(
        base_config(work), method=settings.method, dtype="float32", alone=settings.processes == 1
    )
    if device.kind != "cpu" or plain is not None:
        return None
    return ProcessorStep(packed=True, kept="memory", distinct_tokens=tokens)


def _kind(work: OpenProject, stage: str) -> str:
    """Stages of one kind can be compared."""
    return f"{STAGE}{stage}:{work.base.revision[:12]}" if stage in WITH_BASE else f"{STAGE}{stage}"


NOTHING = Figure.exact(0.0, "s")


def find_up_to_date(
    work: OpenProject, steps: Sequence[PipelineStep], entry_of: Callable[[PipelineStep], str]
) -> StepOutputs:
    """The outputs of the steps that would not be done again."""
    made, identities = StepOutputs({}), dict[str, str]()
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
    work: OpenProject,
    steps: Sequence[PipelineStep],
    *,
    entry_of: Callable[[PipelineStep], str],
    only_after_deploy: Sequence[str],
    made: StepOutputs | None = None,
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
