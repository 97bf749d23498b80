"""Which token is said next.

In: the scores behind each row's newest token. Out: a token a row. What is drawn for a row hangs on the seed,
the row's place and how far it is, and on nothing else: neither the device nor the rows beside it.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

FEW_TOKENS = 512
"""The likeliest tokens are looked at first: sorting a whole vocabulary costs as much as a model's step."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `first_row` is the first prompt's place in a batch that was cut in pieces."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    first_row: int = 0


class TokenSampler:
    """Chooses for the rows of one batch."""

    def __init__(self, sampling: Sampling, *, rows: int) -> None:
        self._sampling = sampling
        self._lots: Tensor | None = None
        if sampling.temperature > 0:
            self._lots = torch.stack([_lots_of(sampling, row) for row in range(rows)])

    def choose(self, scores: Tensor, *, rows: list[int], step: int) -> Tensor:
        """A token for each of `rows`, whose scores these are; `step` counts the tokens that each has said."""
        if self._lots is None:
            return scores.argmax(dim=-1)
        kept, tokens = torch.softmax(scores.float() / self._sampling.temperature, dim=-1), None
        if self._sampling.top_p < 1:
            kept, tokens = _likeliest(kept, self._sampling.top_p)
        reached = kept.cumsum(dim=-1)
        lots = self._lots[rows, step : step + 1].to(kept.device)
        # The first whose sum is beyond the lot: what cannot be said adds nothing and is never the first.
        place = torch.searchsorted(reached, lots * reached[:, -1:], right=True).clamp(max=kept.shape[1] - 1)
        return (place if tokens is None else tokens.gather(1, place)).squeeze(1)


def _lots_of(sampling: Sampling, row: int) -> Tensor:
    name = f"{sampling.seed} {sampling.first_row + row}".encode()
    seed = int.from_bytes(hashlib.sha256(name).digest()[:7])
    return torch.rand(sampling.max_new_tokens, generator=torch.Generator().manual_seed(seed))


def _likeliest(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of tokens whose probability reaches top_p, the others 0; the first always stays."""
    few = min(FEW_TOKENS, probabilities.shape[1])
    ordered, tokens = probabilities.topk(few, dim=-1)
    if few < probabilities.shape[1] and bool((ordered.sum(dim=-1) < top_p).any()):
        ordered, tokens = probabilities.sort(dim=-1, descending=True)
    outside = ordered.cumsum(dim=-1) - ordered >= top_p
    return ordered.masked_fill(outside, 0.0), tokens
