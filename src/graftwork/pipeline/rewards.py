"""Reinforcement learning between the stages: prompts as cases, rewards as a spec, rows that a plan counts.

In: the project's settings and its dataset. Out: what the training worker gets. Training and evaluation do
not import each other: here the cases and checks of evaluation become prompts and rewards of training.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.evaluate.cases import choose_cases, read_case_file
from graftwork.files.dataset import read_rows
from graftwork.files.disk import file_digest
from graftwork.grading.custom import hash_own, is_own
from graftwork.grading.rewards import RewardPart, RewardSpec
from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case
from graftwork.records.run import TrainJob
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.pipeline.open_project import OpenProject

SPLITS_WITH_PROMPTS = ("rl", "train")


def make_reward_spec(work: "OpenProject", *, folder: Path | None = None) -> RewardSpec:
    """What a reward worker needs. The folder is left out of what names a run."""
    train, evaluate = work.settings.train, work.settings.evaluate
    own = {
        reward.metric: hash_own(reward.metric, folder=work.project.root)
        for reward in train.rewards
        if is_own(reward.metric)
    }
    return RewardSpec(
        parts=tuple(RewardPart.model_validate(reward.model_dump()) for reward in train.rewards),
        folder=str(folder) if folder is not None else "",
        fields=evaluate.fields.model_dump(mode="json"),
        checks=tuple(check.model_dump(mode="json") for check in evaluate.checks),
        sandbox=evaluate.sandbox.model_dump(mode="json"),
        seconds=train.reward_checks.seconds,
        fail_truncated=train.rollouts.truncated == "fail",
        own=own,
    )


def name_rewards(work: "OpenProject") -> dict[str, Any]:
    """What rewards and prompts add to the name of a run; nothing for other objectives."""
    train = work.settings.train
    if train.objective != "grpo":
        return {}
    path = find_case_file(work)
    prompts = {} if path is None else {"prompts": file_digest(path)}
    return {"rewards": make_reward_spec(work).model_dump(mode="json"), **prompts}


def find_case_file(work: "OpenProject") -> Path | None:
    """The file of prompts; None if they are a split of the dataset."""
    train = work.settings.train
    source = train.rollouts.source
    if train.objective != "grpo" or source in SPLITS_WITH_PROMPTS:
        return None
    path = (work.project.root / source).expanduser()
    if not path.is_file():
        raise UserMistake(
            f"there is no file of prompts at {source}",
            fix="name a split (rl, train) or a JSONL file with one case per line",
            where="train.rollouts.source",
        )
    return path


def read_prompts(case_file: Path | None, *, dataset: Path, source: str) -> tuple[Case, ...]:
    """The prompts of a run as cases."""
    if case_file is not None:
        return read_case_file(case_file)
    rows = read_rows(dataset, source)  # type: ignore[arg-type]
    if not rows:
        raise UserMistake(
            f"the split {source} holds no prompts",
            fix="set `rl` of the model under `models:`, or `train.rollouts.source` to `train` or a file",
            where="train.rollouts.source",
        )
    return choose_cases(rows)


def job_prompts(job: TrainJob, settings: TrainSettings) -> tuple[Case, ...]:
    if settings.objective != "grpo":
        return ()
    path = Path(job.cases_file) if job.cases_file else None
    return read_prompts(path, dataset=Path(job.dataset_folder), source=settings.rollouts.source)


def rollout_rows(work: "OpenProject", dataset: Path) -> tuple[list[Row], TrainSettings]:
    """Rows as many and as long as the answers of the run may become, and settings that step over them."""
    from graftwork.model.chat.template import ChatTemplate

    settings = work.settings.train
    template = ChatTemplate.from_folder(
        Path(work.base.folder), reasoning=work.settings.data.reasoning == "keep"
    )
    cases = read_prompts(find_case_file(work), dataset=dataset, source=settings.rollouts.source)
    rollouts = settings.rollouts
    longest = [
        _longest_row(case, template.prompt(case.messages), template.eos, rollouts.max_tokens)
        for case in cases
    ]
    size = rollouts.prompts * rollouts.answers
    rows = list(islice(cycle(longest), rollouts.steps * rollouts.updates * size))
    return rows, settings.model_copy(update={"batch_rows": size, "epochs": 1})


def _longest_row(case: Case, prompt: Sequence[int], end: int, most: int) -> Row:
    return Row(
        id=case.id,
        origin=case.origin,
        messages=case.messages,
        reply=case.reference,
        tokens=(*prompt, *[end] * most),
        trained_from=len(prompt),
    )
