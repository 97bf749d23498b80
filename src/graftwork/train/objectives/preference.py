"""Preferences: pairs of chosen and rejected replies by DPO or ORPO, and single replies, good or bad, by KTO.

Input: replies with their log-probabilities now and of the model that training started from. Output: a weight
for each token; a pair or reply that is decided already weighs little (DPO's σ(−βΔ)). Pairs are the units of
`samples.py`: chosen and rejected are in one micro-batch. KTO's baseline is the KL divergence of the step.
"""

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.train.objectives.epochs import PlannedOrder, plan_steps
from graftwork.train.objectives.pairs import ReplyPair
from graftwork.train.objectives.samples import LOSS_MEASURE, TrainingSample, make_sample, split_units
from graftwork.train.settings import PreferenceSettings, TrainSettings


class _PairLogps(NamedTuple):
    """The log-probabilities of both replies, current and by the reference."""

    chosen: Tensor
    rejected: Tensor
    chosen_start: Tensor
    rejected_start: Tensor

    @property
    def chosen_gain(self) -> Tensor:
        return (self.chosen - self.chosen_start).sum()

    @property
    def rejected_gain(self) -> Tensor:
        return (self.rejected - self.rejected_start).sum()


class _PairObjective:
    """Shared by DPO and ORPO: pairs are found, weighted and measured by `_compare`."""

    name = ""

    def __init__(self, settings: PreferenceSettings) -> None:
        self._settings = settings

    def normalizer(self, rows: Sequence[Row]) -> float:
        """Each row carries its scale: 1 / pairs of the step."""
        return 1.0

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], list[Tensor]]) -> list[Tensor]:
        values: dict[int, Tensor] = {}
        now = dict(zip(map(id, rows), log_probabilities(), strict=True))
        for chosen, rejected in find_pairs(rows):
            pair = _read_pair(chosen, rejected, now)
            better, worse = self._compare(pair)
            values[id(chosen)] = better * chosen.scale + self._supervised(chosen)
            values[id(rejected)] = worse * rejected.scale
        return [values[id(row)] for row in rows]

    def _compare(self, pair: _PairLogps) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _supervised(self, chosen: TrainingSample) -> float:
        """The weight of the SFT term, on every token of the chosen reply."""
        return self._settings.sft * chosen.supervised_scale

    def measure(self, rows: Sequence[Row], log_probabilities: Sequence[Tensor]) -> dict[str, Tensor]:
        """For each pair: its loss, the margin of its implicit rewards, and whether the order is right."""
        now = dict(zip(map(id, rows), log_probabilities, strict=True))
        measures: dict[str, list[Tensor]] = {}
        for chosen, rejected in find_pairs(rows):
            pair = _read_pair(chosen, rejected, now)
            values = self._measure(pair)
            # The supervised term is a mean over tokens, and the measure one over pairs.
            values[LOSS_MEASURE] -= self._supervised(chosen) / chosen.scale * pair.chosen.sum()
            for name, value in values.items():
                measures.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in measures.items()}

    def _measure(self, pair: _PairLogps) -> dict[str, Tensor]:
        raise NotImplementedError


class DirectPreference(_PairObjective):
    """DPO with the sigmoid loss: −log σ(β(Δchosen − Δrejected))."""

    name = "dpo"

    def _compare(self, pair: _PairLogps) -> tuple[Tensor, Tensor]:
        beta = self._settings.beta
        weight = beta * torch.sigmoid(-beta * (pair.chosen_gain - pair.rejected_gain))
        return weight.expand_as(pair.chosen), -weight.expand_as(pair.rejected)

    def _measure(self, pair: _PairLogps) -> dict[str, Tensor]:
        beta = self._settings.beta
        margin = beta * (pair.chosen_gain - pair.rejected_gain)
        return {
            LOSS_MEASURE: -logsigmoid(margin),
            "margin": margin,
            "accuracy": (margin > 0).float(),
            "chosen_reward": beta * pair.chosen_gain,
            "rejected_reward": beta * pair.rejected_gain,
        }


class OddsRatioPreference(_PairObjective):
    """ORPO: the mean loss of the chosen reply and −β log σ(log odds ratio). Needs no reference."""

    name = "orpo"

    def _compare(self, pair: _PairLogps) -> tuple[Tensor, Tensor]:
        weight = self._settings.beta * torch.sigmoid(-_log_odds_ratio(pair))
        return (
            (weight * _odds_slope(pair.chosen) / len(pair.chosen)).expand_as(pair.chosen),
            (-weight * _odds_slope(pair.rejected) / len(pair.rejected)).expand_as(pair.rejected),
        )

    def _supervised(self, chosen: TrainingSample) -> float:
        return chosen.supervised_scale

    def _measure(self, pair: _PairLogps) -> dict[str, Tensor]:
        ratio = _log_odds_ratio(pair)
        return {
            LOSS_MEASURE: -self._settings.beta * logsigmoid(ratio),
            "margin": ratio,
            "accuracy": (ratio > 0).float(),
        }


NEAREST_TO_CERTAIN = -1e-7
"""The largest mean log-probability whose odds are computed: those of 0, as 32 bits round it, are infinite."""


def _log_odds_ratio(pair: _PairLogps) -> Tensor:
    return _log_odds(_mean(pair.chosen)) - _log_odds(_mean(pair.rejected))


def _mean(values: Tensor) -> Tensor:
    return values.mean().clamp(max=NEAREST_TO_CERTAIN)


def _log_odds(mean: Tensor) -> Tensor:
    return mean - torch.log(-torch.expm1(mean))


def _odds_slope(values: Tensor) -> Tensor:
    """The derivative of the log odds by the mean log-probability."""
    return -1 / torch.expm1(_mean(values))


def find_pairs(rows: Sequence[Row]) -> list[tuple[TrainingSample, TrainingSample]]:
    """The chosen and the rejected reply of each unit."""
    pairs = []
    for unit in split_units(cast("Sequence[TrainingSample]", rows)):
        by_part = {row.part: row for row in unit}
        pairs.append((by_part["chosen"], by_part["rejected"]))
    return pairs


def _read_pair(chosen: TrainingSample, rejected: TrainingSample, now: dict[int, Tensor]) -> _PairLogps:
    values = [now[id(row)].detach().float().cpu() for row in (chosen, rejected)]
    starts = [
        torch.zeros_like(value) if row.reference is None else torch.tensor(row.reference)
        for row, value in zip((chosen, rejected), values, strict=True)
    ]
    return _PairLogps(values[0], values[1], starts[0], starts[1])


SumLogProbabilities = Callable[[Sequence[TrainingSample]], list[float]]
"""The model's current log-probability of each whole reply."""


class KahnemanTversky:
    name = "kto"

    def __init__(self, settings: PreferenceSettings) -> None:
        self._settings = settings

    def normalizer(self, rows: Sequence[Row]) -> float:
        """Each row carries its scale: 1 / rows of the step."""
        return 1.0

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], list[Tensor]]) -> list[Tensor]:
        token_weights = []
        for row, now in zip(cast("Sequence[TrainingSample]", rows), log_probabilities(), strict=True):
            value, sign = self._value(row, now)
            weight = sign * self._settings.beta * self._weight_of(row) * value * (1 - value)
            token_weights.append((weight * row.scale).expand(len(row.tokens) - row.trained_from))
        return token_weights

    def measure(self, rows: Sequence[Row], log_probabilities: Sequence[Tensor]) -> dict[str, Tensor]:
        """For each reply its loss, and its implicit reward by its side."""
        measures: dict[str, list[Tensor]] = {}
        for row, now in zip(cast("Sequence[TrainingSample]", rows), log_probabilities, strict=True):
            value, _ = self._value(row, now)
            measures.setdefault(LOSS_MEASURE, []).append(self._weight_of(row) * (1 - value))
            measures.setdefault(f"{row.part}_reward", []).append(self._settings.beta * _gain(row, now))
        return {name: torch.stack(values) for name, values in measures.items()}

    def _value(self, row: TrainingSample, now: Tensor) -> tuple[Tensor, float]:
        """σ(± β(gain − baseline)) and the sign."""
        sign = 1.0 if row.part == "chosen" else -1.0
        return torch.sigmoid(sign * self._settings.beta * (_gain(row, now) - row.baseline)), sign

    def _weight_of(self, row: TrainingSample) -> float:
        return 1.0 if row.part == "chosen" else self._settings.undesirable_weight


def _gain(row: TrainingSample, now: Tensor) -> Tensor:
    values = now.detach().float().cpu()
    return values.sum() if row.reference is None else (values - torch.tensor(row.reference)).sum()


def make_judged(
    rows: Sequence[Row], pairs: Sequence[ReplyPair], *, least_score: float | None
) -> list[TrainingSample]:
    """Desirable (`chosen`) and undesirable replies: both sides of pairs, replies without a rejected one, and
    with `least_score` replies whose logged score is below it.
    """
    paired = {pair.chosen.id for pair in pairs}
    judged = [row for pair in pairs for row in pair]
    for row in rows:
        if row.id in paired or row.rejected:
            continue
        is_good = least_score is None or row.reward is None or row.reward >= least_score
        judged.append(make_sample(row, unit=row.id, part="chosen" if is_good else "rejected"))
    return judged


def require_both_sides(samples: Sequence[TrainingSample]) -> None:
    if len({row.part for row in samples}) < 2:
        only = "desirable" if all(row.part == "chosen" for row in samples) else "undesirable"
        raise UserError(
            f"every reply is {only}",
            why="KTO learns from the difference between good and bad replies",
            fix="add logs with `rejected` replies, set `preferences.least_score` and `data.drop_rated_bad: "
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
        super().__init__(plan_steps(samples, settings=settings))
        self._samples = samples
        self._now, self._start = now, start
        self._baseline = 0.0

    def mismatched(self, step: int) -> list[TrainingSample]:
        return mismatch([self._samples[index] for index in self._steps[step - 1]], self._samples)

    def batch(self, step: int) -> list[TrainingSample]:
        rows = [self._samples[index] for index in self._steps[step - 1]]
        crossed = mismatch(rows, self._samples)
        gains = [now - start for now, start in zip(self._now(crossed), self._start(crossed), strict=True)]
        self._baseline = max(fmean(gains), 0.0)
        fields = {"scale": 1 / len(rows), "baseline": self._baseline}
        return [
            row.model_copy(update={**fields, "unit": f"{row.unit}/{row.part}/{position}"})
            for position, row in enumerate(rows)
        ]

    def peek(self, step: int) -> Sequence[Row]:
        return ()

    def measures(self, step: int) -> dict[str, float]:
        return {"baseline": self._baseline}

    def mark(self, number: int) -> object:
        return self._samples[number].tokens, self._samples[number].part


def mismatch(rows: Sequence[TrainingSample], samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """Each prompt of a step with the reply of the row before it; of any other sample if the step has none. A
    reply is truncated if the row would become longer than every sample: memory is planned for those.
    """
    longest = max(len(row.tokens) for row in samples)
    donors = []
    for position, row in enumerate(rows):
        before = [*reversed(rows[:position]), *reversed(rows[position + 1 :])]
        donors.append(
            next(donor for donor in (*before, *samples) if (row.id, row.part) != (donor.id, donor.part))
        )
    return [
        row.model_copy(
            update={
                "id": f"{row.id}/crossed",
                "unit": f"crossed/{position}",
                "tokens": (*row.tokens[: row.trained_from], *donor.tokens[donor.trained_from :])[:longest],
                "reference": None,
            }
        )
        for position, (row, donor) in enumerate(zip(rows, donors, strict=True))
    ]
