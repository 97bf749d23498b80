"""Verdicts counted: wins, losses, ties, how steady the judge is, and which place it favours.

In: the judge's verdict on every pair, in both orders. Out: a JudgeTally and a Comparison. Pure. A judge
that changes its mind with the order has not decided: that pair is a tie, and counted as inconsistent.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from graftwork.evaluate.comparison import compare_choices
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.significance import mcnemar
from graftwork.records.report import Comparison, JudgeTally, Report

Choice = Literal["first", "second", "tie"]


class PairVerdict(NamedTuple):
    """`forth` is of (baseline, candidate), `back` of (candidate, baseline); None where it is unclear."""

    case_id: str
    forth: Choice | None
    back: Choice | None
    reason: str = ""

    @property
    def grade(self) -> float | None:
        """1 the candidate is better, 0 the baseline is, 0.5 neither or the judge wavers."""
        if self.forth is None or self.back is None:
            return None
        if self.forth == "second" and self.back == "first":
            return 1.0
        if self.forth == "first" and self.back == "second":
            return 0.0
        return 0.5

    @property
    def place(self) -> Literal["first", "second"] | None:
        """The place that was chosen in both orders: such a pair shows a bias and no preference."""
        return self.forth if self.forth == self.back and self.forth != "tie" else None

    @property
    def consistent(self) -> bool:
        return self.grade in (0.0, 1.0) or (self.forth == "tie" and self.back == "tie")


def count_pairs(
    verdicts: Sequence[PairVerdict],
    *,
    baseline: str,
    candidate: str,
    model: str,
    questions: int = 0,
    cost: float | None = None,
    confidence: float = 0.95,
) -> JudgeTally:
    judged = [verdict for verdict in verdicts if verdict.grade is not None]
    steady = sum(verdict.consistent for verdict in judged)
    choices = [choice for verdict in judged for choice in (verdict.forth, verdict.back)]
    first, second = choices.count("first"), choices.count("second")
    agreement = clopper_pearson(steady, n=len(judged), confidence=confidence)
    always_first = sum(verdict.place == "first" for verdict in judged)
    always_second = sum(verdict.place == "second" for verdict in judged)
    return JudgeTally(
        model=model,
        baseline=baseline,
        candidate=candidate,
        pairs=len(judged),
        wins=sum(verdict.grade == 1.0 for verdict in judged),
        losses=sum(verdict.grade == 0.0 for verdict in judged),
        ties=sum(verdict.forth == verdict.back == "tie" for verdict in judged),
        inconsistent=len(judged) - steady,
        unjudged={verdict.case_id: verdict.reason for verdict in verdicts if verdict.grade is None},
        agreement=steady / len(judged) if judged else 0.0,
        agreement_low=agreement[0],
        agreement_high=agreement[1],
        first_place_share=first / (first + second) if first + second else 0.5,
        position_bias_p=mcnemar(always_first, losses=always_second),
        confidence=confidence,
        grades={verdict.case_id: verdict.grade for verdict in verdicts},
        questions=questions,
        cost=cost,
    )


def compare_by_judge(
    tally: JudgeTally, *, confidence: float | None = None, sessions: Mapping[str, str] | None = None
) -> Comparison:
    """Wins against losses over all judged pairs; ties count as pairs that did not differ.

    Where a session has several cases, the session is the unit, as for every other grade.
    """
    found = compare_choices(tally.grades, confidence=confidence or tally.confidence, sessions=sessions)
    return found.model_copy(update={"baseline": tally.baseline, "candidate": tally.candidate})


def add_judgement(report: Report, tally: JudgeTally) -> Report:
    return report.model_copy(
        update={
            "judged": (*report.judged, tally),
            "comparisons": (*report.comparisons, compare_by_judge(tally, sessions=report.sessions)),
        }
    )
