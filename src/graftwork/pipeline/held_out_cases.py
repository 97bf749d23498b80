"""The cases that the pipeline evaluates on: the test split, or the file that `evaluate.cases` names.

In: an open project, a prepared dataset. Out: cases. A case whose prompt is trained on is refused.
"""

from collections.abc import Iterator
from pathlib import Path

from graftwork.evaluate.cases import choose_cases, draw_cases, read_case_file
from graftwork.files.dataset import iterate_rows, read_rows
from graftwork.files.disk import file_digest
from graftwork.pipeline.costs import price_cases
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.rewards import find_case_file, read_prompt_file
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message
from graftwork.records.report import Case


def read_held_out(work: OpenProject, folder: Path) -> tuple[Case, ...]:
    """As many as the settings allow; of the dataset in `folder` where no file is named."""
    settings = work.settings.evaluate
    if settings.cases is None:
        return tuple(price_cases(work, choose_cases(read_rows(folder, "test"), most=settings.max_cases)))
    cases = read_case_file(work.project.root / settings.cases, named=settings.checks)
    _require_untrained(cases, set(_iterate_trained(work, folder)))
    return draw_cases(cases, most=settings.max_cases)


def hash_case_file(work: OpenProject) -> str | None:
    """Of the file of cases; None where none is named or it is not there yet."""
    named = work.settings.evaluate.cases
    path = work.project.root / named if named is not None else None
    return file_digest(path) if path is not None and path.is_file() else None


def _iterate_trained(work: OpenProject, folder: Path) -> Iterator[tuple[Message, ...]]:
    """The prompts of the training rows, and those that reinforcement learning answers."""
    yield from (row.messages for row in iterate_rows(folder, "train"))
    train = work.settings.train
    if train.objective != "grpo":
        return
    path = find_case_file(work)
    if path is not None:
        yield from (case.messages for case in read_prompt_file(path, train.rollouts))
    elif train.rollouts.source == "rl":
        yield from (row.messages for row in iterate_rows(folder, "rl"))


def _require_untrained(cases: tuple[Case, ...], trained: set[tuple[Message, ...]]) -> None:
    known = [case for case in cases if case.messages in trained]
    if known:
        raise UserMistake(
            f"the case {known[0].id} is a training row",
            why=f"{len(known)} of {len(cases)} cases ask what was trained on: they would measure memory",
            fix="take them out of the file, or out of data.logs and train.rollouts.source",
            where="evaluate.cases",
        )
