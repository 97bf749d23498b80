"""Preferences: pairs of a chosen and a rejected reply to the same prompt, by DPO or ORPO.

In: both replies with their log-probabilities now and of the model that training started from. Out: a weight
for each token; a pair whose order is right already weighs little (DPO's σ(−βΔ)). Pairs are the units of
`samples.py`: chosen and rejected are in one micro-batch.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from graftwork.records.dataset import Row
from graftwork.train.objective_settings import PreferenceSettings
from graftwork.train.objectives.samples import LOSS_MEASURE, TrainingSample, split_units


class _PairLogps(NamedTuple):
    """The log-probabilities of both replies now and by the reference."""

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
    """What DPO and ORPO share: pairs are found, weighed and measured by `_compare`."""

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
        found: dict[str, list[Tensor]] = {}
        for chosen, rejected in find_pairs(rows):
            pair = _read_pair(chosen, rejected, now)
            values = self._measure(pair)
            # The supervised term is a mean over tokens, and the measure one over pairs.
            values[LOSS_MEASURE] -= self._supervised(chosen) / chosen.scale * pair.chosen.sum()
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        return {name: torch.stack(values) for name, values in found.items()}

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
    for unit in split_units(cast(Sequence[TrainingSample], rows)):
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
