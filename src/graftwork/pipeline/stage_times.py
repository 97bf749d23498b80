"""How long the stages of this project take: what their time depends on, and what earlier runs took.

In: an open workplace, the outputs of the steps that are up to date. Out: facts and figures; after a step its
time is recorded, so that the next plan knows better. Loads no model.
"""

import uuid
from pathlib import Path
from typing import NamedTuple

from graftwork.data.read import find_files
from graftwork.data.sources.blocks import STANDARD_INPUT
from graftwork.model.probe import describe_device
from graftwork.model.shape import linear_names, read_shape
from graftwork.pipeline.step import Made
from graftwork.pipeline.steps.evaluate import Evaluated
from graftwork.pipeline.steps.plan import kind_of_run
from graftwork.pipeline.steps.prepare import Prepared
from graftwork.pipeline.workplace import Workplace, now
from graftwork.plan.estimate import minutes_by_part
from graftwork.plan.residuals import SPEED
from graftwork.plan.speed import tokens_per_second
from graftwork.plan.stages import MEASURED, StageFacts, estimate_stage, pool_stage, residual_name
from graftwork.records.base import Figure, Record
from graftwork.records.plan import DeviceFacts, ModelShape, Plan, Residual, Workload
from graftwork.records.units import MIB
from graftwork.store.residuals import STAGE

SAMPLE_BYTES = 4 * MIB
CHARACTERS_A_TOKEN = 3.5
REPLY_SHARE = 0.2
"""Of a logged row, where nothing is prepared yet."""
ROUGH_SPREAD = 2.0
"""Further factor, either way, on what is estimated from the size of the logs."""
MOST_LENGTHS = 2000
WITH_BASE = ("evaluate", "try")
"""Stages whose time depends on the base."""


class LogSize(NamedTuple):
    """Of all log files together; rows are counted in a sample."""

    bytes: int
    rows: int


def size_of_logs(work: Workplace) -> LogSize:
    """From the files' sizes and the lines of their beginnings."""
    total, seen, lines = 0, 0, 0
    for name in find_files(work.settings.data.logs, root=work.project.root):
        if name == STANDARD_INPUT:
            continue
        path = work.project.root / name
        total += path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(max(SAMPLE_BYTES - seen, 0))
        seen += len(beginning)
        lines += beginning.count(b"\n") + (not beginning.endswith(b"\n") and bool(beginning))
    return LogSize(total, round(lines * total / seen) if seen else 0)


def known_device(work: Workplace) -> DeviceFacts:
    """As the last plan of this project measured it; else what can be known at once."""
    entry = work.ledger.get("plan")
    here = describe_device(threads=work.settings.train.threads)
    if entry is None:
        return here
    planned = Plan.model_validate(entry.output).device
    return planned if planned.threads == here.threads else here


def gather_facts(work: Workplace, made: Made, *, size: LogSize) -> StageFacts:
    """From the prepared dataset where there is one, else from the size of the logs."""
    settings = work.settings
    prepared = made.outputs.get("prepare")
    plan = made.outputs.get("plan")
    test = prepared.dataset.splits.get("test") if isinstance(prepared, Prepared) else None
    if test is not None and test.rows:
        cases, reply = test.rows, test.trained_tokens / test.rows
        prompt = test.tokens / test.rows - reply
    else:
        a_row = size.bytes / max(size.rows, 1) / CHARACTERS_A_TOKEN
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


def expect_stage(work: Workplace, facts: StageFacts, stage: str) -> tuple[Figure, Figure, int]:
    """The estimate without past runs, the one with them, and how many these were."""
    prior = estimate_stage(stage, facts)
    past = work.residuals.recent(device=describe_device().name, base=_kind(work, stage))
    return prior, *pool_stage(stage, prior, past)


def record_stage(work: Workplace, stage: str, prior: Figure, *, seconds: float) -> None:
    """Note what a stage took beside what was computed for it."""
    if stage not in MEASURED:
        return
    found = Residual(name=residual_name(stage), planned=prior, actual=seconds)
    work.residuals.add(
        f"{STAGE}{stage}:{uuid.uuid4().hex}",
        device=describe_device().name,
        base=_kind(work, stage),
        found=[found],
        when=now(),
    )


def time_spent(stage: str, output: Record, seconds: float) -> float:
    """What the stage would have taken with nothing left from before: answers that were kept count too."""
    if stage != "evaluate" or not isinstance(output, Evaluated):
        return seconds
    subjects = (output.report.baseline, output.report.candidate, *output.report.others)
    answering = sum(one.generation.seconds for one in subjects if one.subject != "log")
    return max(seconds, answering)


def estimate_training(work: Workplace, shape: ModelShape, *, size: LogSize, device: DeviceFacts) -> Figure:
    """Seconds of training from the size of the logs, where nothing is prepared yet: rough."""
    settings, data = work.settings.train, work.settings.data
    length = max(round(size.bytes / max(size.rows, 1) / CHARACTERS_A_TOKEN), 2)
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
    )
    recent = work.residuals.recent(device=device.name, base=kind_of_run(work))
    speed = tokens_per_second(
        shape, load, device, learned=tuple(one.actual for one in recent if one.name == SPEED)
    )
    parts = minutes_by_part(shape, load, speed).values()
    # `load` holds at most `MOST_LENGTHS` of the rows.
    scale = 60 * rows / counted
    return Figure(
        value=sum(one.value for one in parts) * scale,
        low=sum(one.low for one in parts) * scale / ROUGH_SPREAD,
        high=sum(one.high for one in parts) * scale * ROUGH_SPREAD,
        unit="s",
    )


def _kind(work: Workplace, stage: str) -> str:
    """Stages of one kind can be compared."""
    return f"{STAGE}{stage}:{work.base.revision[:12]}" if stage in WITH_BASE else f"{STAGE}{stage}"
