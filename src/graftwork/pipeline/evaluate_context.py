"""What grading needs of the outside, wired: the sandbox for generated code, the judge and what it said.

In: an open workplace. Out: a GradeContext, and the report with the judge's word on its two subjects. Both
are opened only where the settings ask for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftwork.evaluate.judge.budget import Budget
from graftwork.evaluate.judge.client import ChatClient
from graftwork.evaluate.judge.panel import Judge
from graftwork.evaluate.judge.store import ReplyStore
from graftwork.evaluate.judge.verdicts import add_judgement, first_answers, judge_subjects
from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading import GradeContext
from graftwork.grading.code import CODE_COMPILES, CODE_PASSES, PYTHON_TESTS, RememberingRunner
from graftwork.pipeline.open_project import OpenProject
from graftwork.process.sandbox import open_sandbox
from graftwork.records.report import Answer, Case, Report

JUDGED_FOLDER = "judged"
CODE = frozenset({CODE_COMPILES, CODE_PASSES, PYTHON_TESTS})


@dataclass(frozen=True)
class Grading:
    """One for a whole evaluation: what was run or asked for one subject is known for the next."""

    work: OpenProject
    judge: Judge | None
    sandbox: RememberingRunner | None

    def context(self) -> GradeContext:
        """A fresh one for each subject: it gathers the grades that could not be given."""
        return GradeContext(
            fields=self.work.settings.evaluate.fields,
            folder=self.work.project.root,
            sandbox=self.sandbox,
            judge=self.judge,
        )

    def prepare(self, cases: Sequence[Case], answers: Sequence[Answer]) -> None:
        """Judge all answers of a subject side by side, so that grading finds them judged."""
        settings = self.work.settings.evaluate.judge
        if self.judge is not None and settings is not None and "pointwise" in settings.modes:
            self.judge.rate_all(cases, first_answers(answers), progress=self._tell)

    def add_preference(
        self, report: Report, cases: Sequence[Case], answers: Mapping[str, Sequence[Answer]]
    ) -> Report:
        """Which of the two answers the judge would rather have, both orders asked."""
        settings = self.work.settings.evaluate
        if self.judge is None or settings.judge is None or "pairwise" not in settings.judge.modes:
            return report
        tally = judge_subjects(
            self.judge,
            settings=settings.judge,
            cases=cases,
            answers=answers,
            baseline=report.baseline.subject,
            candidate=report.candidate.subject,
            confidence=settings.confidence,
            progress=self._tell,
        )
        return add_judgement(report, tally)

    def _tell(self, done: int, total: int) -> None:
        self.work.reporter.progress("asking the judge", done, total, seconds_left=None, detail={})


def open_grading(work: OpenProject, cases: Sequence[Case]) -> Grading:
    settings = work.settings.evaluate
    judge = None
    if settings.judge is not None:
        judge = Judge(
            settings.judge,
            speaker=ChatClient(settings.judge),
            replies=ReplyStore(work.project.state / JUDGED_FOLDER),
            budget=Budget(settings.judge),
        )
    return Grading(work, judge, _open_runner(settings, cases))


def _open_runner(settings: EvaluateSettings, cases: Sequence[Case]) -> RememberingRunner | None:
    """Only where code is graded: a machine without a sandbox can still grade everything else."""
    named = {*settings.metrics, *(check.metric for check in settings.checks)}
    # A check is written in full or in brief: {metric: python_tests, tests: …} or {python_tests: …}.
    named |= {name for case in cases for check in case.checks for name in (str(check.get("metric")), *check)}
    if not named & CODE:
        return None
    return RememberingRunner(open_sandbox(settings.sandbox))
