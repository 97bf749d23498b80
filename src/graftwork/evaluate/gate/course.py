"""What the course of training says about the next try.

In: the outcome and the steps of a run. Out: hints, none where nothing stands out. Pure; does not know the
answers. `failures` is how many answers are to be explained: how training went may explain all of them, yet
what was seen in the answers themselves comes first where it explains as many.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from graftwork.evaluate.gate.hint import Hint
from graftwork.grading.metrics import name_of
from graftwork.records.plan import Plan
from graftwork.records.report import Report
from graftwork.records.run import Look, TrainOutcome, TrainStep
from graftwork.records.verdict import RuleResult

FEWEST_STEPS = 8
"""Too short a course says nothing about where it was going."""
PART = 5
"""The last fifth of the steps is compared with the fifth before it."""
STILL_FALLING = 0.03
FAR_UNDER = 0.6
"""Training loss under this share of the validation loss has learned the rows by heart."""
ROSE = 1.02
SPIKE = 1.8
"""A loss so many times the median of the steps before it."""
WINDOW = 9
FEWEST_BEFORE = 4
HARDLY_LEARNED = 0.97


class GoodRun(NamedTuple):
    """An earlier run that did better, and what is otherwise now."""

    run_id: str
    report: Report
    changes: tuple[str, ...]
    """Settings, data and base, each as "train.epochs 3 → 1"."""


class Training(NamedTuple):
    """How a run went."""

    outcome: TrainOutcome
    steps: tuple[TrainStep, ...] = ()
    good: GoodRun | None = None
    """The last run that did better, where there is one."""

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps if math.isfinite(step.loss)]

    def setting(self, name: str) -> float | None:
        value = self.outcome.settings.get(name)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def hints_of(training: Training | None, *, failures: int) -> list[Hint]:
    """What to change in the training, the surest first."""
    if training is None:
        return []
    weight = max(failures, 1)
    overfitted = _on_overfitting(training, weight)
    hints = [*_on_spikes(training, weight), *overfitted, *_on_early_stop(training, weight)]
    if not overfitted:
        # More steps would only make an overfitted adapter worse.
        hints += _on_falling_loss(training, weight)
    return hints + _on_nothing_learned(training, weight)


def hint_of_changes(training: Training | None, *, report: Report, rules: Sequence[RuleResult]) -> list[str]:
    """What was changed since an earlier run was better: the likeliest cause, and the cheapest to undo."""
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
    """What of settings, data and base is otherwise in the later run, in words."""
    found = []
    if before.base_fingerprint != now.base_fingerprint:
        same = before.base == now.base
        found.append(f"base {before.base} → {now.base}" if not same else f"the files of the base {now.base}")
    old, new = _flat(before.train.get("settings", {})), _flat(now.train.get("settings", {}))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            found.append(f"train.{key} {_show(old.get(key))} → {_show(new.get(key))}")
    if before.dataset_hash != now.dataset_hash:
        tokens = f"{before.tokens.value:,.0f} → {now.tokens.value:,.0f} tokens in all"
        found.append(f"the dataset {before.dataset_hash[:8]} → {now.dataset_hash[:8]} ({tokens})")
    return tuple(found)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = isinstance(value, dict) and value
        flat |= _flat(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def _show(value: Any) -> str:
    return "none" if value is None else str(value)


def _on_falling_loss(training: Training, weight: float) -> list[Hint]:
    before, last = _last_parts(training.losses)
    looks = _losses_of(training.outcome.looks)
    at_the_end = not looks or looks[-1] <= min(looks)
    if before is None or last is None or last > before * (1 - STILL_FALLING) or not at_the_end:
        return []
    epochs = training.setting("epochs")
    more = f" (train.epochs: {epochs:g} → {epochs + max(1, round(epochs / 2)):g})" if epochs else ""
    return [
        Hint(
            0.7 * weight,
            f"The loss was still falling at the end ({before:.2f} → {last:.2f} over the last fifth of "
            f"{training.outcome.steps} steps): train for more steps{more}.",
        )
    ]


def _on_overfitting(training: Training, weight: float) -> list[Hint]:
    outcome = training.outcome
    held, first = outcome.validation_loss_after, outcome.validation_loss_before
    _, last = _last_parts(training.losses)
    learned = last if last is not None else outcome.final_loss
    if held is None or not held > 0:
        return []
    rose = first is not None and held > first * ROSE
    if not rose and learned >= FAR_UNDER * held:
        return []
    seen = f"training loss {learned:.2f}, validation loss {held:.2f}"
    seen += f", up from {first:.2f}" if rose else ""
    return [
        Hint(
            0.9 * weight,
            f"The rows were learned by heart ({seen}): train less (fewer epochs, a lower rank or rate; "
            "train.examine keeps the best look), or on more rows.",
        )
    ]


def _on_early_stop(training: Training, weight: float) -> list[Hint]:
    outcome = training.outcome
    compared = [look for look in outcome.looks if look.compared]
    best = outcome.best_step
    if best is None or len(compared) < 3 or best >= compared[-1].step:
        return []
    after = sum(look.step > best for look in compared)
    return [
        Hint(
            0.6 * weight,
            f"The best look was at step {best} of {outcome.steps}, and {after} after it "
            f"{'was' if after == 1 else 'were'} no better: more "
            "steps of the same will not help; add or mend data, or change the rate.",
        )
    ]


def _on_spikes(training: Training, weight: float) -> list[Hint]:
    spikes = find_spikes(training.steps)
    if len(spikes) < 2:
        return []
    rate = training.setting("learning_rate")
    halve = f" (train.learning_rate: {rate:g} → {rate / 2:g})" if rate else ""
    first = ", ".join(map(str, spikes[:3]))
    return [
        Hint(
            0.8 * weight,
            f"The loss jumped {len(spikes)} times (steps {first}{' …' if len(spikes) > 3 else ''}): the "
            f"learning rate is too high; halve it{halve}, or warm up longer.",
        )
    ]


def _on_nothing_learned(training: Training, weight: float) -> list[Hint]:
    outcome = training.outcome
    _, last = _last_parts(training.losses)
    learned = last if last is not None else outcome.final_loss
    if outcome.first_loss <= 0 or learned < HARDLY_LEARNED * outcome.first_loss:
        return []
    return [
        Hint(
            0.85 * weight,
            f"Hardly anything was learned (loss {outcome.first_loss:.2f} → {learned:.2f}): raise "
            "train.learning_rate or train.rank, and check with `graft data audit` what the rows teach.",
        )
    ]


def find_spikes(steps: Sequence[TrainStep]) -> list[int]:
    """Steps whose loss stands out of those before them, or is no number at all."""
    found = []
    for place, step in enumerate(steps):
        before = [near.loss for near in steps[max(0, place - WINDOW) : place] if math.isfinite(near.loss)]
        if not math.isfinite(step.loss) or (
            len(before) >= FEWEST_BEFORE and step.loss > SPIKE * median(before)
        ):
            found.append(step.step)
    return found


def _last_parts(losses: Sequence[float]) -> tuple[float | None, float | None]:
    if len(losses) < FEWEST_STEPS:
        return None, None
    part = max(2, len(losses) // PART)
    # Medians: one jump is not a course.
    return median(losses[-2 * part : -part]), median(losses[-part:])


def _losses_of(looks: Sequence[Look]) -> list[float]:
    return [look.value for look in looks if look.metric == "loss" and look.compared]
