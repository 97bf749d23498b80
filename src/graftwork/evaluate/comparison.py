"""Two subjects on the same cases, pair by pair; what this many cases can show, even after repeated use.

Input: their reports, the session of each case, how often the questions were used to choose a candidate.
Output: a Comparison for each metric that both have; a Power and a Wear with their sentences, and the
confidence that bounds must have at this use. Pure; does not know which differences matter.

Grades from 0 to 1 get the test and the interval of a bounded mean, which for grades of 0 and 1 is McNemar's
exact test; other numbers a bootstrap interval and sign flips; latency the median of the differences with its
exact interval. Where a session has several cases, the session is the unit. Several candidates against one
baseline get Holm's correction.

Measuring k candidates and keeping the best gives chance k tries. So the error that a gate may make is spread
over the uses of a test set: all of it at the first, and a quarter more over all that follow. A later result
has to be clearer.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import NormalDist, median

from graftwork.evaluate.statistics.intervals import fewest_for_quantile, quantile_interval
from graftwork.evaluate.statistics.means import (
    bounded_mean,
    from_0_to_1,
    make_units,
    mean_differs,
    score_difference,
)
from graftwork.evaluate.statistics.significance import (
    USUAL_LOSS_RATE,
    USUAL_POWER,
    cases_for_difference,
    detectable_difference,
    holm,
    mcnemar,
    paired_permutation,
)
from graftwork.grading.metrics import (
    FIRST_TOKEN,
    JUDGE_PREFERENCE,
    LATENCY,
    LOWER_IS_BETTER,
    PERPLEXITY,
    name_of,
    show_p,
)
from graftwork.records.report import Comparison, Power, Report, SubjectReport, Wear
from graftwork.text.wording import plural

MCNEMAR = "exact McNemar"
BOUNDED_MEAN = "bounded-mean test"
SIGN_FLIPS = "sign flips"
SIGN_TEST = "sign test"

USUAL_GAIN = 0.05
"""The gain that most teams ask about: five points."""
MOST_LOSSES = 0.3
"""Beyond this share of losses, more cases are not the answer."""

LATER_LOOKS = 0.25
"""Share of the error of the first look that all later looks together may spend."""
WORN = 2.0
"""A set is called worn out once it needs this many times the cases of a fresh set."""


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
    comparisons: list[Comparison] = []
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
            comparisons.append(comparison)
    old, new = baseline.generation, candidate.generation
    for name, timed in (
        (LATENCY, (old.single_latency_seconds, new.single_latency_seconds)),
        (FIRST_TOKEN, (old.first_token_seconds, new.first_token_seconds)),
    ):
        if timed[0] and len(timed[0]) == len(timed[1]):
            comparisons.append(_compare_seconds(name, *timed, confidence))
    sides = {"baseline": baseline.subject, "candidate": candidate.subject}
    return tuple(comparison.model_copy(update=sides) for comparison in comparisons)


def compare_choices(
    grades: Mapping[str, float | None], *, confidence: float = 0.95, sessions: Mapping[str, str] | None = None
) -> Comparison:
    """Preferences: 1 if the candidate's answer was chosen, 0 if the baseline's was."""
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
    """Compare each candidate with the baseline; p of each metric is corrected for the number of
    candidates.
    """
    comparisons = [
        comparison
        for candidate in candidates
        for comparison in compare(baseline, candidate=candidate, confidence=confidence, sessions=sessions)
    ]
    if len(candidates) < 2:
        return tuple(comparisons)
    corrected = {}
    for name in dict.fromkeys(comparison.metric for comparison in comparisons):
        corrected[name] = holm({c.candidate: c.p_value for c in comparisons if c.metric == name})
    return tuple(c.model_copy(update={"adjusted_p": corrected[c.metric][c.candidate]}) for c in comparisons)


def compare_with_best(
    subjects: Sequence[SubjectReport],
    *,
    metric: str,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, Comparison]]:
    """The subject with the best figure, and each of the others less it, by name.

    Which one is the best is seen on the same cases, so all pairs count: p is corrected for their number, and
    the intervals hold together at this confidence. Of equals, the first is called the best.
    """
    sign = 1 if metric in LOWER_IS_BETTER else -1
    ranked = sorted(subjects, key=lambda subject: sign * subject.metrics[metric].value)
    alone = [subject.model_copy(update={"metrics": {metric: subject.metrics[metric]}}) for subject in ranked]
    pairs = list(combinations(alone, 2))
    level = 1 - (1 - confidence) / max(len(pairs), 1)
    compared = [
        comparison
        for baseline, candidate in pairs
        for comparison in compare(baseline, candidate=candidate, confidence=level, sessions=sessions)
        if comparison.metric == metric
    ]
    adjusted = holm({str(number): comparison.p_value for number, comparison in enumerate(compared)})
    best = ranked[0].subject
    return best, {
        comparison.candidate: comparison.model_copy(update={"adjusted_p": adjusted[str(number)]})
        for number, comparison in enumerate(compared)
        if comparison.baseline == best
    }


def cluster_cases(cases: Sequence[str], *, sessions: Mapping[str, str]) -> list[str] | None:
    """Return the cluster of each case: its session, or itself. None if no session has two cases."""
    sizes = Counter(sessions[case] for case in cases if case in sessions)
    if all(count < 2 for count in sizes.values()):
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
    """Grades in the order of the cases. `clusters` is None if every case is independent."""
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
    """Compare the same requests, one at a time: median of the differences, and a sign test."""
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


def what_cases_show(
    cases: int,
    *,
    comparison: Comparison | None = None,
    effective: float | None = None,
    confidence: float = 0.95,
) -> Power:
    """Return what this many cases can show. `comparison` shows how often a case gets worse; `effective` is
    the number of independent cases.
    """
    worth = min(1.0, effective / cases) if effective is not None and cases else 1.0
    worse = (
        comparison is not None and _is_shown(comparison, confidence) and comparison.wins < comparison.losses
    )
    loss_rate = USUAL_LOSS_RATE
    if comparison is not None and comparison.n:
        # What was seen, as if one case more had got worse and one had not: none lost of 31 is not never.
        # Where the candidate is shown to be worse, the losses are the difference itself, and the wins go
        # against it.
        against = comparison.wins if worse else comparison.losses
        loss_rate = min(MOST_LOSSES, (against + 1) / (comparison.n + 2))
    independent = math.floor(cases * worth + 1e-9)
    detectable = detectable_difference(independent, loss_rate=loss_rate, confidence=confidence)
    needed = cases_for_difference(USUAL_GAIN, loss_rate=loss_rate, confidence=confidence)
    needed = math.ceil(needed / worth) if worth else needed
    # Up to two leading digits: 498 cases are about 500.
    step = int(10 ** max(0, len(str(needed)) - 2))
    rounded = math.ceil(needed / step) * step
    gain = _points(USUAL_GAIN)
    enough = f"to see {gain} you need about {rounded}"
    if cases >= needed:
        enough = f"a difference of {gain} needs {rounded}, and these are enough"
    return Power(
        cases=cases,
        detectable=detectable if math.isfinite(detectable) else None,
        asked=USUAL_GAIN,
        needed=needed,
        loss_rate=loss_rate,
        sentence=(
            f"{_say_seen(cases, independent, detectable, comparison=comparison, confidence=confidence)}; "
            f"{enough} (with 80 % power, if "
            f"{100 * loss_rate:.0f} % of the cases {'go the other way' if worse else 'get worse'})."
        ),
    )


def _is_shown(comparison: Comparison | None, confidence: float) -> bool:
    return comparison is not None and bool(comparison.n) and comparison.p_value <= 1 - confidence + 1e-12


def _say_seen(
    cases: int, independent: int, detectable: float, *, comparison: Comparison | None, confidence: float
) -> str:
    noun = "case" if cases == 1 else "cases"
    having = f"{cases} {noun}"
    if independent != cases:
        having += f", worth {independent} independent {'one' if independent == 1 else 'ones'},"
    if math.isfinite(detectable):
        smallest = math.ceil(100 * detectable - 1e-9) / 100
        return f"With {having} you can see a difference of {_points(smallest)}"
    if comparison is not None and _is_shown(comparison, confidence):
        name, p = name_of(comparison.metric), show_p(comparison.p_value)
        return f"{having} show the difference in {name} ({p}), and hardly a smaller one"
    fewest = fewest_for_quantile(0.5, confidence=confidence)
    if independent < fewest:
        # What sessions leave of the cases is computed on this metric, and may be more on another.
        where = f" in {name_of(comparison.metric)}" if comparison is not None and independent != cases else ""
        return f"{having} cannot show any difference{where}, however large"
    return f"{having} show a difference only if {fewest} or more change, and nearly all the same way"


def _points(share: float) -> str:
    points = f"{100 * share:g}"
    return f"{points} point" if points == "1" else f"{points} points"


def share_of_look(look: int) -> float:
    """Return the share of the error that a look at the same cases may spend: all of it first, then less and
    less. The k-th look gets a quarter of 1 / (k (k - 1)), which adds up to a quarter. So the chance of a
    false result is at most 1.25 times that of a single look, however many looks there are.
    """
    return 1.0 if look <= 1 else LATER_LOOKS / (look * (look - 1))


def confidence_at(confidence: float, *, look: int) -> float:
    """The confidence that a bound must have at this look."""
    return 1 - (1 - confidence) * share_of_look(look)


def look_of(report: Report) -> int:
    """Return which look at its questions a report is."""
    return 1 if report.wear is None else max(1, report.wear.look or report.wear.candidates)


def wear_of(report: Report, *, candidates: int, look: int) -> Wear:
    """Return the wear of a set. `candidates` counts this report's own; the gain is that of the first
    metric.
    """
    metrics = report.candidate.metrics
    rates = {name for name, metric in metrics.items() if metric.kind == "rate"}
    first = next((c for c in report.comparisons if c.n and c.metric in rates), None)
    confidence = metrics[first.metric].confidence if first else 0.95
    steps: Mapping[str, float] = {}
    subjects = {subject.subject: subject for subject in (report.baseline, *report.others)}
    if first is not None and first.clusters and first.baseline in subjects:
        steps = differences_of(subjects[first.baseline], candidate=report.candidate, metric=first.metric)
    clusters = cluster_cases(list(steps), sessions=report.sessions)
    return describe_wear(
        report.looks,
        candidates=candidates,
        look=look,
        comparison=first,
        confidence=confidence,
        differences=list(steps.values()),
        clusters=clusters,
    )


def describe_wear(
    looks: int,
    *,
    candidates: int,
    look: int,
    comparison: Comparison | None = None,
    confidence: float = 0.95,
    differences: Sequence[float] = (),
    clusters: Sequence[str] | None = None,
) -> Wear:
    """Describe the wear; `differences` and `clusters` are those of the comparison, if sessions contain
    several cases.
    """

    def beyond(nth_look: int) -> float | None:
        needed = confidence_at(confidence, look=nth_look)
        if clusters is not None:
            low = bounded_mean(differences, clusters, lowest=-1.0, confidence=needed).low
            return sum(differences) / len(differences) - low
        n, losses = (comparison.n, comparison.losses) if comparison is not None else (0, 0)
        return gain_beyond_chance(n, losses=losses, alpha=1 - needed)

    chance_gain, times_more = beyond(look), more_cases(look, confidence=confidence)
    sentence = f"This test set was looked at {'once' if looks == 1 else f'{looks} times'}"
    if look <= 1:
        sentence += ", always with the same candidate." if looks > 1 else "."
    else:
        chance = "the best candidate may be the luckiest"
        if chance_gain is not None:
            points = f"{100 * chance_gain:.1f}".removesuffix(".0")
            chance = f"a gain under {points} point{'' if points == '1' else 's'} may be chance"
        elif comparison is not None and comparison.n:
            chance = f"no gain on {plural(comparison.n, 'case')} is beyond chance any more"
        cost = f"it takes {times_more:.1f} times as many cases as a fresh set"
        advice = " It is worn out: hold out new rows." if times_more >= WORN else ""
        sentence += f", and this is evaluation {look} on its questions; {chance}, and {cost}.{advice}"
    return Wear(
        looks=looks,
        candidates=max(1, min(candidates, looks)),
        look=look,
        confidence=confidence_at(confidence, look=look),
        chance_gain=chance_gain,
        fresh_gain=beyond(1),
        metric=comparison.metric if comparison is not None else "",
        worn=times_more >= WORN,
        sentence=sentence,
    )


def more_cases(look: int, *, confidence: float = 0.95) -> float:
    """Approximate factor on the cases of a fresh set that a look needs for the same power."""
    reach = NormalDist().inv_cdf(USUAL_POWER)
    fresh, now = (NormalDist().inv_cdf((1 + confidence_at(confidence, look=k)) / 2) for k in (1, look))
    return ((now + reach) / (fresh + reach)) ** 2


def gain_beyond_chance(n: int, *, losses: int, alpha: float) -> float | None:
    """The smallest gain on n pairs with this many losses whose exact McNemar p is at most alpha."""
    for wins in range(losses + 1, n - losses + 1):
        if mcnemar(wins, losses=losses) <= alpha:
            return (wins - losses) / n
    return None
