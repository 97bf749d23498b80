"""Verdicts of a judge counted, and how far the judge agrees with people. Pure.

Input: its verdict on every pair, in both orders; answers that people labeled, and what the judge says of
them. Output: a JudgeTally and a Comparison: wins, losses, ties, how steady the judge is; a JudgeCalibration:
agreement, Cohen's kappa and biases, with intervals over sessions. A judge that changes its mind with the
order has not decided: that pair is a tie, and counted as inconsistent. Against people, a pair that it leaves
open counts as a disagreement; one that it could not judge is left out and counted.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from graftwork.evaluate.comparison import compare_choices
from graftwork.evaluate.settings import JudgeSettings
from graftwork.evaluate.statistics.intervals import Interval, clopper_pearson
from graftwork.evaluate.statistics.means import RESAMPLES, bounded_mean, widened_tail
from graftwork.evaluate.statistics.significance import mcnemar
from graftwork.records.base import Figure, Record
from graftwork.records.report import Case, Comparison, JudgeTally, Report

Mode = Literal["pairwise", "pointwise"]

Choice = Literal["first", "second", "tie"]
GOOD_MARK = 0.75
"""A score of 4 or 5 of 5 calls an answer good."""


class PairVerdict(NamedTuple):
    """`forth` is of (baseline, candidate), `back` of (candidate, baseline); None if it is unclear."""

    case_id: str
    forth: Choice | None
    back: Choice | None
    reason: str = ""

    @property
    def grade(self) -> float | None:
        """1 if the candidate is better, 0 if the baseline is, 0.5 if neither is or the judge is
        inconsistent.
        """
        if self.forth is None or self.back is None:
            return None
        if self.forth == "second" and self.back == "first":
            return 1.0
        if self.forth == "first" and self.back == "second":
            return 0.0
        return 0.5

    @property
    def place(self) -> Literal["first", "second"] | None:
        """The position that was chosen in both orders: such a pair shows a bias and no preference."""
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
    comparison = compare_choices(tally.grades, confidence=confidence or tally.confidence, sessions=sessions)
    return comparison.model_copy(update={"baseline": tally.baseline, "candidate": tally.candidate})


def add_judgment(report: Report, tally: JudgeTally) -> Report:
    return report.model_copy(
        update={
            "judged": (*report.judged, tally),
            "comparisons": (*report.comparisons, compare_by_judge(tally, sessions=report.sessions)),
        }
    )


class LabeledAnswer(NamedTuple):
    """An answer that a person called good or not. The case shows no reference that gives the label away."""

    case: Case
    text: str
    good: bool
    cluster: str


class LabeledPair(NamedTuple):
    """Two answers of which a person preferred one."""

    case: Case
    preferred: str
    other: str
    cluster: str


class JudgeOpinion(NamedTuple):
    """A person's label and the judge's for the same item."""

    person: bool
    judge: bool
    cluster: str
    group: str = ""
    length: int = 0
    """Characters of the answer; of a pair, those of the preferred answer less those of the other."""
    place: Literal["first", "second"] | None = None
    """The position in a pair that the judge chose in both orders, whichever answer it held."""


class PositionBias(Record):
    """Pairs in which the judge chose a position and not an answer: such a pair is a disagreement."""

    always_first: int
    always_second: int
    p_value: float
    """Exact McNemar test of one place against the other."""


class LengthBias(Record):
    """Agreement where people preferred the longer of two answers, and where they preferred the shorter.

    Answers with a mark are paired for it: one that people called good with one that they did not.
    """

    longer: int
    longer_agreed: float
    shorter: int
    shorter_agreed: float
    kappa: Figure
    """Kappa if people preferred both equally often: 0 for a judge that always prefers the longer answer."""

    @property
    def explains_agreement(self) -> bool:
        return self.longer + self.shorter > 0 and self.kappa.low <= 0


class JudgeCalibration(Record):
    """What is known about a judge before its verdict may count."""

    model: str
    identity: str
    """Hash everything that decides what the judge says."""
    mode: Mode
    labels: int
    clusters: int
    """Sessions, or repeated questions, that the labels come from."""
    agreement: Figure
    kappa: Figure | None
    """None if people gave all answers the same label: all agreement may be chance."""
    both_good: int = 0
    judge_only: int = 0
    """Called good by the judge and not by people …"""
    people_only: int = 0
    """… and the other way round."""
    both_bad: int = 0
    unjudged: int = 0
    groups: dict[str, str] = {}
    """Agreement by role, if a role has labels."""
    position: PositionBias | None = None
    """None for marks."""
    length: LengthBias
    confidence: float
    min_kappa: float
    min_labels: int
    made_at: str = ""

    @property
    def sufficient(self) -> bool:
        return not self.why_not

    @property
    def why_not(self) -> str:
        """Why the judge may not decide anything; empty if it may."""
        if self.labels < self.min_labels:
            return f"it was compared with {self.labels} labels of people, and needs {self.min_labels}"
        if self.kappa is None:
            return "people gave every answer the same label, so agreement may be chance"
        if self.kappa.low < self.min_kappa:
            return (
                f"its kappa with people is {self.kappa.value:.2f} ({self.kappa.low:.2f} to "
                f"{self.kappa.high:.2f}), and its lower bound must be at least {self.min_kappa:g}"
            )
        if self.length.explains_agreement:
            return (
                "length may explain its agreement: it agrees with people on "
                f"{self.length.shorter_agreed:g} of {self.length.shorter} pairs whose better answer is the "
                f"shorter one, and on {self.length.longer_agreed:g} of {self.length.longer} whose better "
                "answer is the longer one; label more pairs of the kind that is missing"
            )
        return ""


def calibrate(
    opinions: Sequence[JudgeOpinion],
    *,
    settings: JudgeSettings,
    identity: str,
    mode: Mode,
    confidence: float,
    unjudged: int = 0,
) -> JudgeCalibration:
    counts = {
        (person, judge): sum((o.person, o.judge) == (person, judge) for o in opinions)
        for person in (True, False)
        for judge in (True, False)
    }
    clusters = [opinion.cluster for opinion in opinions]
    agreed = [float(opinion.person == opinion.judge) for opinion in opinions]
    agreement = Interval(0.0, 1.0)
    if opinions:
        agreement = bounded_mean(agreed, clusters, confidence=confidence)
    share = sum(agreed) / len(agreed) if agreed else 0.0
    kappa = kappa_of(opinions, mode=mode)
    bounds = _bound_kappa(opinions, mode=mode, confidence=confidence) if kappa is not None else None
    by_group: dict[str, tuple[int, int]] = {}
    for opinion in opinions:
        if opinion.group:
            right, total = by_group.get(opinion.group, (0, 0))
            by_group[opinion.group] = right + (opinion.person == opinion.judge), total + 1
    position = None
    if mode == "pairwise":
        first, second = (sum(o.place == side for o in opinions) for side in ("first", "second"))
        p_value = mcnemar(first, losses=second)
        position = PositionBias(always_first=first, always_second=second, p_value=p_value)
    return JudgeCalibration(
        model=settings.model,
        identity=identity,
        mode=mode,
        labels=len(opinions),
        clusters=len(set(clusters)),
        agreement=Figure(value=share, low=min(agreement.low, share), high=max(agreement.high, share)),
        kappa=None
        if kappa is None or bounds is None
        else Figure(value=kappa, low=min(bounds.low, kappa), high=max(bounds.high, kappa)),
        both_good=counts[True, True],
        judge_only=counts[False, True],
        people_only=counts[True, False],
        both_bad=counts[False, False],
        unjudged=unjudged,
        groups={group: f"{right} of {total}" for group, (right, total) in sorted(by_group.items())},
        position=position,
        length=_length_bias(opinions, mode=mode, confidence=confidence),
        confidence=confidence,
        min_kappa=settings.min_kappa,
        min_labels=settings.min_labels,
    )


def kappa_of(opinions: Sequence[JudgeOpinion], *, mode: Mode) -> float | None:
    """Agreement beyond chance, as a share of what is possible; None if people's labels do not differ.

    Of a pair, which is shown in both orders, chance agrees in half of the cases.
    """
    if not opinions:
        return None
    n = len(opinions)
    agreed = sum(opinion.person == opinion.judge for opinion in opinions) / n
    if mode == "pairwise":
        return 2 * agreed - 1
    person = sum(opinion.person for opinion in opinions) / n
    judge = sum(opinion.judge for opinion in opinions) / n
    if person in (0.0, 1.0):
        return None
    chance = person * judge + (1 - person) * (1 - judge)
    return (agreed - chance) / (1 - chance)


def _bound_kappa(opinions: Sequence[JudgeOpinion], *, mode: Mode, confidence: float) -> Interval:
    """Sessions are drawn as a whole. A draw whose labels do not differ shows no agreement beyond chance."""
    groups: dict[str, list[JudgeOpinion]] = {}
    for opinion in opinions:
        groups.setdefault(opinion.cluster, []).append(opinion)
    parts = list(groups.values())
    draw = random.Random(0)
    kappas = []
    for _ in range(RESAMPLES):
        sample = [opinion for part in draw.choices(parts, k=len(parts)) for opinion in part]
        kappa = kappa_of(sample, mode=mode)
        kappas.append(0.0 if kappa is None else kappa)
    kappas.sort()
    tail, last = widened_tail((1 - confidence) / 2, n=len(parts)), len(kappas) - 1
    low, high = kappas[int(tail * last)], kappas[last - int(tail * last)]
    if mode == "pairwise" or low == high:
        # As exact as the agreement itself: without a single disagreement a draw has none either.
        agreed = [float(opinion.person == opinion.judge) for opinion in opinions]
        exact = bounded_mean(agreed, [o.cluster for o in opinions], confidence=confidence)
        low, high = min(low, 2 * exact.low - 1), max(high, 2 * exact.high - 1)
    return Interval(max(low, -1.0), min(high, 1.0))


def _length_bias(opinions: Sequence[JudgeOpinion], *, mode: Mode, confidence: float) -> LengthBias:
    # By how much people's choice is longer, how far the judge agrees with it (0 to 1), and the cluster.
    pairs = [(o.length, float(o.person == o.judge), o.cluster) for o in opinions]
    if mode != "pairwise":
        # Each answer in one pair at most: the shortest good one with the longest other one, and so on.
        good = sorted((o for o in opinions if o.person), key=lambda o: o.length)
        bad = sorted((o for o in opinions if not o.person), key=lambda o: -o.length)
        # The side with fewer sessions says which pairs belong together.
        by_good = len({o.cluster for o in good}) <= len({o.cluster for o in bad})
        pairs = [
            (
                better.length - worse.length,
                (1 + better.judge - worse.judge) / 2,
                (better if by_good else worse).cluster,
            )
            for better, worse in zip(good, bad, strict=False)
        ]
    strata = ([pair for pair in pairs if pair[0] > 0], [pair for pair in pairs if pair[0] < 0])
    agreed = [sum(agreement for _, agreement, _ in stratum) for stratum in strata]
    # Two bounds, each at half of the error.
    bounds = [
        bounded_mean(
            [agreement for _, agreement, _ in stratum],
            [cluster for _, _, cluster in stratum],
            confidence=(1 + confidence) / 2,
        )
        for stratum in strata
    ]
    shares = [total / len(stratum) if stratum else 0.5 for total, stratum in zip(agreed, strata, strict=True)]
    value = sum(shares) - 1
    low, high = sum(bound.low for bound in bounds) - 1, sum(bound.high for bound in bounds) - 1
    return LengthBias(
        longer=len(strata[0]),
        longer_agreed=agreed[0],
        shorter=len(strata[1]),
        shorter_agreed=agreed[1],
        kappa=Figure(value=value, low=min(low, value), high=max(high, value)),
    )


def opinions_of_marks(
    labeled: Sequence[LabeledAnswer], marks: Mapping[str, float | None]
) -> tuple[list[JudgeOpinion], int]:
    """`marks` are by the id of the case; answers without one are counted."""
    marked = [(answer, marks.get(answer.case.id)) for answer in labeled]
    opinions = [
        JudgeOpinion(
            answer.good,
            mark >= GOOD_MARK,
            answer.cluster,
            answer.case.group or "",
            length=len(answer.text),
        )
        for answer, mark in marked
        if mark is not None
    ]
    return opinions, len(marked) - len(opinions)


def opinions_of_pairs(
    labeled: Sequence[LabeledPair], verdicts: Sequence[PairVerdict]
) -> tuple[list[JudgeOpinion], int]:
    """The answer that the person preferred was the candidate of each verdict."""
    by_case = {verdict.case_id: verdict for verdict in verdicts if verdict.grade is not None}
    judged = [(pair, by_case[pair.case.id]) for pair in labeled if pair.case.id in by_case]
    opinions = [
        JudgeOpinion(
            True,
            verdict.grade == 1.0,
            pair.cluster,
            pair.case.group or "",
            length=len(pair.preferred) - len(pair.other),
            place=verdict.place,
        )
        for pair, verdict in judged
    ]
    return opinions, len(labeled) - len(opinions)
