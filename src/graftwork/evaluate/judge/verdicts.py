"""A judge's word on two subjects of a report, and the report with it.

In: a judge, the cases, what both subjects said. Out: a JudgeTally, and a Report that holds it with the
comparison that follows from it. The gate can then name judge_preference like any other comparison.
"""

from collections.abc import Mapping, Sequence

from graftwork.evaluate.judge.panel import Judge, Progress
from graftwork.evaluate.judge.settings import JudgeSettings
from graftwork.evaluate.judge.tally import compare_by_judge, count_pairs
from graftwork.records.report import Answer, Case, JudgeTally, Report


def judge_subjects(
    judge: Judge,
    *,
    settings: JudgeSettings,
    cases: Sequence[Case],
    answers: Mapping[str, Sequence[Answer]],
    baseline: str,
    candidate: str,
    confidence: float = 0.95,
    progress: Progress = lambda _done, _of: None,
) -> JudgeTally:
    """`answers` are those of each subject by its name; of several to one case the first is judged."""
    before = judge.spent
    verdicts = judge.compare(
        cases,
        baseline=first_answers(answers[baseline]),
        candidate=first_answers(answers[candidate]),
        progress=progress,
    )
    after = judge.spent
    return count_pairs(
        verdicts,
        baseline=baseline,
        candidate=candidate,
        model=settings.model,
        questions=after.questions - before.questions,
        cost=after.cost - before.cost if after.cost is not None and before.cost is not None else None,
        confidence=confidence,
    )


def add_judgement(report: Report, tally: JudgeTally) -> Report:
    return report.model_copy(
        update={
            "judged": (*report.judged, tally),
            "comparisons": (*report.comparisons, compare_by_judge(tally, sessions=report.sessions)),
        }
    )


def first_answers(answers: Sequence[Answer]) -> dict[str, str]:
    said: dict[str, str] = {}
    for answer in answers:
        said.setdefault(answer.case_id, answer.text)
    return said
