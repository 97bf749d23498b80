"""Cases of which nothing is known: the grader failed, or it graded one subject's answer and not another's.

In: a report and a metric. Out: which cases, and the figures if all of them were wrong. Pure. Whether a
question arises depends on the case alone; a function that says None to this answer and grades that one leaves
out what it does not like, and a mark that reviewers gave belongs to one text only. Such cases may not help:
they count against the candidate.
"""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from graftwork.evaluate.score import make_metric
from graftwork.grading import JUDGE_PREFERENCE
from graftwork.grading.metrics import name_of
from graftwork.records.report import Metric, Report, SubjectReport
from graftwork.records.verdict import RuleResult


class Ungraded(NamedTuple):
    """`nameless` cases failed in a report that does not say which ones."""

    cases: frozenset[str] = frozenset()
    nameless: int = 0

    @property
    def total(self) -> int:
        return len(self.cases) + self.nameless


def find_ungraded(report: Report, name: str) -> Ungraded:
    """Cases that the candidate has no grade for and ought to have one."""
    own = report.candidate.metrics.get(name)
    if own is None:
        return Ungraded()
    elsewhere: set[str] = set()
    for other in (report.baseline, *report.others):
        if (metric := other.metrics.get(name)) is not None:
            elsewhere |= _graded(metric)
    without = own.scores.keys() - _graded(own)
    return _gather(without & elsewhere, of=without, metrics=(own,))


def find_ungraded_pairs(report: Report, name: str, *, other: SubjectReport) -> Ungraded:
    """Cases on which one of the two has no grade and ought to; or that the judge of the pairs left open."""
    found = [metric for one in (report.candidate, other) if (metric := one.metrics.get(name)) is not None]
    left_out: set[str] = set()
    if len(found) == 2:
        left_out = _graded(found[0]) ^ _graded(found[1])
    if name == JUDGE_PREFERENCE:
        sides = (other.subject, report.candidate.subject)
        for tally in report.judged:
            left_out |= set(tally.unjudged) if (tally.baseline, tally.candidate) == sides else set()
    asked = {case for metric in found for case in metric.scores}
    both = set.intersection(*map(_graded, found)) if found else set()
    return _gather(left_out, of=asked - both, metrics=found)


def never_vacuous(rule: RuleResult, *, report: Report) -> RuleResult:
    """The rule as judged; unknown, with the reason, where no case is of the kind that it is about.

    "Refuses just where the reference does" holds for every model on a log without a refusal: that passes
    nothing. What fails all the same has failed.
    """
    metric = report.candidate.metrics.get(rule.metric)
    why = metric.vacuous if metric is not None else ""
    if not why or rule.outcome == "fail":
        return rule
    seen = f"{metric.successes} of {metric.n}, but " if metric and metric.n and metric.kind == "rate" else ""
    sentence = f"{name_of(rule.metric)}: {seen}{why}, so nothing is shown by it."
    told = {"outcome": "unknown", "vacuous": why, "sentence": sentence, "cases_to_decide": None}
    return rule.model_copy(update=told)


def all_wrong(metric: Metric, cases: Set[str], *, wrong: float, sessions: Mapping[str, str]) -> Metric:
    """The metric if every one of these cases had this grade."""
    return make_metric(
        metric.name,
        scores={**metric.scores, **dict.fromkeys(cases, wrong)},
        confidence=metric.confidence,
        sessions=sessions,
        scored=metric.kind == "score",
    )


def _gather(left_out: Set[str], *, of: Set[str], metrics: Sequence[Metric]) -> Ungraded:
    """Those left out and those that failed, each case once. Older reports do not say which ones failed."""
    named = frozenset(left_out) | {case for metric in metrics for case in metric.failed_cases}
    nameless = sum(metric.failed for metric in metrics if not metric.failed_cases)
    # Without names a case may be counted twice, but never are there more than have no grade.
    return Ungraded(named, min(nameless, max(len(of) - len(named), 0)) if of else nameless)


def _graded(metric: Metric) -> set[str]:
    return {case for case, value in metric.scores.items() if value is not None}
