"""Advice on what to try next, from the answers and the training curve, the largest cause first. Pure.

Input: a report, its judged rules, the outcome and the steps of the run. Output: sentences. Reports only what
was observed.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from graftwork.evaluate.gate.figures import count_cases_needed, find_ungraded
from graftwork.evaluate.gate.settings import FIGURES
from graftwork.evaluate.report import OTHER, UNREADABLE
from graftwork.grading.metrics import FIRST_TOKEN, LATENCY, MEMORY, TOKENS_PER_SECOND, TRUNCATED, name_of
from graftwork.records.plan import Plan
from graftwork.records.report import Decision, Report, RuleResult
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.text.wording import plural


class Hint(NamedTuple):
    """`cases` is how many answers the cause accounts for; hints are ranked by it."""

    cases: float
    text: str


FEWEST_STEPS = 8
"""A run with fewer steps shows no trend."""
PART = 5
"""The last fifth of the steps is compared with the fifth before it."""
STILL_FALLING = 0.03
FAR_UNDER = 0.6
"""Training loss under this share of the validation loss means that the rows were memorized."""
ROSE = 1.02
SPIKE = 1.8
"""A loss this many times the median of the steps before it."""
WINDOW = 9
FEWEST_BEFORE = 4
HARDLY_LEARNED = 0.97


class BetterRun(NamedTuple):
    """An earlier run that did better, and what has changed since."""

    run_id: str
    report: Report
    changes: tuple[str, ...]
    """Settings, data and base, each as "train.epochs 3 → 1"."""


class Training(NamedTuple):
    """How a run went."""

    outcome: TrainOutcome
    steps: tuple[TrainStep, ...] = ()
    good: BetterRun | None = None
    """The last run that did better, if any."""

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps if math.isfinite(step.loss)]

    def setting(self, name: str) -> float | None:
        value = self.outcome.settings.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def hints_of(training: Training | None, *, failures: int) -> list[Hint]:
    """Return what to change in the training, most certain first."""
    if training is None:
        return []
    weight, outcome = max(failures, 1), training.outcome
    before, last = _last_parts(training.losses)
    learned = last if last is not None else outcome.final_loss
    overfitted = _on_overfitting(outcome, learned)
    compared = [look for look in outcome.looks if look.compared]
    hints = []
    spikes = find_spikes(training.steps)
    if len(spikes) >= 2:
        rate = training.setting("learning_rate")
        halve = f" (train.learning_rate: {rate:g} → {rate / 2:g})" if rate else ""
        first = ", ".join(map(str, spikes[:3]))
        text = (
            f"The loss jumped {len(spikes)} times (steps {first}{' …' if len(spikes) > 3 else ''}): the "
            f"learning rate is too high; halve it{halve}, or warm up longer."
        )
        hints.append(Hint(0.8 * weight, text))
    if overfitted:
        hints.append(Hint(0.9 * weight, overfitted))
    best = outcome.best_step
    if best is not None and len(compared) >= 3 and best < compared[-1].step:
        after = sum(look.step > best for look in compared)
        text = (
            f"The best evaluation was at step {best} of {outcome.steps}, and {after} after it "
            f"{'was' if after == 1 else 'were'} no better: more steps of the same will not help; add or fix "
            "data, or change the rate."
        )
        hints.append(Hint(0.6 * weight, text))
    losses = [look.value for look in compared if look.metric == "loss"]
    best_at_the_end = not losses or losses[-1] <= min(losses)
    still_falling = before is not None and last is not None and last <= before * (1 - STILL_FALLING)
    # More steps would only make an overfitted adapter worse.
    if still_falling and best_at_the_end and not overfitted:
        epochs = training.setting("epochs")
        suggestion = f" (train.epochs: {epochs:g} → {epochs + max(1, round(epochs / 2)):g})" if epochs else ""
        text = (
            f"The loss was still falling at the end ({before:.2f} → {last:.2f} over the last fifth of "
            f"{outcome.steps} steps): train for more steps{suggestion}."
        )
        hints.append(Hint(0.7 * weight, text))
    if outcome.first_loss > 0 and learned >= HARDLY_LEARNED * outcome.first_loss:
        text = (
            f"Hardly anything was learned (loss {outcome.first_loss:.2f} → {learned:.2f}): raise "
            "train.learning_rate or train.rank, and check with `graft data audit` what the rows teach."
        )
        hints.append(Hint(0.85 * weight, text))
    return hints


def _on_overfitting(outcome: TrainOutcome, learned: float) -> str:
    validation, first = outcome.validation_loss_after, outcome.validation_loss_before
    if validation is None or not validation > 0:
        return ""
    rose = first is not None and validation > first * ROSE
    if not rose and learned >= FAR_UNDER * validation:
        return ""
    losses = f"training loss {learned:.2f}, validation loss {validation:.2f}"
    losses += f", up from {first:.2f}" if rose else ""
    return (
        f"The rows were memorized ({losses}): train less (fewer epochs, a lower rank or rate; "
        "train.eval keeps the best evaluation), or on more rows."
    )


def hint_of_changes(training: Training | None, *, report: Report, rules: Sequence[RuleResult]) -> list[str]:
    """Return what was changed since an earlier run was better: the likeliest cause, and the cheapest to
    undo.
    """
    if training is None or training.good is None or not training.good.changes:
        return []
    good = training.good
    fell = []
    for name in dict.fromkeys(rule.metric for rule in rules if rule.outcome != "pass"):
        before, after = good.report.candidate.metrics.get(name), report.candidate.metrics.get(name)
        if before and after and before.kind == "rate" and before.n and after.n and after.value < before.value:
            fell.append(
                f"{name_of(name)} from {before.successes} of {before.n} to {after.successes} of {after.n}"
            )
    if not fell:
        return []
    changed, sank = ", ".join(good.changes), ", ".join(fell)
    return [
        f"Changed since the run {good.run_id[:12]}, which was better: {changed}. {sank}: undo that first."
    ]


def compare_plans(before: Plan, now: Plan) -> tuple[str, ...]:
    """What differs in settings, data and base in the later run, as text."""
    changes = []
    if before.base_fingerprint != now.base_fingerprint:
        same = before.base == now.base
        changes.append(
            f"base {before.base} → {now.base}" if not same else f"the files of the base {now.base}"
        )
    old, new = _flat(before.train.get("settings", {})), _flat(now.train.get("settings", {}))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            changes.append(f"train.{key} {_show(old.get(key))} → {_show(new.get(key))}")
    if before.dataset_hash != now.dataset_hash:
        tokens = f"{before.tokens.value:,.0f} → {now.tokens.value:,.0f} tokens in all"
        changes.append(f"the dataset {before.dataset_hash[:8]} → {now.dataset_hash[:8]} ({tokens})")
    return tuple(changes)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def find_spikes(steps: Sequence[TrainStep]) -> list[int]:
    """Return steps whose loss is an outlier compared with those before, or is not a number."""
    spikes = []
    for index, step in enumerate(steps):
        before = [near.loss for near in steps[max(0, index - WINDOW) : index] if math.isfinite(near.loss)]
        if not math.isfinite(step.loss) or (
            len(before) >= FEWEST_BEFORE and step.loss > SPIKE * median(before)
        ):
            spikes.append(step.step)
    return spikes


def _last_parts(losses: Sequence[float]) -> tuple[float | None, float | None]:
    if len(losses) < FEWEST_STEPS:
        return None, None
    part = max(2, len(losses) // PART)
    # Medians: one jump is not a course.
    return median(losses[-2 * part : -part]), median(losses[-part:])


CLUSTER_LEAST = 3
"""Fewer failures than this are not a cluster."""
MOST_CONFUSIONS = 3
MOST_CASES = 10_000
"""Above this many cases, advice about more cases is pointless."""
CLUSTER_FACTOR = 2.0
"""A group is an outlier when it fails this many times as often as the others."""


def advise(
    report: Report, *, decision: Decision, rules: Sequence[RuleResult], training: Training | None = None
) -> tuple[str, ...]:
    """What to try, ranked by how many answers each cause accounts for."""
    hints = _on_wrong_answers(report, rules)
    hints += [*_on_confusions(report, rules), *_on_groups(report, rules), *_on_limits(report, rules)]
    if decision != "not_enough_evidence":
        # Answers that training would have to fix.
        failures = set().union(*(_wrong(report, name) for name in _open_metrics(rules)))
        hints += hints_of(training, failures=len(failures))
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
    """A grader that failed is fixed first: more cases would fail the same way."""
    hints = []
    for name in dict.fromkeys(rule.metric for rule in rules if rule.outcome != "pass"):
        metric = report.candidate.metrics.get(name)
        if metric is None:
            continue
        if metric.failed:
            hints.append(
                f"The grader of {name} failed on {plural(metric.failed, 'case')} ({metric.why_failed}): fix "
                "it, and evaluate again."
            )
        if (left_out := len(find_ungraded(report, name)) - metric.failed) > 0:
            hints.append(
                f"{name} grades another subject's answer to {plural(left_out, 'case')} and not this one's: "
                "whether it applies must depend on the case alone."
            )
    return hints


def _on_wrong_answers(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """Describe what wrong answers have in common, whatever the rules are about."""
    truncated, broken = _passed(report, TRUNCATED), _failed(report, "json_valid")
    cut = broken & truncated
    wrong: set[str] = set().union(*(_wrong(report, name) for name in _open_metrics(rules)))
    refusals = _failed(report, "refusal_correct") - broken
    coverage = report.candidate.metrics.get("citation_coverage")
    # Coverage does not apply where the reference refuses: that distinguishes the two mistakes.
    answered = {case for case in refusals if coverage is not None and coverage.scores.get(case) is None}
    refused = refusals - answered if coverage is not None else set()
    uncited = _failed(report, "citation_coverage") - _failed(report, "refusal_correct") - broken
    lost = wrong & (truncated - broken)
    limit = report.settings.get("max_new_tokens", "the limit of")
    causes = {
        f"{len(cut)} of {plural(len(broken), 'invalid answer')} {'was' if len(cut) == 1 else 'were'} cut off "
        f"at {limit} tokens: raise evaluate.max_new_tokens, or train on shorter replies.": cut,
        f"{plural(len(broken - cut), 'answer')} ended without being cut off and without valid JSON: train "
        "for more steps, and check with `graft data audit` that the replies are valid.": broken - cut,
        f"{plural(len(lost), 'wrong answer')} had been cut off at {limit} tokens: raise "
        "evaluate.max_new_tokens (and data.max_tokens), or train on shorter replies.": lost,
        f"{plural(len(answered), 'question')} without an answer in the sources got one anyway: add rows that "
        "refuse.": answered,
        f"{plural(len(refused), 'question')} with an answer in the sources got a refusal: add answered rows, "
        "or drop some that refuse.": refused,
        f"{plural(len(uncited), 'answer')} without a citation, or with one not in the prompt: check the "
        "citations of the rows trained on, and train for more steps.": uncited,
    }
    return [Hint(len(cases), text) for text, cases in causes.items() if cases]


def _on_confusions(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """Labels that are taken for each other, on the rules that did not pass."""
    open_ones = set(_open_metrics(rules))
    # A rule on all fields is open because of the fields that it is made of.
    everything = any(
        check.get("metric") == "all_fields" and str(check.get("name")) in open_ones
        for check in report.settings.get("checks") or ()
    )
    hints = []
    for confusion in report.confusions:
        metric = confusion.metric
        if confusion.subject != report.candidate.subject or not (everything or metric in open_ones):
            continue
        mistakes = [mistake for mistake in confusion.mistakes() if mistake[0] >= CLUSTER_LEAST]
        for count, label, column in mistakes[:MOST_CONFUSIONS]:
            due = next(row.cases for row in confusion.classes if row.label == label)
            if column in (OTHER, UNREADABLE):
                text = f"{count} of {due} cases of {metric} {label} got {column}: train for more steps."
            else:
                text = (
                    f"{count} of {due} cases of {metric} {label} were answered {column}: add rows "
                    "of both, and check whether their labels are right."
                )
            hints.append(Hint(count, text))
    return hints


def _on_groups(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    """A group that fails far more often than the others, on the rules that did not pass."""
    hints = []
    for name in _open_metrics(rules):
        failed = _wrong(report, name)
        metric = report.candidate.metrics.get(name)
        if metric is None or not failed:
            continue
        graded = [case for case, value in metric.scores.items() if value is not None]
        group_sizes = Counter(report.groups.get(case) for case in graded)
        failures = Counter(report.groups.get(case) for case in failed)
        group, count = min(
            failures.items(), key=lambda item: (-item[1] / group_sizes[item[0]], -item[1], str(item[0]))
        )
        other_cases, other_failures = len(graded) - group_sizes[group], len(failed) - count
        if group is None or count < CLUSTER_LEAST or not other_cases:
            continue
        if count / group_sizes[group] >= CLUSTER_FACTOR * other_failures / other_cases:
            hints.append(
                Hint(
                    count,
                    f"{name_of(name)} fails most in the group {group} "
                    f"({count} of {plural(group_sizes[group], 'case')} against "
                    f"{other_failures} of {other_cases} elsewhere): add data there.",
                )
            )
    return hints


def _on_limits(report: Report, rules: Sequence[RuleResult]) -> list[Hint]:
    speed = report.candidate.generation.tokens_per_second
    slow = f" (it makes {speed:.0f} tokens per second)" if speed > 1 else ""
    faster = (
        f"answer in fewer tokens{slow}: train on shorter replies, lower evaluate.max_new_tokens; "
        "or take a smaller or quantized base, or a faster device."
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
        ): "Too few tokens per second: a smaller or quantized base, or a faster device.",
        (
            MEMORY,
            "fail",
        ): "Memory is over its limit: a smaller or quantized base, a smaller batch or a shorter context.",
    }
    return [Hint(0.5, texts[key]) for r in rules if (key := (r.metric, r.outcome)) in texts]


def _more_requests(report: Report, rules: Sequence[RuleResult]) -> str:
    timed = [r.cases_to_decide or 0 for r in rules if r.must and r.metric in (LATENCY, FIRST_TOKEN)]
    many = max(timed, default=0)
    if many > report.cases:
        # Every request that is timed is a case of its own.
        held_out = f"{'is' if report.cases == 1 else 'are'} {plural(report.cases, 'case')}"
        return f"evaluate.latency_cases to {many} (there {held_out}: hold out more rows too)"
    return f"evaluate.latency_cases to {many}" if many else "evaluate.latency_cases"


def _on_evidence(report: Report, rules: Sequence[RuleResult]) -> list[str]:
    needed = count_cases_needed(report, rules)
    if needed is None:
        return []
    if needed > MOST_CASES:
        return [
            f"The difference is too small to prove: that would take about {plural(needed, 'fresh case')} "
            f"(these are {report.cases:,}). Train for more steps or on more rows before you hold out more."
        ]
    return [
        f"Evaluate on about {plural(needed, 'fresh case')} (these are {report.cases:,}): hold out new rows, "
        "or raise evaluate.max_cases."
    ]


def _open_metrics(rules: Sequence[RuleResult]) -> list[str]:
    """Metrics with a rule that did not pass, each once."""
    return list(dict.fromkeys(r.metric for r in rules if r.outcome != "pass" and r.metric not in FIGURES))


def _wrong(report: Report, name: str) -> set[str]:
    """Cases that count against the adapter. Truncation is the one metric that should be 0."""
    return _passed(report, name) if name == TRUNCATED else _failed(report, name)


def _failed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 0.0} if metric else set()


def _passed(report: Report, name: str) -> set[str]:
    metric = report.candidate.metrics.get(name)
    return {case for case, value in metric.scores.items() if value == 1.0} if metric else set()
