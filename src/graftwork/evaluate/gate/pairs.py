"""The candidate beside another subject on the same cases, seen as gain or loss.

In: a report, whom to compare with, a metric. Out: a Pair, or why there is none. Pure; statistics come from
`evaluate.compare`. A gain is better whichever way the metric counts.
"""

from typing import NamedTuple

from graftwork.evaluate.compare import compare
from graftwork.evaluate.gate.figures import measured, times_of
from graftwork.evaluate.gate_settings import TIMED, Against
from graftwork.evaluate.metrics import JUDGE_PREFERENCE, LOWER_IS_BETTER
from graftwork.records.report import Comparison, Metric, Report, SubjectReport

SIDE_BY_SIDE = "figures side by side"
LOG = "log"
BASE = "base"


class Surroundings(NamedTuple):
    """What is known beside the report. `no_champion`: nothing is served yet, so the base stands in."""

    no_champion: bool = False
    champion: str = ""
    """The release that is served, where the report does not hold it."""


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

    @property
    def rests_on_one(self) -> bool:
        """One request, or one session, has no spread: the interval has no width and bounds nothing."""
        units = self.seen.clusters or self.seen.n
        return self.kind == "number" and self.seen.test != SIDE_BY_SIDE and units < 2

    @property
    def proven_loss(self) -> bool:
        return self.gain < 0 and self._chance_is_small

    @property
    def proven_gain(self) -> bool:
        return self.gain > 0 and self._chance_is_small

    @property
    def _chance_is_small(self) -> bool:
        if self.seen.test == SIDE_BY_SIDE:
            return not self.low <= 0 <= self.high
        return self.seen.p_value < 1 - self.confidence


def lower_is_better(name: str) -> bool:
    return name in LOWER_IS_BETTER


def find_subject(report: Report, against: Against, around: Surroundings) -> SubjectReport | None:
    """Whom the candidate is held against; None where it did not answer these cases."""
    everyone = (report.baseline, *report.others)
    if against == "champion":
        if around.no_champion and report.champion is None:
            return find_subject(report, "base", around)
        return next((one for one in everyone if one.subject == report.champion), None)
    if against == "log":
        return next((one for one in everyone if one.subject == LOG), None)
    named = next((one for one in everyone if one.subject == BASE), None)
    # A report with one baseline means that one, whatever it is called.
    return named or (report.baseline if report.baseline.subject not in (LOG, report.champion) else None)


def pair_up(
    report: Report, name: str, *, with_subject: SubjectReport, one_sided: bool = False
) -> Pair | None:
    """The candidate's metric beside the other's; None where one of them was not measured.

    `one_sided` makes each bound hold by itself, as a margin wants it: only one side can do harm.
    """
    mine, theirs = measured(report.candidate, name), measured(with_subject, name)
    confidence = mine.confidence if mine is not None else _confidence_of(report)
    seen = _compare(report, with_subject, name, confidence=2 * confidence - 1 if one_sided else confidence)
    kind = mine.kind if mine is not None else "rate"
    if seen is None:
        if mine is None or theirs is None or kind != "number" or not (mine.n and theirs.n):
            return None
        seen = _side_by_side(mine, theirs, subjects=(with_subject.subject, report.candidate.subject))
    if seen.n == 0:
        return None
    sign = -1 if lower_is_better(name) else 1
    low, high = sorted((sign * seen.low, sign * seen.high))
    gain = sign * seen.difference
    low, high = min(low, gain), max(high, gain)
    if ungraded := _count_ungraded(report, name, other=with_subject):
        # What made the grader fail may be what is wrong with the answer.
        low = (low * seen.n - ungraded) / (seen.n + ungraded)
    return Pair(seen, kind, gain, low, high, confidence, ungraded)


def explain_missing(against: Against, around: Surroundings) -> str:
    """Why a subject is not there, and how to get it there."""
    if against != "champion":
        return f"the {against} was not asked these cases; `graft eval` does that"
    name = f" ({around.champion[:12]})" if around.champion else ""
    return (
        f"the champion{name} was not asked these cases; `graft eval` asks it, and says why where it cannot "
        "(`graft release verify` checks its files)"
    )


def _count_ungraded(report: Report, name: str, *, other: SubjectReport) -> int:
    """Cases on which a grader, or the judge of the pairs, failed."""
    measured_by = (subject.metrics.get(name) for subject in (report.candidate, other))
    failed = sum(metric.failed for metric in measured_by if metric is not None)
    if name != JUDGE_PREFERENCE:
        return failed
    sides = (other.subject, report.candidate.subject)
    return failed + sum(len(t.unjudged) for t in report.judged if (t.baseline, t.candidate) == sides)


def _confidence_of(report: Report) -> float:
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
    # Without scores, as of what only a pair of answers tells, the report's own comparison is all there is.
    wanted = (name, other.subject, report.candidate.subject)
    stored = (c for c in report.comparisons if (c.metric, c.baseline, c.candidate) == wanted)
    return next(stored, None)


def _only(subject: SubjectReport, name: str) -> SubjectReport:
    """The subject with this one metric: nothing else is compared."""
    times = tuple(times_of(subject, name)) if name in TIMED else ()
    kept = {name: subject.metrics[name]} if name in subject.metrics and name not in TIMED else {}
    alone = subject.generation.model_copy(update={"single_latency_seconds": times})
    return subject.model_copy(update={"metrics": kept, "generation": alone})


def _side_by_side(mine: Metric, theirs: Metric, *, subjects: tuple[str, str]) -> Comparison:
    """Two figures without pairs: the difference can be as small and as large as both intervals allow."""
    return Comparison(
        metric=mine.name,
        baseline=subjects[0],
        candidate=subjects[1],
        n=min(mine.n, theirs.n),
        wins=0,
        losses=0,
        difference=mine.value - theirs.value,
        low=mine.low - theirs.high,
        high=mine.high - theirs.low,
        p_value=1.0,
        test=SIDE_BY_SIDE,
    )
