"""Two subjects on the same cases, pair by pair.

In: their reports, the session of each case, margins set beforehand. Out: a Comparison for each metric
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
from typing import NamedTuple

from graftwork.evaluate.statistics.bounded import make_units, mean_differs
from graftwork.evaluate.statistics.intervals import Interval, Sided, quantile_interval
from graftwork.evaluate.statistics.means import from_0_to_1, score_difference
from graftwork.evaluate.statistics.significance import holm, mcnemar, paired_permutation
from graftwork.grading.metrics import FIRST_TOKEN, JUDGE_PREFERENCE, LATENCY, LOWER_IS_BETTER, PERPLEXITY
from graftwork.records.report import Comparison, Metric, SubjectReport

MCNEMAR = "exact McNemar"
BOUNDED_MEAN = "bounded-mean test"
SIGN_FLIPS = "sign flips"
SIGN_TEST = "sign test"


class _Pairs(NamedTuple):
    """Grades in the order of the cases. `clusters` is None where every case is independent."""

    before: list[float]
    after: list[float]
    clusters: list[str] | None

    @property
    def graded_0_or_1(self) -> bool:
        return all(value in (0.0, 1.0) for value in (*self.before, *self.after))

    @property
    def bounded(self) -> bool:
        return from_0_to_1(self.before) and from_0_to_1(self.after)

    @property
    def differences(self) -> list[float]:
        return [new - old for old, new in zip(self.before, self.after, strict=True)]

    @property
    def gained(self) -> int:
        return sum(new > old for old, new in zip(self.before, self.after, strict=True))

    @property
    def lost(self) -> int:
        return sum(new < old for old, new in zip(self.before, self.after, strict=True))


def compare(
    baseline: SubjectReport,
    *,
    candidate: SubjectReport,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
    margins: Mapping[str, float] | None = None,
) -> tuple[Comparison, ...]:
    """Every metric that both have, case by case. A win is a case where the candidate did better.

    The difference is candidate less baseline, whichever way is better. A margin is how much worse the
    candidate may be, in the metric's own unit; it is tested one-sided at `confidence`.
    """
    allowed = margins or {}
    found: list[Comparison] = []
    for name, metric in candidate.metrics.items():
        before = baseline.metrics.get(name)
        if before is not None and (metric.scores or metric.kind != "number"):
            pairs = _pair_up(before, metric, sessions or {})
            if name == PERPLEXITY:
                found.append(_compare_perplexity(pairs, before.value, confidence, allowed.get(name)))
            else:
                found.append(_compare_grades(name, pairs, confidence, allowed.get(name)))
    old, new = baseline.generation, candidate.generation
    for name, timed in (
        (LATENCY, (old.single_latency_seconds, new.single_latency_seconds)),
        (FIRST_TOKEN, (old.first_token_seconds, new.first_token_seconds)),
    ):
        if timed[0] and len(timed[0]) == len(timed[1]):
            found.append(_compare_seconds(name, *timed, confidence, allowed.get(name)))
    sides = {"baseline": baseline.subject, "candidate": candidate.subject}
    return tuple(comparison.model_copy(update=sides) for comparison in found)


def compare_choices(
    grades: Mapping[str, float | None], *, confidence: float = 0.95, sessions: Mapping[str, str] | None = None
) -> Comparison:
    """Preferences: 1 where the candidate's answer was chosen, 0 the baseline's, else neither."""
    judged = {case: grade for case, grade in grades.items() if grade is not None}
    pairs = _Pairs(
        before=[float(grade == 0.0) for grade in judged.values()],
        after=[float(grade == 1.0) for grade in judged.values()],
        clusters=cluster_cases(list(judged), sessions=sessions or {}),
    )
    return _compare_grades(JUDGE_PREFERENCE, pairs, confidence, None)


def compare_candidates(
    baseline: SubjectReport,
    *,
    candidates: Sequence[SubjectReport],
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
    margins: Mapping[str, float] | None = None,
) -> tuple[Comparison, ...]:
    """Each candidate against the baseline; p of each metric is corrected for how many were tried."""
    found = [
        comparison
        for candidate in candidates
        for comparison in compare(
            baseline, candidate=candidate, confidence=confidence, sessions=sessions, margins=margins
        )
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
    return _differences(baseline.metrics[metric], candidate.metrics[metric])


def _pair_up(before: Metric, after: Metric, sessions: Mapping[str, str]) -> _Pairs:
    both = list(_differences(before, after))
    return _Pairs(
        before=[before.scores[case] or 0.0 for case in both],
        after=[after.scores[case] or 0.0 for case in both],
        clusters=cluster_cases(both, sessions=sessions),
    )


def _differences(before: Metric, after: Metric) -> dict[str, float]:
    return {
        case: new - old
        for case, new in after.scores.items()
        if new is not None and (old := before.scores.get(case)) is not None
    }


def _compare_grades(name: str, pairs: _Pairs, confidence: float, margin: float | None) -> Comparison:
    n = len(pairs.before)
    gained, lost = pairs.gained, pairs.lost
    if pairs.graded_0_or_1 and pairs.clusters is None:
        difference, test, p_value = (gained - lost) / n if n else 0.0, MCNEMAR, mcnemar(gained, losses=lost)
    else:
        difference = math.fsum(pairs.after) / n - math.fsum(pairs.before) / n
        test = BOUNDED_MEAN if pairs.bounded else SIGN_FLIPS
        test = test if pairs.clusters is None else f"{test} by session"
        p_value = _p_of_mean(pairs)
    low, high = _difference(pairs, confidence, "two")
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
        clusters=len(set(pairs.clusters or ())),
        margin=margin,
        non_inferior=None if margin is None else _keeps_margin(pairs, margin, confidence, lower_is_better),
    )


def _p_of_mean(pairs: _Pairs) -> float:
    """Two-sided p of the mean difference.

    Numbers without bounds are tested by sign flips, which ask for more: that no difference be likelier than
    its opposite. No test of a mean holds for every distribution there.
    """
    if not pairs.bounded:
        return paired_permutation(pairs.before, pairs.after, clusters=pairs.clusters)
    return mean_differs(make_units(pairs.differences, pairs.clusters))


def _compare_perplexity(pairs: _Pairs, before: float, confidence: float, margin: float | None) -> Comparison:
    """Losses are compared, case by case, and shown as a change of the baseline's perplexity."""

    def as_points(loss: float) -> float:
        return before * math.expm1(loss)

    losses = _Pairs([math.log(x) for x in pairs.before], [math.log(x) for x in pairs.after], pairs.clusters)
    allowed = None if margin is None or not before else math.log1p(margin / before)
    found = _compare_grades(PERPLEXITY, losses, confidence, allowed)
    changed = {
        "difference": as_points(found.difference),
        "low": as_points(found.low),
        "high": as_points(found.high),
    }
    return found.model_copy(update={**changed, "margin": margin})


def _difference(pairs: _Pairs, confidence: float, sided: Sided) -> Interval:
    before, after, clusters = pairs
    if not before:
        return Interval(-1.0, 1.0)
    return score_difference(before, after, clusters=clusters, confidence=confidence, sided=sided).interval


def _keeps_margin(pairs: _Pairs, margin: float, confidence: float, lower_is_better: bool) -> bool:
    """Whether the one-sided bound on the bad side is within the margin. No pairs prove nothing."""
    if not pairs.before:
        return False
    if lower_is_better:
        return _difference(pairs, confidence, "upper").high < margin
    return _difference(pairs, confidence, "lower").low > -margin


def _compare_seconds(
    name: str, before: Sequence[float], after: Sequence[float], confidence: float, margin: float | None
) -> Comparison:
    """The same requests, one at a time: the median of the differences, and a sign test."""
    differences = [new - old for old, new in zip(before, after, strict=True)]
    faster, slower = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    middle = median(differences)
    low, high = quantile_interval(differences, quantile=0.5, confidence=confidence)
    # A two-sided interval leaves out as much on each side as a one-sided one at this confidence.
    bound = quantile_interval(differences, quantile=0.5, confidence=2 * confidence - 1).high
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
        margin=margin,
        non_inferior=None if margin is None else bound < margin,
    )
