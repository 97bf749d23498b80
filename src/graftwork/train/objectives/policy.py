"""Policy gradients over sampled answers: REINFORCE with group advantages, GRPO's clip, CISPO, GSPO, KL.

Input: answers with their advantages (`advantages.py`) and the log-probabilities now, when sampled and of the
start. Output: a weight for each token, whose gradient is that of the loss. One update a batch makes every
ratio 1: then the weight is the advantage, whatever the loss is called.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.settings import PolicySettings


class PolicyGradient:
    name = "grpo"

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def normalizer(self, rows: Sequence[Row]) -> float:
        """Each row carries its scale."""
        return 1.0

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], list[Tensor]]) -> list[Tensor]:
        samples = cast("Sequence[TrainingSample]", rows)
        with_kl = self._settings.kl > 0
        compared = any(row.sampled is not None or (with_kl and row.reference is not None) for row in samples)
        now: Sequence[Tensor | None] = log_probabilities() if compared else [None] * len(samples)
        return [self._weigh(row, values) for row, values in zip(samples, now, strict=True)]

    def _weigh(self, row: TrainingSample, now: Tensor | None) -> Tensor:
        count = len(row.tokens) - row.trained_from
        if row.part == "sft":
            return torch.full((count,), row.scale)
        mask = kept_tokens(row)
        size = int(mask.sum())
        ratio, weights = torch.ones(size), torch.full((size,), row.advantage)
        if row.sampled is not None and now is not None:
            ratio = importance_ratio(now.cpu()[mask], torch.tensor(row.sampled)[mask], self._settings)
            weights = clip_weights(ratio, row.advantage, self._settings)
        if self._settings.kl and row.reference is not None and now is not None:
            whole = self._settings.loss == "gspo"
            start = torch.tensor(row.reference)[mask]
            change = kl_weights(now.cpu()[mask], start, ratio, whole=whole)
            weights = weights + self._settings.kl * change
        if row.factors is None:
            return weights * row.scale
        token_weights = torch.zeros(count)
        token_weights[mask] = weights * torch.tensor(row.factors)[mask]
        return token_weights * row.scale

    def measure(self, rows: Sequence[Row], log_probabilities: Sequence[Tensor]) -> dict[str, Tensor]:
        """KL to the start, mean log-probability and ratio to the sampler, for each token."""
        measures: dict[str, list[Tensor]] = {}
        for row, now in zip(cast("Sequence[TrainingSample]", rows), log_probabilities, strict=True):
            values = now.detach().float().cpu()
            if row.part == "sft":
                measures.setdefault("sft_loss", []).append(-values)
                continue
            mask = kept_tokens(row)
            if row.reference is not None:
                estimate = kl_to_reference(values, torch.tensor(row.reference))
                measures.setdefault("kl", []).append(estimate[mask])
            if row.sampled is not None:
                ratio = torch.exp(values - torch.tensor(row.sampled))
                measures.setdefault("ratio", []).append(ratio[mask])
        return {name: torch.cat(parts) for name, parts in measures.items()}


def kept_tokens(row: TrainingSample) -> Tensor:
    """Which of the trained tokens count: those that the model wrote and the sampler agrees on."""
    if row.factors is None:
        return torch.ones(len(row.tokens) - row.trained_from, dtype=torch.bool)
    return torch.tensor(row.factors) != 0


def importance_ratio(now: Tensor, sampled: Tensor, settings: PolicySettings) -> Tensor:
    """p now / p when sampled, of each token; for GSPO the geometric mean over the answer at every token."""
    difference = now.float() - sampled
    if settings.loss == "gspo":
        difference = difference.mean().expand_as(difference) if difference.numel() else difference
    return torch.exp(difference)


def clip_weights(ratio: Tensor, advantage: float, settings: PolicySettings) -> Tensor:
    """ratio · advantage where the clip is inactive, else 0; CISPO caps the ratio and keeps every token."""
    if settings.loss == "cispo":
        return ratio.clamp(max=settings.upper_clip) * advantage
    clipped = ratio.clamp(1 - settings.epsilon_low, 1 + settings.upper_clip)
    return torch.where(ratio * advantage <= clipped * advantage, ratio * advantage, 0.0)


def kl_weights(now: Tensor, reference: Tensor, ratio: Tensor, *, whole: bool) -> Tensor:
    """The weights whose gradient is that of ratio · `kl_to_reference`: without bias for the reverse KL.

    With `whole` the ratio is that of the answer, and its gradient reaches all of the answer's tokens.
    """
    estimate = kl_to_reference(now, reference)
    through_ratio = estimate.mean().expand_as(estimate) if whole else estimate
    return -ratio * (1 - torch.exp(reference - now.float()) + through_ratio)


def kl_to_reference(now: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of the KL divergence from the reference, for each token: never negative."""
    difference = reference - now.float()
    return torch.exp(difference) - difference - 1
