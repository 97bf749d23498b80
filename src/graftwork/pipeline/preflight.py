"""Checks before the first training step, in seconds and without loading weights.

Input: an open project with a prepared dataset and a plan. Output: problems, how long each stage will take,
and what disk and port look like; for `graft reward check`, what the gold answer, an empty one and a catalog
of hacks got by the rewards: the gold answer must be rewarded and no hack may be. `graft run` does this by
itself before it trains; `graft run --dry-run` does nothing else.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from graftwork.data.project import PreparedData, find_latest_dataset
from graftwork.evaluate.cases import read_case_file
from graftwork.evaluate.comparison import what_cases_show
from graftwork.evaluate.preflight import MetricTrial, Problem, Severity, try_out
from graftwork.evaluate.project import Grading, doubts_about_judge
from graftwork.evaluate.project_subjects import read_held_out
from graftwork.evaluate.subjects import parse_subjects
from graftwork.files.dataset import iterate_rows
from graftwork.files.disk import write_atomic
from graftwork.grading.checks import require_gradable
from graftwork.grading.metrics import name_of
from graftwork.grading.reward_audit import hacks_for
from graftwork.grading.rewards import AnswerVerdict, RewardQuestion, RewardRunner, RewardSpec
from graftwork.pipeline.step import StepOutputs
from graftwork.project.doctor import DoctorCheck, check_disk, check_port
from graftwork.project.open_project import OpenProject
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, NegativeResult, UserError
from graftwork.records.plan import Plan, RunPlan
from graftwork.records.report import Case
from graftwork.records.run import ENVIRONMENT
from graftwork.train.rollouts.multi_turn import Environment, EpisodeEnvironment
from graftwork.train.rollouts.project import (
    find_case_file,
    keep_reward_seconds,
    make_reward_spec,
    read_prompts,
)

REWARDED = 0.5
"""A hack that gets this share of the gold answer's reward counts as rewarded."""
CASES = 4
GOLD = "gold"
REWARD_CHECK_FILE = "reward_check.json"


class TriedAnswer(Record):
    """One answer of the catalog on one case."""

    case: str
    name: str
    reward: float | None
    parts: dict[str, float | None] = {}
    failed: dict[str, str] = {}

    @property
    def is_reference(self) -> bool:
        return self.name == GOLD


class CheckReason(NamedTuple):
    """Why rewards cannot be trusted, and what to do."""

    why: str
    fix: str


class RewardCheck(Record):
    """Result of the catalog. `sound` is False if a hack was rewarded or a gold answer was not."""

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
    """The median: some hacks take all the time that they are given."""
    needs_gold: bool = True
    """False if an environment rewards: a reference of one reply need not solve an episode."""

    references: int = 0
    """Prompts with a reference, graded or not."""

    @property
    def failures(self) -> dict[tuple[str, str], list[TriedAnswer]]:
        """The answers that a reward could not grade, by its metric and the reason."""
        by_reason: dict[tuple[str, str], list[TriedAnswer]] = {}
        for item in self.failed:
            for metric, reason in item.failed.items():
                by_reason.setdefault((metric, reason), []).append(item)
        return by_reason

    @property
    def sound(self) -> bool:
        is_graded = self.gold is not None or not self.needs_gold
        return not self.rewarded and not self.gold_failed and is_graded

    @property
    def reason(self) -> CheckReason | None:
        """Why the rewards cannot be trusted; None if they can."""
        if self.sound:
            return None
        names = sorted({item.name for item in self.rewarded})
        if names:
            return CheckReason(
                f"{len(names)} of {self.hacks} hacks are rewarded: {', '.join(names[:6])}",
                "compare values outside the sandbox (`python_calls`), make the deciding part a gate",
            )
        if self.gold_failed:
            return CheckReason(
                f"the reference itself gets too little on {', '.join(i.case for i in self.gold_failed[:4])}",
                "fix the references or the rewards: `graft reward check` shows the parts",
            )
        for (metric, reason), items in self.failures.items():
            if any(item.is_reference for item in items):
                return CheckReason(
                    f"{metric} cannot grade the reference: {reason}",
                    "fix the reward, or the service that it asks, and run `graft reward check`",
                )
        if self.references:
            return CheckReason(
                "no reward applies to the references: each of them returned None",
                "let a reward return a number from 0 to 1 for the prompts of `rollouts.source`",
            )
        return CheckReason(
            "no prompt has a reference that the rewards can grade",
            "give the cases a `reference` (of a task set: `rollouts.taskset.reference`), or set "
            "`train.reward_checks.hacks: false`",
        )


def check_rewards(work: OpenProject, *, cases: int = CASES) -> RewardCheck:
    """Try the catalog on the first prompts of the project."""
    settings = work.settings.train
    require_listed(work)
    prompts = project_prompts(work)
    spec = make_reward_spec(work, folder=work.project.root)
    environment_name = settings.rollouts.environment
    environment = None
    if environment_name is not None:
        environment = Environment(
            environment_name, folder=work.project.root, sandbox=work.settings.evaluate.sandbox
        )
    check = try_catalog(spec, spread(prompts, cases), environment=environment)
    keep_reward_seconds(work, check.usual_seconds)
    return check


def require_listed(work: OpenProject) -> None:
    if work.settings.train.rewards:
        return
    project = work.project.settings
    rewarded_models = [name for name in project.models if project.of_model(name).train.rewards]
    if rewarded_models:
        raise UserError(
            f"the model {work.model} has no rewards",
            why=f"these models have some: {', '.join(rewarded_models)}",
            fix=f"--model {rewarded_models[0]}",
            where=f"models.{work.model}.train.rewards",
        )
    raise UserError(
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


def try_catalog(
    spec: RewardSpec, cases: Sequence[Case], *, environment: EpisodeEnvironment | None = None
) -> RewardCheck:
    """With an environment, each answer of the catalog is an episode of one reply."""
    answers = [(case, hack.name, hack.text) for case in cases for hack in hacks_for(case)]
    if environment is None:
        answers = [(case, GOLD, case.reference) for case in cases if case.reference] + answers
    evidence: list[dict[str, Any]] = [{} for _ in answers]
    if environment is not None:
        played = environment.answer([(case, [text]) for case, _, text in answers])
        evidence = [
            {ENVIRONMENT: {"reward": episode.reward, "failed": episode.failed}, "turns": []}
            for episode in played
        ]
    with RewardRunner(spec) as runner:
        questions = [
            RewardQuestion(str(number), case, text, evidence=grounds)
            for number, ((case, _, text), grounds) in enumerate(zip(answers, evidence, strict=True))
        ]
        graded = list(runner.grade_all(questions))
    check = judge(answers, graded, cases=len(cases))
    return check.model_copy(update={"needs_gold": environment is None})


def judge(
    answers: Sequence[tuple[Case, str, str]], graded: Sequence[AnswerVerdict], *, cases: int
) -> RewardCheck:
    """Judge the rewards by what was tried (case, name, text) and the reward it got. Pure."""
    tried = [
        TriedAnswer(case=case.id, name=name, reward=grade.reward, parts=grade.parts, failed=grade.failed)
        for (case, name, _), grade in zip(answers, graded, strict=True)
    ]
    gold = [item for item in tried if item.name == GOLD]
    gold_rewards = [item.reward for item in gold if item.reward is not None]
    level = sum(gold_rewards) / len(gold_rewards) if gold_rewards else None
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
        seconds_per_answer=sum(grade.seconds for grade in graded) / max(len(graded), 1),
        usual_seconds=median([grade.seconds for grade in graded]) if graded else 0.0,
    )


def require_sound(check: RewardCheck) -> None:
    reason = check.reason
    if reason is not None:
        raise NegativeResult("the rewards cannot be trusted", **reason._asdict(), where="train.rewards")


def require_rewards(work: OpenProject, folder: Path) -> None:
    """Before training: refuse rewards that can be hacked. The result is stored in the run's folder."""
    train = work.settings.train
    path = folder / REWARD_CHECK_FILE
    if train.objective != "grpo" or not train.reward_checks.hacks:
        return
    if not path.exists():
        work.reporter.info("rewards: trying the reference and the catalog of hacks")
        write_atomic(path, check_rewards(work).to_json())
    require_sound(RewardCheck.from_json(path.read_bytes()))


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """Return `count` cases spread over the whole list."""
    if len(cases) <= count:
        return list(cases)
    return [cases[number * len(cases) // count] for number in range(count)]


class Preflight(Record):
    """What is known before training."""

    cases: int
    metrics: tuple[MetricTrial, ...]
    problems: tuple[Problem, ...]
    run: RunPlan
    """How long each stage takes."""
    power: str = ""
    """What this many held-out cases can show, in a sentence."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")


def require_ready(work: OpenProject, outputs: StepOutputs, run: RunPlan) -> Preflight:
    """Raise UserError if training would be useless; return a warning if something is doubtful."""
    preflight = run_preflight(work, outputs, run)
    for problem in preflight.problems:
        if problem.severity == "warning":
            work.reporter.info(f"{problem.what}: {problem.why}")
    if preflight.errors:
        first, surplus = preflight.errors[0], len(preflight.errors) - 1
        also = "; ".join(problem.what for problem in preflight.errors[1:])
        raise UserError(
            first.what,
            why=f"{first.why}{f' (and {surplus} more: {also})' if surplus else ''}",
            fix=f"{first.fix}; `graft run --dry-run` checks again in seconds",
            where=str(work.project.file),
        )
    work.reporter.info(f"{preflight.cases} held-out cases: every metric and every rule was tried")
    return preflight


def run_preflight(work: OpenProject, outputs: StepOutputs, run: RunPlan) -> Preflight:
    """Grade the log's own replies and corrupted ones, and try every rule; `run` is the plan of the stages."""
    prepared, plan = outputs.get("prepare", PreparedData), outputs.get("plan", Plan)
    evaluate, gate = work.settings.evaluate, work.settings.gate
    problems: list[Problem] = []
    cases: tuple[Case, ...] = ()
    if evaluate.cases is None and not any(iterate_rows(Path(prepared.folder), "test")):
        dropped = "every row was dropped or assigned to another split"
        problems.append(
            Problem(
                severity="error",
                what="there is no held-out row, so no rule of the gate could be judged",
                why=dropped if work.settings.data.test else "data.test is 0",
                fix="set data.test to a share such as 0.2, or evaluate.cases to a file of cases; or use "
                "`graft train`, which needs no verdict",
            )
        )
    else:
        cases = read_held_out(work, Path(prepared.folder))
    trials: tuple[MetricTrial, ...] = ()
    power = ""
    if cases:
        try:
            grading = Grading(work, cases)
            context = grading.context()
            require_gradable(context)
            trials, tried = try_out(cases, evaluate=evaluate, gate=gate, context=context)
            problems += tried
        except GraftError as error:
            problems.append(Problem(severity="error", what=error.what, why=error.why, fix=error.fix))
        power = what_cases_show(len(cases), confidence=evaluate.confidence).sentence
    problems += [
        Problem(
            severity="warning",
            what=f"{name_of(metric)} may not decide anything: the judge is not calibrated",
            why=why,
            fix="run `graft eval calibrate`, or remove the judge from the rules of the gate",
        )
        for metric, why in doubts_about_judge(work).items()
    ]
    problems += find_missing_keys(work.settings)
    # Disk and port, as the doctor sees them; a port in use does not stop a training.
    problems += _as_problem(check_disk(work.project.state, needed=plan.disk_gib.high), severity="error")
    problems += _as_problem(check_port(work.project), severity="warning")
    return Preflight(
        cases=len(cases),
        metrics=trials,
        problems=tuple(sorted(problems, key=lambda problem: problem.severity != "error")),
        run=run,
        power=power,
    )


def find_missing_keys(settings: ProjectSettings) -> list[Problem]:
    """Variables that should contain the keys of endpoints that training or evaluation will use, and do
    not.
    """
    variables: dict[str, str | None] = {}
    if (judge := settings.evaluate.judge) is not None:
        variables["evaluate.judge.api_key_env"] = judge.api_key_env
    if (rollouts := settings.train.rollouts.endpoint) is not None:
        variables["train.rollouts.endpoint.api_key_env"] = rollouts.api_key_env
    for subject in parse_subjects(settings.evaluate.subjects):
        if subject.endpoint is not None:
            variables[f"evaluate.subjects: {subject.name}"] = subject.endpoint.api_key_env
    return [
        Problem(
            severity="error",
            what=f"the environment variable {variable} is empty or not set",
            why=f"it should hold the key for {where}",
            fix=f"export {variable}=…",
        )
        for where, variable in variables.items()
        if variable is not None and not os.environ.get(variable, "").strip()
    ]


def _as_problem(check: DoctorCheck, *, severity: Severity) -> list[Problem]:
    if check.result == "ok":
        return []
    return [Problem(severity=severity, what=f"{check.name}: {check.found}", fix=check.fix)]
