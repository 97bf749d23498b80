"""What the time of a run's stages depends on: the logs, the cases and their lengths, the machine.

In: an open project, and the outputs of the steps that are up to date. Out: StageFacts. Nothing is done,
trained or loaded.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import orjson

from graftwork.costmodel.answers import AnswerLoad
from graftwork.data.ingest.files import STANDARD_INPUT
from graftwork.data.ingest.read import find_files
from graftwork.files.dataset import iterate_rows
from graftwork.model.generate.prefix import common_length
from graftwork.model.probe import describe_device, name_device
from graftwork.model.shape import read_shape
from graftwork.pipeline.evaluation_subjects import rows_at_once
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.plan_card import card_rates
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.release import QUESTIONS
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.stages import StageFacts
from graftwork.process.preload import is_supported
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.plan import DeviceFacts, Plan
from graftwork.records.units import MIB

SAMPLE_BYTES = 4 * MIB
SAMPLE_ROWS = 200
CHARACTERS_A_TOKEN = 3.5
REPLY_SHARE = 0.2
"""Of a logged row, where nothing is prepared yet."""
MOST_CASES = 500
"""Whose lengths are looked at."""
WITH_EXAMPLE, WITHOUT_EXAMPLE = 1.2, 2.0
"""Tokens that a base writes for each one that the log has: it was not trained on the task."""
TRIED_ROWS = 8
"""Requests that the serving check's engine answers at once at most."""


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
    here = _describe_card() or describe_device(threads=work.settings.train.threads)
    if entry is None:
        return here
    planned = Plan.model_validate(entry.output).device
    return planned if (planned.kind, planned.threads) == (here.kind, here.threads) else here


def _describe_card() -> DeviceFacts | None:
    """The card of this machine as the catalog knows it; None where there is none, or no catalog does."""
    named = name_device()
    if named.kind != "cuda":
        return None
    with suppress(UserMistake):
        gpu = find_gpu(named.name)
        return describe_device().model_copy(
            update={
                "kind": "cuda",
                "name": named.name,
                "memory_gib": gpu.memory_gib,
                "capability": gpu.capability,
            }
        )
    return None


def gather_facts(work: OpenProject, made: StepOutputs, *, size: LogSize) -> StageFacts:
    """From the prepared dataset where there is one, else from the size of the logs."""
    settings, plan = work.settings.evaluate, made.outputs.get("plan")
    device = plan.device if isinstance(plan, Plan) else known_device(work)
    shape = read_shape(Path(work.base.folder))
    base, trained = _expect_answers(work, made, size, rows=settings.batch_size or rows_at_once(device.kind))
    further = [name for name in settings.subjects if name not in ("base", "adapter", "log", "champion")]
    others = bool(work.releases.aliases()) + len(further)
    return StageFacts(
        log_bytes=size.bytes,
        shape=shape,
        device=device,
        rates=card_rates(work, device, shape),
        forked=is_supported(),
        answers=(base, trained, *[trained] * others),
        tried=_expect_tried(trained, most=settings.max_new_tokens),
        timed_cases=settings.latency_cases,
        repeats=settings.repeats if settings.sampling.temperature > 0 else 1,
    )


def _expect_answers(
    work: OpenProject, made: StepOutputs, size: LogSize, *, rows: int
) -> tuple[AnswerLoad, AnswerLoad]:
    """What the base answers, and what a model does that was trained on the task."""
    settings = work.settings.evaluate
    prepared = made.outputs.get("prepare")
    test = prepared.dataset.splits.get("test") if isinstance(prepared, PreparedData) else None
    seen: Sequence[Row] = ()
    if isinstance(prepared, PreparedData) and test is not None and test.rows:
        cases = test.rows
        seen = list(islice(iterate_rows(Path(prepared.folder), "test"), MOST_CASES))
    if seen:
        replies = [len(row.tokens) - row.trained_from for row in seen]
        reply, longest, prompt = fmean(replies), float(max(replies)), fmean(row.trained_from for row in seen)
        shared = float(common_length([row.tokens[: row.trained_from] for row in seen]))
    else:
        cases = round(size.rows * work.settings.data.test)
        reply, shared = max(size.tokens_a_row * REPLY_SHARE, 1.0), 0.0
        longest, prompt = 2 * reply, max(size.tokens_a_row - reply, 1.0)
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
    example = prompt - shared + reply if settings.worked_example else 0.0
    longer = WITH_EXAMPLE if settings.worked_example else WITHOUT_EXAMPLE
    base = trained.model_copy(
        update={
            "prompt_tokens": prompt + example,
            "shared_tokens": shared + example,
            "answer_tokens": min(longer * reply, most),
            "longest_answer": most,
        }
    )
    return base, trained


def _expect_tried(trained: AnswerLoad, *, most: int) -> AnswerLoad:
    """Base and release on the same questions. Without an example the base goes on to the limit."""
    return trained.model_copy(
        update={
            "cases": 2 * QUESTIONS,
            "rows": TRIED_ROWS,
            "answer_tokens": (trained.answer_tokens + most) / 2,
            "longest_answer": float(most),
        }
    )
