"""KTO: single replies that are desirable or not, without pairs.

In: replies with their log-probabilities now and of the start, and a baseline: the KL divergence of the step,
estimated on prompts with the replies of other rows. Out: a weight for each token; replies whose gain over the
baseline is decided already weigh little.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import cast

import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.records.errors import UserMistake
from graftwork.train.objective_settings import PreferenceSettings
from graftwork.train.objectives.epochs import PlannedOrder, plan_batches
from graftwork.train.objectives.pairs import ReplyPair
from graftwork.train.objectives.samples import LOSS_MEASURE, TrainingSample, make_sample
from graftwork.train.settings import TrainSettings

SumLogProbabilities = Callable[[Sequence[TrainingSample]], list[float]]
"""The log-probability that the model now gives each whole reply."""


class KahnemanTversky:
    name = "kto"

    def __init__(self, settings: PreferenceSettings) -> None:
        self._settings = settings

    def normalizer(self, rows: Sequence[Row]) -> float:
        """Each row carries its scale: 1 / rows of the step."""
        return 1.0

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], list[Tensor]]) -> list[Tensor]:
        found = []
        for row, now in zip(cast(Sequence[TrainingSample], rows), log_probabilities(), strict=True):
            value, sign = self._value(row, now)
            weight = sign * self._settings.beta * self._weight_of(row) * value * (1 - value)
            found.append((weight * row.scale).expand(len(row.tokens) - row.trained_from))
        return found

    def measure(self, rows: Sequence[Row], log_probabilities: Sequence[Tensor]) -> dict[str, Tensor]:
        """For each reply its loss, and its implicit reward by its side."""
        found: dict[str, list[Tensor]] = {}
        for row, now in zip(cast(Sequence[TrainingSample], rows), log_probabilities, strict=True):
            value, _ = self._value(row, now)
            found.setdefault(LOSS_MEASURE, []).append(self._weight_of(row) * (1 - value))
            found.setdefault(f"{row.part}_reward", []).append(self._settings.beta * _gain(row, now))
        return {name: torch.stack(values) for name, values in found.items()}

    def _value(self, row: TrainingSample, now: Tensor) -> tuple[Tensor, float]:
        """σ(± β(gain − baseline)) and the sign."""
        sign = 1.0 if row.part == "chosen" else -1.0
        return torch.sigmoid(sign * self._settings.beta * (_gain(row, now) - row.baseline)), sign

    def _weight_of(self, row: TrainingSample) -> float:
        return 1.0 if row.part == "chosen" else self._settings.undesirable


def _gain(row: TrainingSample, now: Tensor) -> Tensor:
    values = now.detach().float().cpu()
    return values.sum() if row.reference is None else (values - torch.tensor(row.reference)).sum()


def make_judged(
    rows: Sequence[Row], pairs: Sequence[ReplyPair], *, least_score: float | None
) -> list[TrainingSample]:
    """Replies that are desirable (`chosen`) and not: both sides of pairs, replies without a rejected one, and
    with `least_score` replies whose logged score is below it."""
    paired = {pair.chosen.id for pair in pairs}
    found = [row for pair in pairs for row in pair]
    for row in rows:
        if row.id in paired or row.rejected:
            continue
        is_good = least_score is None or row.reward is None or row.reward >= least_score
        found.append(make_sample(row, unit=row.id, part="chosen" if is_good else "rejected"))
    return found


def require_both_sides(samples: Sequence[TrainingSample]) -> None:
    if len({row.part for row in samples}) < 2:
        only = "desirable" if all(row.part == "chosen" for row in samples) else "undesirable"
        raise UserMistake(
            f"every reply is {only}",
            why="KTO learns from the difference between good and bad replies",
            fix="bring logs with `rejected` replies, set `preferences.least_score` and `data.drop_rated_bad: "
            "false` for logged scores, or set `objective: sft`",
            where="train.objective",
        )


class JudgedOrder(PlannedOrder):
    """The batch source of KTO: `batch_size` replies per step, in the order of epochs."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        *,
        settings: TrainSettings,
        now: SumLogProbabilities,
        start: SumLogProbabilities,
    ) -> None:
        steps = plan_batches(
            tuple(len(row.tokens) for row in samples),
            batch_size=settings.batch_size,
            epochs=settings.epochs,
            seed=settings.seed,
            stages=[row.stage for row in samples],
            weights=[row.weight for row in samples],
        )
        super().__init__(steps)
        self._samples = samples
        self._now, self._start = now, start
        self._baseline = 0.0

    def mismatched(self, step: int) -> list[TrainingSample]:
        return mismatch([self._samples[at] for at in self._steps[step - 1]], self._samples)

    def batch(self, step: int) -> list[TrainingSample]:
        rows = [self._samples[at] for at in self._steps[step - 1]]
        crossed = mismatch(rows, self._samples)
        gains = [now - start for now, start in zip(self._now(crossed), self._start(crossed), strict=True)]
        self._baseline = max(fmean(gains), 0.0)
        fields = {"scale": 1 / len(rows), "baseline": self._baseline}
        return [
            row.model_copy(update={**fields, "unit": f"{row.unit}/{row.part}/{place}"})
            for place, row in enumerate(rows)
        ]

    def peek(self, step: int) -> Sequence[Row]:
        return ()

    def measures(self, step: int) -> dict[str, float]:
        return {"baseline": self._baseline}

    def mark(self, number: int) -> object:
        return self._samples[number].tokens, self._samples[number].part


def mismatch(rows: Sequence[TrainingSample], samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Each prompt of a step with the reply of the row before it; of any other sample if the step has none.

    A reply is cut where the row would become longer than every sample: memory is planned for those.
    """
    longest = max(len(row.tokens) for row in samples)
    others = []
    for place, row in enumerate(rows):
        before = [*reversed(rows[:place]), *reversed(rows[place + 1 :])]
        others.append(
            next(other for other in (*before, *samples) if (row.id, row.part) != (other.id, other.part))
        )
    return [
        row.model_copy(
            update={
                "id": f"{row.id}/crossed",
                "unit": f"crossed/{place}",
                "tokens": (*row.tokens[: row.trained_from], *other.tokens[other.trained_from :])[:longest],
                "reference": None,
            }
        )
        for place, (row, other) in enumerate(zip(rows, others, strict=True))
    ]
