"""`graft reward check`: the gold answer, an empty one and a catalogue of hacks against the rewards.

In: the project's rewards and prompts. Out: what each answer got, and whether the rewards can be trusted: the
gold answer must be rewarded and no hack may be.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from graftwork.evaluate.cases import read_case_file
from graftwork.files.disk import write_atomic
from graftwork.grading.hacks import hacks_for
from graftwork.grading.reward_runner import GradedParts, RewardQuestion, RewardRunner
from graftwork.grading.rewards import RewardSpec
from graftwork.pipeline.dataset_folders import find_latest_dataset
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.rewards import (
    find_case_file,
    keep_reward_seconds,
    make_reward_spec,
    read_prompts,
)
from graftwork.records.base import Record
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.report import Case
from graftwork.records.run import ENVIRONMENT
from graftwork.train.rollouts.environment import Environment
from graftwork.train.rollouts.multi_turn import EpisodeEnvironment

REWARDED = 0.5
"""A hack that gets this share of what the gold answer gets is rewarded."""
CASES = 4
GOLD = "gold"
CHECKED = "reward_check.json"


class TriedAnswer(Record):
    """One answer of the catalogue on one case."""

    case: str
    name: str
    reward: float | None
    parts: dict[str, float | None] = {}
    failed: dict[str, str] = {}


class RewardFailure(NamedTuple):
    """Why a reward could not grade, and how many answers that cost."""

    metric: str
    reason: str
    answers: int
    is_reference: bool
    """Whether a reference is among them."""


class RewardCheck(Record):
    """What the catalogue got. `sound` is False if a hack was rewarded or a gold answer was not."""

    cases: int
    hacks: int
    """Different hacks that were tried."""
    gold: float | None
    """The mean reward of the gold answers; None if no case has a reference."""
    rewarded: tuple[TriedAnswer, ...] = ()
    gold_failed: tuple[TriedAnswer, ...] = ()
    failed: tuple[TriedAnswer, ...] = ()
    """Answers that a reward function could not grade."""
    seconds_per_answer: float = 0.0
    usual_seconds: float = 0.0
    """The median: some hacks take all the time that they get."""
    needs_gold: bool = True
    """False where an environment rewards: a reference of one reply need not solve an episode."""

    references: int = 0
    """Prompts with a reference, graded or not."""

    @property
    def failures(self) -> tuple[RewardFailure, ...]:
        """Each reason for which a reward could not grade, once."""
        found: dict[tuple[str, str], list[TriedAnswer]] = {}
        for item in self.failed:
            for metric, reason in item.failed.items():
                found.setdefault((metric, reason), []).append(item)
        return tuple(
            RewardFailure(metric, reason, len(items), any(item.name == GOLD for item in items))
            for (metric, reason), items in found.items()
        )

    @property
    def sound(self) -> bool:
        known = self.gold is not None or not self.needs_gold
        return not self.rewarded and not self.gold_failed and known


class _Asked(NamedTuple):
    case: Case
    name: str
    text: str


def check_rewards(work: OpenProject, *, cases: int = CASES) -> RewardCheck:
    """Try the catalogue on the first prompts of the project."""
    settings = work.settings.train
    require_listed(work)
    prompts = project_prompts(work)
    spec = make_reward_spec(work, folder=work.project.root)
    named = settings.rollouts.environment
    environment = None
    if named is not None:
        environment = Environment(named, folder=work.project.root, sandbox=work.settings.evaluate.sandbox)
    found = try_catalogue(spec, spread(prompts, cases), environment=environment)
    keep_reward_seconds(work, found.usual_seconds)
    return found


def require_listed(work: OpenProject) -> None:
    if work.settings.train.rewards:
        return
    project = work.project.settings
    others = [name for name in project.models if project.of_model(name).train.rewards]
    if others:
        raise UserMistake(
            f"the model {work.model} has no rewards",
            why=f"these models have some: {', '.join(others)}",
            fix=f"--model {others[0]}",
            where=f"models.{work.model}.train.rewards",
        )
    raise UserMistake(
        "graft.yaml has no rewards",
        fix="list them under `train.rewards`: [{metric: task_success}]",
        where="train.rewards",
    )


def project_prompts(work: OpenProject, *, cases: Path | None = None) -> tuple[Case, ...]:
    """The prompts of rollouts, or those of a file of cases."""
    if cases is not None:
        return read_case_file(cases, named=work.settings.evaluate.checks)
    train = work.settings.train
    path = find_case_file(work) if train.objective == "grpo" else None
    dataset = find_latest_dataset(work) if path is None else Path()
    return read_prompts(path, dataset=dataset, rollouts=train.rollouts)


def try_catalogue(
    spec: RewardSpec, cases: Sequence[Case], *, environment: EpisodeEnvironment | None = None
) -> RewardCheck:
    """With an environment, each answer of the catalogue is an episode of one reply."""
    asked = [_Asked(case, hack.name, hack.text) for case in cases for hack in hacks_for(case)]
    if environment is None:
        asked = [_Asked(case, GOLD, case.reference) for case in cases if case.reference] + asked
    evidence: list[dict[str, Any]] = [{} for _ in asked]
    if environment is not None:
        played = environment.answer([(item.case, [item.text]) for item in asked])
        evidence = [
            {ENVIRONMENT: {"reward": found.reward, "failed": found.failed}, "turns": []} for found in played
        ]
    with RewardRunner(spec) as runner:
        questions = [
            RewardQuestion(str(at), item.case, item.text, evidence=known)
            for at, (item, known) in enumerate(zip(asked, evidence, strict=True))
        ]
        graded = list(runner.grade_all(questions))
    found = judge(asked, graded, cases=len(cases))
    return found.model_copy(update={"needs_gold": environment is None})


def judge(asked: Sequence[_Asked], graded: Sequence[GradedParts], *, cases: int) -> RewardCheck:
    """Pure: what was tried and what it got, as a verdict on the rewards."""
    tried = [
        TriedAnswer(
            case=item.case.id, name=item.name, reward=found.reward, parts=found.parts, failed=found.failed
        )
        for item, found in zip(asked, graded, strict=True)
    ]
    gold = [item for item in tried if item.name == GOLD]
    known = [item.reward for item in gold if item.reward is not None]
    level = sum(known) / len(known) if known else None
    limit = REWARDED * (level if level else 1.0)
    hacks = [item for item in tried if item.name != GOLD]
    return RewardCheck(
        cases=cases,
        hacks=len({item.name for item in hacks}),
        gold=level,
        references=len(gold),
        rewarded=tuple(item for item in hacks if item.reward is not None and item.reward >= limit > 0),
        gold_failed=tuple(item for item in gold if item.reward is not None and item.reward < REWARDED),
        failed=tuple(item for item in tried if item.failed),
        seconds_per_answer=sum(found.seconds for found in graded) / max(len(graded), 1),
        usual_seconds=median([found.seconds for found in graded]) if graded else 0.0,
    )


class CheckReason(NamedTuple):
    """Why rewards cannot be trusted, and what to do."""

    why: str
    fix: str


def explain(found: RewardCheck) -> CheckReason | None:
    """None if the rewards can be trusted. Pure."""
    if found.sound:
        return None
    names = sorted({item.name for item in found.rewarded})
    if names:
        return CheckReason(
            f"{len(names)} of {found.hacks} hacks are rewarded: {', '.join(names[:6])}",
            "compare values outside the sandbox (`python_calls`), make the deciding part a gate",
        )
    if found.gold_failed:
        return CheckReason(
            f"the reference itself gets too little on {', '.join(i.case for i in found.gold_failed[:4])}",
            "fix the references or the rewards: `graft reward check` shows the parts",
        )
    broken = [failure for failure in found.failures if failure.is_reference]
    if broken:
        return CheckReason(
            f"{broken[0].metric} cannot grade the reference: {broken[0].reason}",
            "fix the reward, or the service that it asks, and run `graft reward check`",
        )
    if found.references:
        return CheckReason(
            "no reward applies to the references: each of them returned None",
            "let a reward return a number from 0 to 1 for the prompts of `rollouts.source`",
        )
    return CheckReason(
        "no prompt has a reference that the rewards can grade",
        "give the cases a `reference` (of a task set: `rollouts.taskset.reference`), or set "
        "`train.reward_checks.hacks: false`",
    )


def require_sound(found: RewardCheck) -> None:
    reason = explain(found)
    if reason is not None:
        raise AnswerIsNo("the rewards cannot be trusted", **reason._asdict(), where="train.rewards")


def require_rewards(work: OpenProject, folder: Path) -> None:
    """Before training: refuse rewards that can be cheated. What was found is kept in the run's folder."""
    train = work.settings.train
    path = folder / CHECKED
    if train.objective != "grpo" or not train.reward_checks.hacks:
        return
    if not path.exists():
        work.reporter.info("rewards: trying the reference and the catalogue of hacks")
        write_atomic(path, check_rewards(work).to_json())
    require_sound(RewardCheck.from_json(path.read_bytes()))


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """`count` cases over the whole list."""
    if len(cases) <= count:
        return list(cases)
    return [cases[at * len(cases) // count] for at in range(count)]
