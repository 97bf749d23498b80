"""What to try next, drawn from what was seen, the largest cause first.

In: a report, its judged rules, how training went. Out: sentences. Pure. Says nothing that was not seen.
"""

from collections import Counter
from collections.abc import Sequence

from graftwork.evaluate.confusion import OTHER, UNREADABLE
from graftwork.evaluate.gate.course import Training, hint_of_changes, hints_of
from graftwork.evaluate.gate.evidence import count_cases_needed
from graftwork.evaluate.gate.hint import Hint
from graftwork.evaluate.gate.ungraded import find_ungraded
from graftwork.evaluate.gate_settings import FIGURES
from graftwork.grading import FIRST_TOKEN, LATENCY, MEMORY, TOKENS_PER_SECOND, TRUNCATED
from graftwork.grading.metrics import name_of, plural
from graftwork.records.report import Report
from graftwork.records.verdict import Decision, RuleResult

CLUSTER_LEAST = 3
"""Fewer failures than this are no cluster."""
MOST_CONFUSIONS = 3
CLUSTER_FACTOR = 2.0
"""A group stands out when it fails so many times as often as the others."""


def advise(
    report: Report, *, decision: Decision, rules: Sequence[RuleResult], training: Training | None = None
) -> tuple[str, ...]:
    """What to try, ranked by how many answers each cause accounts for."""
    hints = [*_on_json(report), *_on_length(report, rules), *_on_refusals(report), *_on_citations(report)]
    hints += [*_on_confusions(report, rules), *_on_groups(report, rules), *_on_limits(report, rules)]
    if decision != "not_enough_evidence":
        hints += hints_of(training, failures=_count_failures(report, rules))
    ranked = [hint.text for hint in sorted(hints, key=lambda hint: -hint.cases)]
    # First what changed since it was better, then what the wrong answers have in common, then more cases.
    changed = hint_of_changes(training, report=report, rules=rules)
    graders = _on_graders(report, rules)
    if decision == "not_enough_evidence":
        ranked = [*graders, *changed, *ranked, *_on_evidence(report, rules)]
    else:
        ranked = [*changed, *ranked, *graders, *_on_evidence(report, rules)]
    if decision == "abort":
        ranked.insert(0, "Do not release this adapter; the one that serves now stays.")
    if not ranked and not any(rule.n for rule in rules):
        # Nothing was measured, so nothing is known about the training.
        ranked = ["Nothing was measured: hold out cases that the rules apply to, and evaluate on them."]
    return tuple(dict.fromkeys(ranked)) or ("Train longer or on more rows, then evaluate again.",)


def _on_graders(report: Report, rules: Sequence[RuleResult]) -> list[str]:
    """A grader that failed is mended first: more cases would meet with the same failure."""
    found = []
    for name in dict.fromkeys(rule.metric for rule in rules if rule.outcome != "pass"):
        metric = report.candidate.metrics.get(name)
        if metric is None:
            continue
        if metric.failed:
            found.append(
                f"The grader of {name} failed on {plural(metric.failed, 'case')} ({metric.why_failed}): mend "
                "it, and evaluate again."
            )
        if (left_out := find_ungraded(report, name).total - metric.failed) > 0:
            found.append(
                f"{name} grades another subject's answer to {plural(left_out, 'case')} and not this one's: "
                "whether it applies must depend on the case alone."
            )
    return found


def _on_json(report: Report) -> list[Hint]:
    broken = _failed(report, "json_valid")
    cut = broken & _passed(report, TRUNCATED)
    hints = []
    if cut:
        limit = report.settings.get("max_new_tokens", "the limit of")
        hints.append(
            Hint(
                len(cut),
                f"{len(cut)} of {plural(len(broken), 'invalid answer')} {_was(len(cut))} cut off at {limit} "
                "tokens: raise "
                "evaluate.max_new_tokens, or train on shorter replies.",
            )
        )
    if whole := broken - cut:
        hints.append(
            Hint(
                len(whole),
                f"{plural(len(whole), 'answer')} ended without being cut off and without valid JSON: "
                "train for more steps, and check with `graft data audit` that the replies are valid.",
            )
        )
    return hints


def _on_refusals(report: Report) -> list[Hint]:
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
            Hint(
                len(invented),
                f"{plural(len(invented), 'question')} without an answer in the sources got one anyway: "
                "add rows that refuse.",
            )
        )
    if timid:
        hints.append(
            Hint(
                len(timid),
                f"{plural(len(timid), 'question')} with an answer in the sources got a refusal: "
                "add answered rows, or drop some that refuse.",
            )
        )
    return hints


def _on_citations(report: Report) -> list[Hint]:
    uncited = (
        _failed(report, "citation_coverage")
        - _failed(report, "refusal_correct")
        - _failed(report, "json_valid")
    )
    if not uncited:
        return []
    return [
        Hint(
            len(uncited),
            f"{plural(len(uncited), 'answer')} without a citation, or with one not in the prompt: "
            "check the citations of the rows trained on, and train for more steps.",
        )
    ]


def _on_confusions(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """Labels that are taken for each other, on the rules that did not pass."""
    open_ones = set(_open_metrics(rules))
    # A rule on all fields is open because of the fields that it is made of.
    everything = any(name in open_ones for name in _all_fields(report))
    hints = []
    for found in report.confusions:
        if found.subject != report.candidate.subject or not (everything or found.metric in open_ones):
            continue
        mistakes = [one for one in found.mistakes() if one[0] >= CLUSTER_LEAST]
        for count, label, column in mistakes[:MOST_CONFUSIONS]:
            due = next(shown.cases for shown in found.classes if shown.label == label)
            if column in (OTHER, UNREADABLE):
                told = f"{count} of {due} cases of {found.metric} {label} got {column}: train for more steps."
            else:
                told = (
                    f"{count} of {due} cases of {found.metric} {label} were answered {column}: add rows of "
                    "both, and look whether their labels are right."
                )
            hints.append(Hint(count, told))
    return hints


def _all_fields(report: Report) -> list[str]:
    checks = report.settings.get("checks") or ()
    return [str(check.get("name")) for check in checks if check.get("metric") == "all_fields"]


def _on_groups(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """A group that fails far more often than the others, on the rules that did not pass."""
    hints = []
    for name in _open_metrics(rules):
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
                Hint(
                    count,
                    f"{name_of(name)} fails most in the group {group} "
                    f"({count} of {plural(asked[group], 'case')} against {others_failed} of {others} "
                    "elsewhere): add data there.",
                )
            )
    return hints


def _on_length(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """Answers that were cut off and therefore wrong, whatever the rule is about."""
    cut = _passed(report, TRUNCATED) - _failed(report, "json_valid")
    wrong = set().union(*(_failed(report, name) for name in _open_metrics(rules))) & cut
    if not wrong:
        return []
    limit = report.settings.get("max_new_tokens", "the limit of")
    return [
        Hint(
            len(wrong),
            f"{plural(len(wrong), 'wrong answer')} had been cut off at {limit} tokens: raise "
            "evaluate.max_new_tokens (and data.max_tokens), or train on shorter replies.",
        )
    ]


def _on_limits(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    speed = report.candidate.generation.tokens_per_second
    slow = f" (it makes {speed:.0f} tokens a second)" if speed > 1 else ""
    faster = (
        f"answer in fewer tokens{slow}: train on shorter replies, lower evaluate.max_new_tokens; or take a "
        "smaller or quantised base, or a faster device."
    )
    texts = {
        (LATENCY, "fail"): f"Latency is over its limit: {faster}",
        (
            LATENCY,
            "unknown",
        ): f"Latency was timed too seldom to promise its limit: raise {_more_requests(report, rules)}.",
        (FIRST_TOKEN, "fail"): "The first token comes late: shorten the prompt, or take a smaller base.",
        (
            FIRST_TOKEN,
            "unknown",
        ): f"The first token was timed too seldom to promise: raise {_more_requests(report, rules)}.",
        (
            TOKENS_PER_SECOND,
            "fail",
        ): "Too few tokens a second: a smaller or quantised base, or a faster device.",
        (
            MEMORY,
            "fail",
        ): "Memory is over its limit: a smaller or quantised base, a smaller batch or a shorter context.",
    }
    return [Hint(0.5, texts[key]) for r in rules if (key := (r.metric, r.outcome)) in texts]


def _more_requests(report: Report, rules: Sequence[RuleResult]) -> str:
    timed = [r.cases_to_decide or 0 for r in rules if r.must and r.metric in (LATENCY, FIRST_TOKEN)]
    many = max(timed, default=0)
    if many > report.cases:
        # Every request that is timed is a case of its own.
        return f"evaluate.latency_cases to {many} (there {_are(report.cases)}: hold out more rows too)"
    return f"evaluate.latency_cases to {many}" if many else "evaluate.latency_cases"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _are(cases: int) -> str:
    return f"{'is' if cases == 1 else 'are'} {plural(cases, 'case')}"


def _on_evidence(report: Report, rules: Sequence[RuleResult]) -> list[str]:
    needed = count_cases_needed(report, rules)
    if needed is None:
        return []
    return [
        f"Evaluate on about {plural(needed, 'fresh case')} (these are {report.cases}): hold out new rows, or "
        "raise evaluate.max_cases."
    ]


def _open_metrics(rules: Sequence[RuleResult]) -> list[str]:
    """Qualities on which a rule did not pass, each once."""
    return list(dict.fromkeys(r.metric for r in rules if r.outcome != "pass" and r.metric not in FIGURES))


def _count_failures(report: Report, rules: Sequence[RuleResult]) -> int:
    """Answers that training would have to mend."""
    return len(set().union(*(_failed(report, name) for name in _open_metrics(rules))))


def _failed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 0.0} if metric else set()


def _passed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 1.0} if metric else set()
