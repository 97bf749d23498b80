"""`graft reward check`: the gold answer, an empty one and a catalogue of hacks against the rewards.

In: the project's rewards and prompts. Out: what each answer got, and whether the rewards can be trusted: the
gold answer must be rewarded and no hack may be.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from graftwork.files.disk import write_atomic
from graftwork.grading.hacks import hacks_for
from graftwork.grading.reward_runner import GradedParts, RewardQuestion, RewardRunner
from graftwork.grading.rewards import RewardSpec
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.rewards import find_case_file, make_reward_spec, read_prompts
from graftwork.pipeline.steps.data import PreparedData
from graftwork.records.base import Record
from graftwork.records.errors import AnswerIsNo, UserMistake
from graftwork.records.report import Case

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

    @property
    def sound(self) -> bool:
        return not self.rewarded and not self.gold_failed and self.gold is not None


class _Asked(NamedTuple):
    case: Case
    name: str
    text: str


def check_rewards(work: OpenProject, *, cases: int = CASES) -> RewardCheck:
    """Try the catalogue on the first prompts of the project."""
    settings = work.settings.train
    if not settings.rewards:
        raise UserMistake(
            "there are no rewards to check",
            fix="list them under `train.rewards`: [{metric: task_success}]",
            where="train.rewards",
        )
    path = find_case_file(work) if settings.objective == "grpo" else None
    dataset = _dataset_folder(work) if path is None else Path()
    prompts = read_prompts(path, dataset=dataset, source=settings.rollouts.source)
    spec = make_reward_spec(work, folder=work.project.root)
    return try_catalogue(spec, spread(prompts, cases))


def try_catalogue(spec: RewardSpec, cases: Sequence[Case]) -> RewardCheck:
    asked = [_Asked(case, hack.name, hack.text) for case in cases for hack in hacks_for(case)]
    gold = [_Asked(case, GOLD, case.reference) for case in cases if case.reference]
    with RewardRunner(spec) as runner:
        questions = [RewardQuestion(str(at), item.case, item.text) for at, item in enumerate([*gold, *asked])]
        graded = list(runner.grade_all(questions))
    return judge([*gold, *asked], graded, cases=len(cases))


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
        rewarded=tuple(item for item in hacks if item.reward is not None and item.reward >= limit > 0),
        gold_failed=tuple(item for item in gold if item.reward is not None and item.reward < REWARDED),
        failed=tuple(item for item in tried if item.failed),
        seconds_per_answer=sum(found.seconds for found in graded) / max(len(graded), 1),
    )


def require_sound(found: RewardCheck) -> None:
    if found.sound:
        return
    names = sorted({item.name for item in found.rewarded})
    if names:
        why = f"{len(names)} of {found.hacks} hacks are rewarded: {', '.join(names[:6])}"
        fix = "compare values outside the sandbox (`python_calls`), make the deciding part a gate"
    elif found.gold is None:
        why = "no prompt has a reference that the rewards can grade"
        fix = "give the cases a `reference`, or set `train.reward_checks.hacks: false`"
    else:
        why = f"the reference itself gets too little on {', '.join(i.case for i in found.gold_failed[:4])}"
        fix = "fix the references or the rewards: `graft reward check` shows the parts"
    raise AnswerIsNo("the rewards cannot be trusted", why=why, fix=fix, where="train.rewards")


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


def _dataset_folder(work: OpenProject) -> Path:
    step = work.ledger.get("prepare")
    if step is None:
        raise UserMistake("the dataset is not prepared yet", fix="run `graft data prepare` first")
    return Path(PreparedData.model_validate(step.output).folder)
