"""Inputs of rollouts from an open project: prompts, rewards, held-out cases, and rows that a plan counts.

Input: the settings, the dataset, a file of cases or a task set. Output: cases to sample from, the
`RewardSpec` of a reward worker, `RolloutLoad`. Here the cases and checks of evaluation become prompts and
rewards of training.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from graftwork.costmodel.rollouts import USUAL_LENGTH
from graftwork.evaluate.cases import choose_cases, read_case_file
from graftwork.files.dataset import read_rows
from graftwork.files.disk import file_digest, write_atomic
from graftwork.grading.custom import hash_own, is_own
from graftwork.grading.rewards import RewardSpec, function_of
from graftwork.grading.taskset import (
    CASES_FILE,
    TASKS_FILE,
    TasksetSpec,
    fingerprint_taskset,
    load_tasks,
    taskset_folder,
)
from graftwork.model.shape import read_shape
from graftwork.process.machine import count_cores
from graftwork.records.base import fingerprint
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.plan import RolloutLoad
from graftwork.records.report import Case
from graftwork.records.run import TrainJob
from graftwork.train.objectives.epochs import choose_training_rows
from graftwork.train.rollouts.measures import find_too_long
from graftwork.train.rollouts.multi_turn import environment_files, read_inner
from graftwork.train.settings import RolloutSettings, TrainSettings

if TYPE_CHECKING:
    from graftwork.project.open_project import OpenProject

REWARD_SECONDS = "reward_seconds.json"


def make_reward_spec(work: "OpenProject", *, folder: Path | None = None) -> RewardSpec:
    """Build the spec of a reward worker. The folder is not part of the run's identity."""
    train, evaluate = work.settings.train, work.settings.evaluate
    own_digests = {
        reward.metric: hash_own(function_of(reward.metric), folder=work.project.root)
        for reward in train.rewards
        if is_own(reward.metric)
    }
    return RewardSpec(
        parts=train.rewards,
        folder=str(folder) if folder is not None else "",
        fields=evaluate.fields.model_dump(mode="json"),
        checks=tuple(check.model_dump(mode="json") for check in evaluate.checks),
        sandbox=evaluate.sandbox.model_dump(mode="json"),
        seconds=train.reward_checks.seconds,
        fail_truncated=train.rollouts.truncated == "fail",
        own=own_digests,
        taskset=make_taskset_spec(work),
    )


def make_taskset_spec(work: "OpenProject") -> TasksetSpec | None:
    settings = work.settings.train.rollouts.taskset
    if settings is None or work.settings.train.objective != "grpo":
        return None
    spec = TasksetSpec.model_validate(settings.model_dump())
    return spec.model_copy(update={"package": fingerprint_taskset(spec, folder=work.project.root)})


def keep_taskset(spec: TasksetSpec, work: "OpenProject") -> Path:
    """The file of its tasks as cases, cached after the first read."""
    folder = taskset_folder(spec, work.project.root)
    if not (folder / CASES_FILE).is_file():
        work.reporter.info(f"reading the task set {spec.name}")
        loaded = load_tasks(spec, folder=work.project.root)
        tasks = [json.dumps({"id": case.id, "data": data}) for case, data in loaded]
        write_atomic(folder / TASKS_FILE, "".join(f"{line}\n" for line in tasks))
        write_atomic(folder / CASES_FILE, "".join(f"{case.model_dump_json()}\n" for case, _ in loaded))
    return folder / CASES_FILE


def name_rewards(work: "OpenProject") -> dict[str, Any]:
    """The part of rewards and prompts in the identity of a run; nothing for other objectives."""
    train = work.settings.train
    if train.objective != "grpo":
        return {}
    path = find_case_file(work)
    digests: dict[str, Any] = {} if path is None else {"prompts": file_digest(path)}
    if (examined := find_eval_file(work)) is not None:
        digests["eval_cases"] = file_digest(examined)
    environment = train.rollouts.environment
    if environment is not None:
        texts = [read_inner(work.project.root, name) for name in environment_files(environment)]
        digests["environment"] = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {"rewards": make_reward_spec(work).model_dump(mode="json"), **digests}


def find_case_file(work: "OpenProject") -> Path | None:
    """The file of prompts; None if they are a split of the dataset."""
    train = work.settings.train
    source = train.rollouts.source
    if (spec := make_taskset_spec(work)) is not None:
        return keep_taskset(spec, work)
    if train.objective != "grpo" or train.rollouts.asks_rows:
        return None
    return _require_file(
        work,
        source,
        "there is no file of prompts",
        fix="specify a split (rl, train) or a JSONL file with one case per line",
        where="train.rollouts.source",
    )


def _require_file(work: "OpenProject", source: str, what: str, *, fix: str, where: str) -> Path:
    path = (work.project.root / source).expanduser()
    if not path.is_file():
        raise UserError(f"{what} at {source}", fix=fix, where=where)
    return path


def find_eval_file(work: "OpenProject") -> Path | None:
    """The file of held-out cases whose answers are rewarded during training; None without one."""
    train = work.settings.train
    source = train.eval.source
    if train.objective != "grpo" or train.eval.every is None or source is None:
        return None
    return _require_file(
        work,
        source,
        "there is no file of cases",
        fix="specify a JSONL file with one case per line that is not trained on",
        where="train.eval.source",
    )


def read_eval_cases(job: TrainJob, settings: TrainSettings) -> tuple[Case, ...]:
    """The held-out cases of a run; none of them may be one of its prompts."""
    if job.eval_file is None:
        return ()
    cases = read_case_file(Path(job.eval_file))
    prompts = {case.messages for case in job_prompts(job, settings)}
    trained = [case.id for case in cases if case.messages in prompts]
    if trained:
        raise UserError(
            f"the case {trained[0]} is a prompt of this run",
            why=f"{len(trained)} of {len(cases)} held-out cases are trained on: they would measure "
            "memorization",
            fix="remove them from the file, or from `train.rollouts.source`",
            where="train.eval.source",
        )
    return cases


def read_prompt_file(case_file: Path, rollouts: RolloutSettings) -> tuple[Case, ...]:
    if rollouts.taskset is None:
        return read_case_file(case_file)
    return tuple(Case.from_json(line) for line in case_file.read_text().splitlines())


def read_prompts(case_file: Path | None, *, dataset: Path, rollouts: RolloutSettings) -> tuple[Case, ...]:
    """The prompts of a run as cases."""
    if case_file is not None:
        return read_prompt_file(case_file, rollouts)
    source = rollouts.source
    rows = read_rows(dataset, source)  # type: ignore[arg-type]
    if not rows:
        raise UserError(
            f"the split {source} holds no prompts",
            fix="set `rl` of the model under `models:`, or `train.rollouts.source` to `train` or a file",
            where="train.rollouts.source",
        )
    return choose_cases(rows)


def job_prompts(job: TrainJob, settings: TrainSettings) -> tuple[Case, ...]:
    if settings.objective != "grpo":
        return ()
    path = Path(job.cases_file) if job.cases_file else None
    return read_prompts(path, dataset=Path(job.dataset_folder), rollouts=settings.rollouts)


def keep_reward_seconds(work: "OpenProject", seconds: float) -> None:
    """Store the time to reward one answer, for the next plan."""
    path = work.project.state / REWARD_SECONDS
    measured = _read_reward_seconds(path)
    write_atomic(path, json.dumps({**measured, _reward_key(work): seconds}))


def find_reward_seconds(work: "OpenProject") -> float:
    """Return the time to reward one answer, as measured by `graft reward check` or the last run; 0 if neither
    measured it.
    """
    return _read_reward_seconds(work.project.state / REWARD_SECONDS).get(_reward_key(work), 0.0)


def _reward_key(work: "OpenProject") -> str:
    return fingerprint(make_reward_spec(work).model_dump(mode="json"))[:16]


def _read_reward_seconds(path: Path) -> dict[str, float]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(key): float(value) for key, value in content.items()} if isinstance(content, dict) else {}


PlannedRollouts = tuple[list[Row], TrainSettings, RolloutLoad]
"""Rows with the maximum number and length of a run's answers, settings that step over them, and what is
sampled for each step.
"""


def rollout_rows(work: "OpenProject", dataset: Path) -> PlannedRollouts:
    from graftwork.model.chat.template import ChatTemplate

    settings = work.settings.train
    template = ChatTemplate.from_folder(
        Path(work.base.folder), reasoning=work.settings.data.reasoning == "keep"
    )
    cases = read_prompts(find_case_file(work), dataset=dataset, rollouts=settings.rollouts)
    longest = []
    for case in cases:
        prompt = template.prompt(case.messages)
        longest.append(
            Row(
                id=case.id,
                origin=case.origin,
                messages=case.messages,
                reply=case.reference,
                tokens=(*prompt, *[template.eos] * settings.rollouts.longest_answer),
                trained_from=len(prompt),
            )
        )
    too_long = find_too_long(
        {row.id: row.trained_from for row in longest},
        longest_answer=settings.rollouts.longest_answer,
        positions=read_shape(Path(work.base.folder)).max_positions,
    )
    longest = [row for row in longest if row.id not in set(too_long)]
    supervised: Sequence[Row] = ()
    if settings.mix.sft:
        supervised = choose_training_rows(read_rows(dataset, "train"), settings=settings)
    return lay_out_rows(longest, supervised, settings, reward_seconds=find_reward_seconds(work))


def lay_out_rows(
    longest: Sequence[Row], supervised: Sequence[Row], settings: TrainSettings, *, reward_seconds: float = 0.0
) -> PlannedRollouts:
    """Lay out the rows of all steps; batches contain a step of answers and supervised rows."""
    rollouts = settings.rollouts
    size, steps = rollouts.prompts * rollouts.num_generations, rollouts.steps * rollouts.updates
    answers = (row for prompt in cycle(longest) for row in [prompt] * rollouts.num_generations)
    rows = list(islice(answers, steps * size))
    if settings.mix.sft and supervised:
        rows += islice(cycle(supervised), steps * settings.batch_size)
        size += settings.batch_size
    # Answers of a step that the model of the start reads: all with KL in the loss, else one per prompt.
    read_by_start = rollouts.prompts * (rollouts.num_generations if settings.policy.kl else 1)
    load = RolloutLoad(
        prompts=rollouts.prompts,
        answers=rollouts.num_generations,
        prompt_tokens=fmean(row.trained_from for row in longest),
        max_tokens=rollouts.longest_answer,
        answer_tokens=USUAL_LENGTH * rollouts.longest_answer,
        longest_prompt=max(row.trained_from for row in longest),
        has_turns=rollouts.environment is not None,
        on_server=rollouts.endpoint is not None,
        batches=rollouts.steps,
        # The audit grades each answer once more.
        reward_seconds=reward_seconds / count_cores() * (2 if settings.reward_checks.audit_share else 1),
        supervised_rows=settings.batch_size if settings.mix.sft and supervised else 0,
        reference_rows=0 if settings.method == "full" else read_by_start,
    )
    return rows, settings.model_copy(update={"batch_size": size, "epochs": 1}), load
