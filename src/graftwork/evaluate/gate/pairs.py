"""The candidate compared with another subject on the same cases, as gain or loss.

In: a report, whom to compare with, a metric. Out: a Pair, or why there is none. Pure; statistics come from
`evaluate.comparison`. A gain is better whichever way the metric counts.
"""

import math
from collections.abc import Mapping, Set
from typing import NamedTuple

from graftwork.evaluate.comparison import cluster_cases, compare, differences_of
from graftwork.evaluate.gate.figures import (
    MIDDLE,
    all_wrong,
    find_ungraded_pairs,
    graded_cases,
    measured,
    times_for_percentile,
    times_of,
)
from graftwork.evaluate.gate.settings import TIMED, Against
from graftwork.evaluate.judge.tally import compare_by_judge
from graftwork.evaluate.statistics.bounded import Units, make_units
from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.evaluate.subjects import LOG, LOGGED_PROMPT, PROMPTED
from graftwork.grading.metrics import JUDGE_PREFERENCE, LATENCY_P95, LOWER_IS_BETTER, PERPLEXITY
from graftwork.records.report import Comparison, Report, SubjectReport

SIDE_BY_SIDE = "figures side by side"
BASE = "base"
NAMED: dict[Against, str] = {"log": LOG, "prompt": PROMPTED, "logged_prompt": LOGGED_PROMPT}
"""Subjects that go by one name in every report."""


class Surroundings(NamedTuple):
    """What is known besides the report. `no_champion`: nothing is served yet, so the base is used instead."""

    no_champion: bool = False
    champion: str = ""
    """The release that is served, where the report does not hold it."""
    instead: str = ""
    """Why the base replaces the champion, in a sentence, where the reason is not that nothing is served."""
    look: int = 0
    """Which look at these cases this is: later ones may err less (`evaluate.power`); 0: see the report."""
    tried: int = 1
    """Adapters that are judged together."""
    doubts: Mapping[str, str] = {}
    """Metrics that may not decide anything, each with the reason: an uncalibrated judge."""


class Pair(NamedTuple):
    """A comparison as gain, with the bounds of the gain. `confidence` is that of the report."""

    seen: Comparison
    kind: str
    gain: float
    low: float
    high: float
    confidence: float
    ungraded: int = 0
    """Cases that one of the two could not be graded on: each counts in `low` as one that was lost."""
    fewest: int = 0
    """Requests, or sessions, without which no bound of the gain reaches the confidence."""
    worst_p: float = 1.0
    """p of the gain if every ungraded case was lost; that of `seen` where there is none."""
    units: Units | None = None
    """The gain of each session or case; None where grades have no bounds or are not known one by one."""

    @property
    def too_few(self) -> bool:
        """So few requests or sessions bound nothing, however close they are to each other."""
        return (self.seen.clusters or self.seen.n) < self.fewest

    @property
    def pairs_for_a_bound(self) -> int:
        """As many pairs like these as it takes for enough requests or sessions."""
        return math.ceil(self.fewest * self.seen.n / (self.seen.clusters or self.seen.n))

    @property
    def proven_loss(self) -> bool:
        beyond_chance = self.seen.p_value < 1 - self.confidence
        if self.seen.test == SIDE_BY_SIDE:
            beyond_chance = not self.low <= 0 <= self.high
        return self.gain < 0 and beyond_chance and not self.too_few


def lower_is_better(name: str) -> bool:
    return name in LOWER_IS_BETTER


def find_subject(report: Report, against: Against, around: Surroundings) -> SubjectReport | None:
    """Whom the candidate is held against; None where it did not answer these cases."""
    everyone = (report.baseline, *report.others)
    if against == "champion":
        if around.no_champion and report.champion is None:
            return find_subject(report, "base", around)
        return next((subject for subject in everyone if subject.subject == report.champion), None)
    if against in NAMED:
        return next((subject for subject in everyone if subject.subject == NAMED[against]), None)
    named = next((subject for subject in everyone if subject.subject == BASE), None)
    # A report with one baseline means that one, whatever it is called.
    return named or (report.baseline if report.baseline.subject not in (LOG, report.champion) else None)


def pair_up(
    report: Report, name: str, *, with_subject: SubjectReport, one_sided: bool = False, tried: int = 1
) -> Pair | None:
    """The candidate's metric compared with the other's; None where one of them was not measured.

    `one_sided` makes each bound hold by itself, as a margin wants it: only one side can do harm. `tried`
    makes the bounds of so many candidates hold together (Bonferroni).
    """
    mine, theirs = measured(report.candidate, name), measured(with_subject, name)
    confidence = mine.confidence if mine is not None else confidence_of(report)
    bounds_at = 1 - (1 - confidence) * (2 if one_sided else 1) / tried
    seen = _compare(report, with_subject, name, confidence=bounds_at)
    kind = mine.kind if mine is not None else "rate"
    if seen is None:
        if mine is None or theirs is None or kind != "number" or not (mine.n and theirs.n):
            return None
        # Without pairs the difference can be as small and as large as both intervals allow.
        seen = Comparison(
            metric=name,
            baseline=with_subject.subject,
            candidate=report.candidate.subject,
            n=min(mine.n, theirs.n),
            wins=0,
            losses=0,
            difference=mine.value - theirs.value,
            low=mine.low - theirs.high,
            high=mine.high - theirs.low,
            p_value=1.0,
            test=SIDE_BY_SIDE,
        )
    if seen.n == 0:
        return None
    sign = -1 if lower_is_better(name) else 1
    low, high = sorted((sign * seen.low, sign * seen.high))
    gain = sign * seen.difference
    low, high = min(low, gain), max(high, gain)
    worst_p = seen.p_value
    if ungraded := find_ungraded_pairs(report, name, other=with_subject):
        # What made the grader fail may be what is wrong with the answer.
        worst = _at_worst(report, name, other=with_subject, ungraded=ungraded, confidence=bounds_at)
        low, worst_p = min(low, worst[0]), max(worst_p, worst[1])
    fewest = 0
    if name in (*TIMED, PERPLEXITY):
        fewest = fewest_for_quantile(MIDDLE, confidence=bounds_at)
    if name == LATENCY_P95:
        fewest = times_for_percentile(confidence)
    units = _units(report, with_subject, name)
    return Pair(seen, kind, gain, low, high, confidence, len(ungraded), fewest, worst_p, units)


def _units(report: Report, other: SubjectReport, name: str) -> Units | None:
    sign = -1 if lower_is_better(name) else 1
    mine, theirs = report.candidate.metrics.get(name), other.metrics.get(name)
    if mine is not None and theirs is not None and mine.scores and mine.kind != "number":
        gains = differences_of(other, candidate=report.candidate, metric=name)
    else:
        sides = (other.subject, report.candidate.subject)
        tallies = report.judged if name == JUDGE_PREFERENCE else ()
        graded = next((t.grades for t in tallies if (t.baseline, t.candidate) == sides), {})
        gains = {case: 2 * grade - 1 for case, grade in graded.items() if grade is not None}
    if not gains:
        return None
    clusters = cluster_cases(list(gains), sessions=report.sessions)
    return make_units([sign * gain for gain in gains.values()], clusters)


def _at_worst(
    report: Report, name: str, *, other: SubjectReport, ungraded: Set[str], confidence: float
) -> tuple[float, float]:
    """The least gain, and its p, if a missing grade is wrong for the candidate and right for the other."""
    sign = -1 if lower_is_better(name) else 1
    mine, theirs = report.candidate.metrics.get(name), other.metrics.get(name)
    if mine is not None and mine.kind == "number":
        return -math.inf, 1.0
    if mine is not None and theirs is not None:
        wrong, right = (1.0, 0.0) if sign < 0 else (0.0, 1.0)
        mine = all_wrong(mine, ungraded - graded_cases(mine), wrong=wrong, sessions=report.sessions)
        theirs = all_wrong(theirs, ungraded - graded_cases(theirs), wrong=right, sessions=report.sessions)
        report = report.model_copy(
            update={"candidate": report.candidate.model_copy(update={"metrics": {name: mine}})}
        )
        other = other.model_copy(update={"metrics": {name: theirs}})
    judged = [
        tally.model_copy(update={"grades": {**tally.grades, **dict.fromkeys(tally.unjudged, 0.0)}})
        if tally.grades
        else tally
        for tally in report.judged
    ]
    found = _compare(report.model_copy(update={"judged": tuple(judged)}), other, name, confidence=confidence)
    if found is None:
        return -1.0, 1.0
    low = min(sign * found.low, sign * found.high)
    unjudged = 0
    if name == JUDGE_PREFERENCE and not any(tally.grades for tally in judged):
        # What the comparison could not take in, for lack of names, is counted separately.
        sides = (other.subject, report.candidate.subject)
        unjudged = sum(len(t.unjudged) for t in report.judged if (t.baseline, t.candidate) == sides)
    lost = (low * found.n - unjudged) / (found.n + unjudged) if found.n else -1.0
    return lost, found.p_value if lost > 0 else 1.0


def explain_missing(against: Against, around: Surroundings) -> str:
    """Why a subject is not there, and how to get it there."""
    if against != "champion":
        named = NAMED.get(against, against)
        return f"the {named} was not asked these cases; `graft eval` does that"
    name = f" ({around.champion[:12]})" if around.champion else ""
    return (
        f"the champion{name} was not asked these cases; `graft eval` asks it, and says why where it cannot "
        "(`graft release verify` checks its files)"
    )


def confidence_of(report: Report) -> float:
    return max((metric.confidence for metric in report.candidate.metrics.values()), default=0.95)


def _compare(report: Report, other: SubjectReport, name: str, *, confidence: float) -> Comparison | None:
    found = compare(
        _only(other, name),
        candidate=_only(report.candidate, name),
        confidence=confidence,
        sessions=report.sessions,
    )
    if found and found[0].n:
        # First tokens are compared the way whole answers are.
        return found[0].model_copy(update={"metric": name})
    sides = (other.subject, report.candidate.subject)
    for tally in report.judged if name == JUDGE_PREFERENCE else ():
        if (tally.baseline, tally.candidate) == sides and tally.grades:
            return compare_by_judge(tally, confidence=confidence, sessions=report.sessions)
    # Without scores the report's own comparison is all there is.
    wanted = (name, other.subject, report.candidate.subject)
    stored = (c for c in report.comparisons if (c.metric, c.baseline, c.candidate) == wanted)
    return next(stored, None)


def _only(subject: SubjectReport, name: str) -> SubjectReport:
    """The subject with this one metric: nothing else is compared."""
    times = tuple(times_of(subject, name)) if name in TIMED else ()
    kept = {name: subject.metrics[name]} if name in subject.metrics and name not in TIMED else {}
    # Where it has no pairs of its own, other timings may not replace them.
    alone = subject.generation.model_copy(update={"single_latency_seconds": times, "first_token_seconds": ()})
    return subject.model_copy(update={"metrics": kept, "generation": alone})
