"""Two subjects on the same cases, pair by pair.

In: their reports, the session of each case. Out: a Comparison for each metric
that both have. Pure; does not know which differences matter.

Grades from 0 to 1 get the test and the interval of a bounded mean, which for grades of 0 and 1 is McNemar's
exact test; other numbers a bootstrap interval and sign flips; latency the median of the differences with its
exact interval. Where a session has several cases, the session is the unit. Several candidates against one
baseline get Holm's correction.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from graftwork.evaluate.statistics.bounded import make_units, mean_differs
from graftwork.evaluate.statistics.intervals import quantile_interval
from graftwork.evaluate.statistics.means import from_0_to_1, score_difference
from graftwork.evaluate.statistics.significance import holm, mcnemar, paired_permutation
from graftwork.grading.metrics import FIRST_TOKEN, JUDGE_PREFERENCE, LATENCY, LOWER_IS_BETTER, PERPLEXITY
from graftwork.records.report import Comparison, SubjectReport

MCNEMAR = "exact McNemar"
BOUNDED_MEAN = "bounded-mean test"
SIGN_FLIPS = "sign flips"
SIGN_TEST = "sign test"


def compare(
    baseline: SubjectReport,
    *,
    candidate: SubjectReport,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
) -> tuple[Comparison, ...]:
    """Every metric that both have, case by case. A win is a case where the candidate did better.

    The difference is candidate less baseline, whichever way is better.
    """
    found: list[Comparison] = []
    for name, metric in candidate.metrics.items():
        before = baseline.metrics.get(name)
        if before is not None and (metric.scores or metric.kind != "number"):
            cases = list(differences_of(baseline, candidate=candidate, metric=name))
            old_grades = [before.scores[case] or 0.0 for case in cases]
            new_grades = [metric.scores[case] or 0.0 for case in cases]
            clusters = cluster_cases(cases, sessions=sessions or {})
            if name == PERPLEXITY:
                # Losses are compared, case by case, and shown as a change of the baseline's perplexity.
                old_grades, new_grades = ([math.log(x) for x in side] for side in (old_grades, new_grades))
            comparison = _compare_grades(name, old_grades, new_grades, clusters, confidence)
            if name == PERPLEXITY:
                changes = {key: getattr(comparison, key) for key in ("difference", "low", "high")}
                points = {key: before.value * math.expm1(loss) for key, loss in changes.items()}
                comparison = comparison.model_copy(update=points)
            found.append(comparison)
    old, new = baseline.generation, candidate.generation
    for name, timed in (
        (LATENCY, (old.single_latency_seconds, new.single_latency_seconds)),
        (FIRST_TOKEN, (old.first_token_seconds, new.first_token_seconds)),
    ):
        if timed[0] and len(timed[0]) == len(timed[1]):
            found.append(_compare_seconds(name, *timed, confidence))
    sides = {"baseline": baseline.subject, "candidate": candidate.subject}
    return tuple(comparison.model_copy(update=sides) for comparison in found)


def compare_choices(
    grades: Mapping[str, float | None], *, confidence: float = 0.95, sessions: Mapping[str, str] | None = None
) -> Comparison:
    """Preferences: 1 where the candidate's answer was chosen, 0 the baseline's, else neither."""
    judged = {case: grade for case, grade in grades.items() if grade is not None}
    before = [float(grade == 0.0) for grade in judged.values()]
    after = [float(grade == 1.0) for grade in judged.values()]
    clusters = cluster_cases(list(judged), sessions=sessions or {})
    return _compare_grades(JUDGE_PREFERENCE, before, after, clusters, confidence)


def compare_candidates(
    baseline: SubjectReport,
    *,
    candidates: Sequence[SubjectReport],
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
) -> tuple[Comparison, ...]:
    """Each candidate against the baseline; p of each metric is corrected for how many were tried."""
    found = [
        comparison
        for candidate in candidates
        for comparison in compare(baseline, candidate=candidate, confidence=confidence, sessions=sessions)
    ]
    if len(candidates) < 2:
        return tuple(found)
    corrected = {}
    for name in dict.fromkeys(comparison.metric for comparison in found):
        corrected[name] = holm({c.candidate: c.p_value for c in found if c.metric == name})
    return tuple(c.model_copy(update={"adjusted_p": corrected[c.metric][c.candidate]}) for c in found)


def cluster_cases(cases: Sequence[str], *, sessions: Mapping[str, str]) -> list[str] | None:
    """The cluster of each case: its session, or itself. None where no session has two of them."""
    named = Counter(sessions[case] for case in cases if case in sessions)
    if all(count < 2 for count in named.values()):
        return None
    return [f"session {sessions[case]}" if case in sessions else f"case {case}" for case in cases]


def differences_of(baseline: SubjectReport, *, candidate: SubjectReport, metric: str) -> dict[str, float]:
    """Candidate less baseline for each case that both were graded on."""
    before = baseline.metrics[metric].scores
    return {
        case: new - old
        for case, new in candidate.metrics[metric].scores.items()
        if new is not None and (old := before.get(case)) is not None
    }


def _compare_grades(
    name: str,
    before: Sequence[float],
    after: Sequence[float],
    clusters: Sequence[str] | None,
    confidence: float,
) -> Comparison:
    """Grades in the order of the cases. `clusters` is None where every case is independent."""
    n = len(before)
    changes = [new - old for old, new in zip(before, after, strict=True)]
    gained, lost = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
    bounded = from_0_to_1(before) and from_0_to_1(after)
    if clusters is None and all(value in (0.0, 1.0) for value in (*before, *after)):
        difference, test, p_value = (gained - lost) / n if n else 0.0, MCNEMAR, mcnemar(gained, losses=lost)
    else:
        difference = math.fsum(after) / n - math.fsum(before) / n
        test = BOUNDED_MEAN if bounded else SIGN_FLIPS
        test = test if clusters is None else f"{test} by session"
        # Numbers without bounds are tested by sign flips, which ask for more: that no difference be likelier
        # than its opposite. No test of a mean holds for every distribution there.
        p_value = (
            mean_differs(make_units(changes, clusters))
            if bounded
            else paired_permutation(before, after, clusters=clusters)
        )
    low, high = -1.0, 1.0
    if n:
        low, high = score_difference(before, after, clusters=clusters, confidence=confidence).interval
    lower_is_better = name in LOWER_IS_BETTER
    return Comparison(
        metric=name,
        baseline="",
        candidate="",
        n=n,
        wins=lost if lower_is_better else gained,
        losses=gained if lower_is_better else lost,
        difference=difference,
        low=min(low, difference),
        high=max(high, difference),
        p_value=p_value,
        test=test,
        clusters=len(set(clusters or ())),
    )


def _compare_seconds(
    name: str, before: Sequence[float], after: Sequence[float], confidence: float
) -> Comparison:
    """The same requests, one at a time: the median of the differences, and a sign test."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    faster, slower = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    middle = median(differences)
    low, high = quantile_interval(differences, quantile=0.5, confidence=confidence)
    return Comparison(
        metric=name,
        baseline="",
        candidate="",
        n=len(differences),
        wins=faster,
        losses=slower,
        difference=middle,
        # Of too few pairs for a bound the range is shown; the gate knows that it proves nothing.
        low=low if math.isfinite(low) else min(differences),
        high=high if math.isfinite(high) else max(differences),
        p_value=mcnemar(faster, losses=slower),
        test=SIGN_TEST,
    )
