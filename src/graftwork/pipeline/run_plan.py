"""The time of a whole run: which steps have to be done, how long each should take, and how long it took.

Input: an open project and the steps of its pipeline. Output: a RunPlan; for each step that was done a
StageTime in the ledger, which `graft status --json` shows part by part. Nothing is done, trained or loaded.
What comes after a step that is out of date has to be done too.
"""

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from graftwork.data.ingest.files import STANDARD_INPUT, find_sources
from graftwork.data.project import PreparedData
from graftwork.evaluate.project import Evaluated
from graftwork.evaluate.project_subjects import rows_at_once
from graftwork.files.dataset import iterate_rows
from graftwork.model.generate.scheduler import common_length
from graftwork.model.probe import describe_device, name_device
from graftwork.model.shape import linear_names, read_shape
from graftwork.pipeline.step import PipelineStep, StepOutputs, StepWalk
from graftwork.pipeline.steps.plan import kind_of_run, repeated_steps
from graftwork.pipeline.steps.release import QUESTIONS, TryOut
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.estimate import SPEED, TIME, RunStart, minutes_by_part, tokens_per_second
from graftwork.plan.project import gpu_rates, plan_tuning
from graftwork.plan.stages import (
    MEASURED,
    AnswerLoad,
    StageFacts,
    add_up,
    estimate_stage,
    pool_stage,
    residual_name,
)
from graftwork.process.preload import is_supported
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import MIB, Figure, Record
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.plan import (
    CpuStepPlan,
    DeviceFacts,
    ModelShape,
    Plan,
    Residual,
    RunPlan,
    StagePlan,
    StageState,
    Workload,
)
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.store.runs import STAGE
from graftwork.train.engine_choice import why_plain_step

SAMPLE_BYTES = 4 * MIB
SAMPLE_ROWS = 200
CHARACTERS_PER_TOKEN = 3.5
REPLY_SHARE = 0.2
"""Share of a logged row that is its reply, if nothing is prepared yet."""
MOST_CASES = 500
"""Cases whose lengths are sampled."""
WITH_EXAMPLE = 1.2
"""Tokens that a base generates per logged token: it was not trained on the task."""
TRIED_ROWS = 8
"""Most requests that the serving check's engine answers at once."""


class LogSize(NamedTuple):
    """Size of all log files together; rows and their text are counted in a sample."""

    bytes: int
    rows: int
    text_share: float = 1.0
    """Share of the bytes that is text, without keys, ids and times."""

    @property
    def tokens_per_row(self) -> float:
        return self.bytes * self.text_share / max(self.rows, 1) / CHARACTERS_PER_TOKEN


def size_of_logs(work: OpenProject) -> LogSize:
    """Estimate from the files' sizes and the lines at their start."""
    total, bytes_read, lines = 0, 0, 0
    text, read = 0, 0
    for name in find_sources(work.settings.data.logs, root=work.project.root):
        if name == STANDARD_INPUT:
            continue
        path = work.project.root / name
        total += path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(max(SAMPLE_BYTES - bytes_read, 0))
        bytes_read += len(beginning)
        lines += beginning.count(b"\n") + (not beginning.endswith(b"\n") and bool(beginning))
        for line in beginning.splitlines()[:SAMPLE_ROWS]:
            with suppress(ValueError):
                text += _text_bytes(orjson.loads(line))
                read += len(line)
    return LogSize(
        total, round(lines * total / bytes_read) if bytes_read else 0, text / read if text else 1.0
    )


def _text_bytes(value: Any) -> int:
    """Characters of all texts of more than one word."""
    if isinstance(value, str):
        return len(value) if " " in value else 0
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_text_bytes(part) for part in parts)


def known_device(work: OpenProject) -> DeviceFacts:
    """The device as the last plan of this project measured it; else what can be determined quickly."""
    entry, device = work.ledger.get("plan"), name_device()
    here = None
    if device.kind == "cuda":
        # As the catalog knows the GPU, if it does.
        with suppress(UserError):
            gpu = find_gpu(device.name)
            facts = {"memory_gib": gpu.memory_gib, "capability": gpu.capability}
            here = describe_device().model_copy(update={"kind": "cuda", "name": device.name, **facts})
    here = here or describe_device(threads=work.settings.train.threads)
    if entry is None:
        return here
    planned = Plan.model_validate(entry.output).device
    return planned if (planned.kind, planned.threads) == (here.kind, here.threads) else here


def gather_facts(work: OpenProject, outputs: StepOutputs, *, size: LogSize) -> StageFacts:
    """From the prepared dataset if there is one, else from the size of the logs."""
    settings, plan = work.settings.evaluate, outputs.outputs.get("plan")
    device = plan.device if isinstance(plan, Plan) else known_device(work)
    shape = read_shape(Path(work.base.folder))
    base, trained = _expect_answers(
        work, outputs, size, rows=settings.batch_size or rows_at_once(device.kind)
    )
    # Base and release on the same questions. Without an example the base goes on to the limit.
    most = settings.max_new_tokens
    tried = trained.model_copy(
        update={
            "cases": 2 * QUESTIONS,
            "rows": TRIED_ROWS,
            "answer_tokens": (trained.answer_tokens + most) / 2,
            "longest_answer": float(most),
        }
    )
    further = [name for name in settings.subjects if name not in ("base", "adapter", "log", "champion")]
    other_subjects = bool(work.releases.aliases()) + len(further)
    return StageFacts(
        log_bytes=size.bytes,
        shape=shape,
        device=device,
        rates=gpu_rates(work, device, shape),
        forked=is_supported(),
        answers=(base, trained, *[trained] * other_subjects),
        tried=tried,
        timed_cases=settings.latency_cases,
        repeats=settings.repeats if settings.sampling.temperature > 0 else 1,
    )


def _expect_answers(
    work: OpenProject, outputs: StepOutputs, size: LogSize, *, rows: int
) -> tuple[AnswerLoad, AnswerLoad]:
    """Expected answers of the base, and of a model that was trained on the task."""
    settings = work.settings.evaluate
    prepared = outputs.outputs.get("prepare")
    test = prepared.dataset.splits.get("test") if isinstance(prepared, PreparedData) else None
    rows_seen: Sequence[Row] = ()
    if isinstance(prepared, PreparedData) and test is not None and test.rows:
        cases = test.rows
        rows_seen = list(islice(iterate_rows(Path(prepared.folder), "test"), MOST_CASES))
    if rows_seen:
        replies = [len(row.tokens) - row.trained_from for row in rows_seen]
        reply, longest = fmean(replies), float(max(replies))
        prompt = fmean(row.trained_from for row in rows_seen)
        shared = float(common_length([row.tokens[: row.trained_from] for row in rows_seen]))
    else:
        cases = round(size.rows * work.settings.data.test)
        reply, shared = max(size.tokens_per_row * REPLY_SHARE, 1.0), 0.0
        longest, prompt = 2 * reply, max(size.tokens_per_row - reply, 1.0)
    most = float(settings.max_new_tokens)
    trained = AnswerLoad(
        cases=min(cases, settings.max_cases or cases),
        rows=rows,
        prompt_tokens=prompt,
        shared_tokens=shared,
        answer_tokens=min(reply, most),
        longest_answer=min(longest, most),
    )
    # The worked example is a row without its system prompt.
    example = prompt - shared + reply
    base = trained.model_copy(
        update={
            "prompt_tokens": prompt + example,
            "shared_tokens": shared + example,
            "answer_tokens": min(WITH_EXAMPLE * reply, most),
            "longest_answer": most,
        }
    )
    return base, trained


class PlannedStage(Record):
    """A stage before it is done."""

    seconds: Figure
    parts: dict[str, float] = {}


class StageTime(Record):
    """The last time that a step was done. Parts are seconds; parts that were not measured are absent."""

    seconds: float
    planned: Figure
    planned_parts: dict[str, float] = {}
    parts: dict[str, float] = {}


def planned_training(plan: Plan) -> PlannedStage:
    minutes, head = plan.minutes, f"{TIME}."
    return PlannedStage(
        seconds=Figure(value=60 * minutes.value, low=60 * minutes.low, high=60 * minutes.high, unit="s"),
        parts={
            name.removeprefix(head): 60 * figure.value
            for name, figure in plan.parts.items()
            if name.startswith(head)
        },
    )


def note_time(
    work: OpenProject, entry: str, planned: PlannedStage, *, output: Record, seconds: float
) -> None:
    """Store it under the name of the step's own entry."""
    time = StageTime(
        seconds=seconds,
        planned=planned.seconds,
        planned_parts=planned.parts,
        parts={name: part_seconds for name, part_seconds in measured_parts(output).items() if part_seconds},
    )
    work.ledger.put(
        _name(entry),
        fingerprint=time.fingerprint(),
        output=time.model_dump(mode="json"),
        finished_at=timestamp(),
        seconds=0.0,
    )


def read_time(work: OpenProject, entry: str) -> StageTime | None:
    last = work.ledger.get(_name(entry))
    try:
        return None if last is None else StageTime.model_validate(last.output)
    except ValueError:
        return None  # of another version


def measured_parts(output: Record) -> Mapping[str, float]:
    """Seconds of what was measured apart."""
    if isinstance(output, TrainOutcome):
        head = f"{TIME}."
        return {
            residual.name.removeprefix(head): 60 * residual.actual
            for residual in output.residual_parts
            if residual.name.startswith(head)
        }
    if isinstance(output, Evaluated):
        report = output.report
        subjects = (report.baseline, report.candidate, *report.others)
        generations = [subject.generation for subject in subjects if subject.subject != "log"]
        return {
            "load": sum(generation.times.get("load", 0.0) for generation in generations),
            "recording": sum(generation.times.get("recording", 0.0) for generation in generations),
            "answering": sum(generation.seconds for generation in generations),
            "single requests": sum(sum(generation.single_latency_seconds) for generation in generations),
        }
    return output.seconds if isinstance(output, TryOut) else {}


def _name(entry: str) -> str:
    return f"{entry}.time"


ROUGH_SPREAD = 2.0
"""Further factor, either way, on estimates from the size of the logs."""
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
    residual = Residual(name=residual_name(stage), planned=prior, actual=seconds)
    work.residuals.add(
        f"{STAGE}{stage}:{uuid.uuid4().hex}",
        device=_device_of(stage),
        base=_kind(work, stage),
        found=[residual],
        when=timestamp(),
    )


def _device_of(stage: str) -> str:
    """The device that the time of a stage depends on: a GPU if a model answers, else the CPU."""
    return name_device().name if stage in WITH_BASE else describe_device().name


def time_spent(stage: str, output: Record, seconds: float) -> float:
    """Time that the stage would have taken from scratch: cached answers count too."""
    if stage != "evaluate" or not isinstance(output, Evaluated):
        return seconds
    subjects = (output.report.baseline, output.report.candidate, *output.report.others)
    answering = sum(subject.generation.seconds for subject in subjects if subject.subject != "log")
    return max(seconds, answering)


def estimate_training(work: OpenProject, shape: ModelShape, *, size: LogSize, device: DeviceFacts) -> Figure:
    """Seconds of training from the size of the logs, if nothing is prepared yet: rough."""
    settings, data = work.settings.train, work.settings.data
    length = max(round(size.tokens_per_row), 2)
    length = min(length, data.max_tokens or length)
    rows = max(round(size.rows * (1 - data.test - data.validation)), 1)
    rows = min(rows, settings.max_rows or rows)
    counted = min(rows, MOST_LENGTHS)
    repeated = repeated_steps(settings)
    own_step = None
    if device.kind == "cpu" and not why_plain_step(settings, shape, device="cpu", precision="float32"):
        # The step that is written for CPUs, with the usual savings.
        own_step = CpuStepPlan(
            packed=True, kept="memory", distinct_tokens=length * counted, restarted=repeated is not None
        )
    load = Workload(
        lengths=(length,) * counted,
        trained_tokens=max(round(length * REPLY_SHARE), 1) * counted,
        batch_size=settings.batch_size,
        epochs=settings.epochs,
        rank=settings.rank,
        targets=linear_names(shape) if settings.target_modules == "all" else settings.target_modules,
        adapted_layers=min(settings.upper_layers or shape.layers, shape.layers),
        method=settings.method,
        cpu_step=own_step,
    )
    recent = work.residuals.recent(device=device.name, base=kind_of_run(work))
    rates = gpu_rates(work, device, shape)
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


def _kind(work: OpenProject, stage: str) -> str:
    """Stages of one kind can be compared."""
    return f"{STAGE}{stage}:{work.base.revision[:12]}" if stage in WITH_BASE else f"{STAGE}{stage}"


NOTHING = Figure.exact(0.0, "s")


def plan_run(
    work: OpenProject,
    steps: Sequence[PipelineStep],
    *,
    only_after_deploy: Sequence[str],
    outputs: StepOutputs | None = None,
) -> RunPlan:
    """Every step with its state and its seconds, and all of them in minutes.

    `outputs` holds the outputs of the steps that are up to date, where that is already known.
    """
    if outputs is None:
        # Whether a dataset is up to date depends on the base, which the estimate reads too.
        walk, _ = StepWalk(work), work.base
        for step in steps:
            walk.take_if_fresh(step)
        outputs = walk.outputs
    size = size_of_logs(work)
    facts = gather_facts(work, outputs, size=size)
    verdict = outputs.outputs.get("gate")
    refused = isinstance(verdict, Verdict) and verdict.decision != "deploy"
    stages = []
    for step in steps:
        state: StageState = "to do"
        if step.name in outputs.outputs:
            state = "up to date"
        elif step.name in only_after_deploy:
            state = "not needed" if refused else "if the gate says deploy"
        seconds, runs = NOTHING, 0
        if state in ("to do", "if the gate says deploy"):
            plan = outputs.outputs.get("plan")
            if step.name == "train" and isinstance(plan, Plan):
                # As the plan has it, where there is one of the dataset as it is.
                seconds = planned_training(plan).seconds
            elif step.name == "train":
                shape = read_shape(Path(work.base.folder))
                seconds = estimate_training(work, shape, size=size, device=known_device(work))
            else:
                _, seconds, runs = expect_stage(work, facts, step.name)
        stages.append(StagePlan(stage=step.name, title=step.title, seconds=seconds, state=state, runs=runs))
    rough = "prepare" not in outputs.outputs or (
        "plan" not in outputs.outputs and "train" not in outputs.outputs
    )
    return RunPlan(
        stages=tuple(stages), minutes=add_up({stage.stage: stage.seconds for stage in stages}), rough=rough
    )


def describe_remaining(plan: RunPlan) -> str:
    """One sentence: how long the rest takes, and which stages take most of it."""
    remaining = [stage for stage in plan.stages if stage.seconds.value > 0]
    longest = sorted(remaining, key=lambda item: -item.seconds.value)[:3]
    longest_stages = ", ".join(f"{stage.stage} {stage.seconds.value / 60:.1f}" for stage in longest)
    minutes = plan.minutes
    return f"about {minutes.value:.1f} minutes to go ({minutes.low:.1f} to {minutes.high:.1f})" + (
        f": {longest_stages}" if longest_stages else ""
    )
