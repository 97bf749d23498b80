"""What to try next, drawn from what was seen, the largest cause first.

In: a report and its judged rules. Out: sentences. Pure. Says nothing that the report does not show.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.evaluate.metrics import LATENCY, MEMORY, TRUNCATED
from graftwork.evaluate.wording import name_of, plural
from graftwork.records.report import Report
from graftwork.records.verdict import Decision, RuleResult

CLUSTER_LEAST = 3
"""Fewer failures than this are no cluster."""
CLUSTER_FACTOR = 2.0
"""A group stands out when it fails so many times as often as the others."""


class _Hint(NamedTuple):
    """`cases` is how many answers the cause accounts for: what the hints are ranked by."""

    cases: float
    text: str


def advise(report: Report, *, decision: Decision, rules: Sequence[RuleResult]) -> tuple[str, ...]:
    hints = [*_on_json(report), *_on_refusals(report), *_on_citations(report), *_on_groups(report, rules)]
    hints += _on_limits(rules)
    ranked = [hint.text for hint in sorted(hints, key=lambda hint: -hint.cases)]
    evidence = _on_evidence(report, rules)
    if decision == "not_enough_evidence":
        ranked = [*evidence, *ranked]
    else:
        ranked += evidence
    if decision == "abort":
        ranked.insert(0, "Do not release this adapter; the one that serves now stays.")
    return tuple(ranked) or ("Train longer or on more rows, then evaluate again.",)


def count_cases_needed(report: Report, rules: Sequence[RuleResult]) -> int | None:
    """How many cases would settle every open rule; a metric that applies to half needs twice as many."""
    factors = []
    for rule in rules:
        metric = report.candidate.metrics.get(rule.metric)
        if rule.cases_to_decide and metric is not None and metric.n:
            factors.append(rule.cases_to_decide / metric.n)
    return math.ceil(max(factors) * report.cases) if factors else None


def _on_json(report: Report) -> list[_Hint]:
    broken = _failed(report, "json_valid")
    cut = broken & _passed(report, TRUNCATED)
    hints = []
    if cut:
        limit = report.settings.get("max_new_tokens", "the limit of")
        hints.append(
            _Hint(
                len(cut),
                f"{len(cut)} of {len(broken)} invalid answers were cut off at {limit} tokens: raise "
                "evaluate.max_new_tokens, or train on shorter replies.",
            )
        )
    if whole := broken - cut:
        hints.append(
            _Hint(
                len(whole),
                f"{plural(len(whole), 'answer')} ended without being cut off and without valid JSON: "
                "train for more steps, and check with `graft data audit` that the replies are valid.",
            )
        )
    return hints


def _on_refusals(report: Report) -> list[_Hint]:
    wrong = _failed(report, "refusal_correct") - _failed(report, "json_valid")
    coverage = report.candidate.metrics.get("citation_coverage")
    if coverage is None:
        return []
    # Coverage does not apply where the reference refuses: that tells the two mistakes apart.
    invented = {case for case in wrong if coverage.scores.get(case) is None}
    timid = wrong - invented
    hints = []
    if invented:
        hints.append(
            _Hint(
                len(invented),
                f"{plural(len(invented), 'question')} without an answer in the sources got one anyway: "
                "add rows that refuse.",
            )
        )
    if timid:
        hints.append(
            _Hint(
                len(timid),
                f"{plural(len(timid), 'question')} with an answer in the sources got a refusal: "
                "add answered rows, or drop some that refuse.",
            )
        )
    return hints


def _on_citations(report: Report) -> list[_Hint]:
    uncited = (
        _failed(report, "citation_coverage")
        - _failed(report, "refusal_correct")
        - _failed(report, "json_valid")
    )
    if not uncited:
        return []
    return [
        _Hint(
            len(uncited),
            f"{plural(len(uncited), 'answer')} without a citation, or with one not in the prompt: "
            "check the citations of the rows trained on, and train for more steps.",
        )
    ]


def _on_groups(report: Report, rules: Sequence[RuleResult]) -> list[_Hint]:
    """A group that fails far more often than the others, on the rules that did not pass."""
    hints = []
    for name in dict.fromkeys(rule.metric for rule in rules if rule.outcome != "pass"):
        failed = _failed(report, name)
        metric = report.candidate.metrics.get(name)
        if metric is None or not failed:
            continue
        graded = [case for case, value in metric.scores.items() if value is not None]
        asked = Counter(report.groups.get(case) for case in graded)
        failures = Counter(report.groups.get(case) for case in failed)
        group, count = min(
            failures.items(), key=lambda item: (-item[1] / asked[item[0]], -item[1], str(item[0]))
        )
        others, others_failed = len(graded) - asked[group], len(failed) - count
        if group is None or count < CLUSTER_LEAST or not others:
            continue
        if count / asked[group] >= CLUSTER_FACTOR * others_failed / others:
            hints.append(
                _Hint(
                    count,
                    f"{name_of(name)} fails most in the group {group} ({count} of {asked[group]} cases "
                    f"against {others_failed} of {others} elsewhere): add data there.",
                )
            )
    return hints


def _on_limits(rules: Sequence[RuleResult]) -> list[_Hint]:
    texts = {
        (LATENCY, "fail"): "Latency is over its limit: answer in fewer tokens, or serve on a faster device.",
        (LATENCY, "unknown"): "Latency varies too much to promise its limit: raise evaluate.latency_cases.",
        (MEMORY, "fail"): "Memory is over its limit: a smaller base, a smaller batch or a shorter context.",
    }
    return [_Hint(0.5, texts[key]) for r in rules if (key := (r.metric, r.outcome)) in texts]


def _on_evidence(report: Report, rules: Sequence[RuleResult]) -> list[str]:
    needed = count_cases_needed(report, rules)
    if needed is None:
        return []
    return [
        f"Evaluate on about {needed} cases instead of {report.cases}: "
        "raise evaluate.max_cases, or hold out more rows."
    ]


def _failed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 0.0} if metric else set()


def _passed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 1.0} if metric else set()
