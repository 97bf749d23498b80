"""Batched generation: a shared prefix is computed once, finished rows leave the batch.

In: prompts as tokens. Out: the tokens that the model answers with, and why it stopped. Knows
nothing of templates, cases or HTTP.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from graftwork.model import attention


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


OnToken = Callable[[int, int], bool]
"""Called with (row, token) for each new token; False ends that row."""


class Generator:
    """Generates with whatever adapter is active in `model`."""

    def __init__(self, model: Any, *, stop_tokens: Iterable[int]) -> None:
        self._model = model
        # A family that caps its scores (Gemma 2) keeps the attention that does so.
        if model.config._attn_implementation == "sdpa":
            model.set_attn_implementation(attention.register())
        self._stop = frozenset(stop_tokens)
        self._device = next(model.parameters()).device

    @torch.inference_mode()
    def generate(
        self, prompts: list[list[int]], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Generated]:
        """Answer all prompts in one batch."""
        results = [Generated() for _ in prompts]
        cache, mask, logits = self._prefill(prompts)
        alive = list(range(len(prompts)))
        random = torch.Generator().manual_seed(sampling.seed)
        for _ in range(sampling.max_new_tokens):
            chosen = _choose(logits, sampling, random)
            keep: list[int] = []
            for place, (row, token) in enumerate(zip(alive, chosen.tolist(), strict=True)):
                if token in self._stop:
                    results[row].finish_reason = "stop"
                    continue
                results[row].tokens.append(token)
                if on_token is None or on_token(row, token):
                    keep.append(place)
                else:
                    results[row].finish_reason = "stop"
            if not keep or len(results[alive[keep[0]]].tokens) >= sampling.max_new_tokens:
                break
            if len(keep) < len(alive):
                # Finished rows cost as much as living ones: drop them from the batch.
                index = torch.tensor(keep, device=self._device)
                cache.batch_select_indices(index)
                mask, chosen = mask[index], chosen[index]
                alive = [alive[place] for place in keep]
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
            logits = self._forward(chosen[:, None], mask, cache)
        return results

    def _prefill(self, prompts: list[list[int]]) -> tuple[Any, Tensor, Tensor]:
        """Read the prompts: their common beginning once, the rest padded on the left."""
        from transformers import DynamicCache

        shared = _common_prefix(prompts)
        cache = DynamicCache(config=self._model.config)
        if shared:
            prefix = torch.tensor([prompts[0][:shared]], device=self._device)
            self._forward(prefix, torch.ones_like(prefix), cache)
            cache.batch_repeat_interleave(len(prompts))
        rests = [prompt[shared:] for prompt in prompts]
        width = max(map(len, rests))
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), shared + width, dtype=torch.long)
        mask[:, :shared] = 1
        for row, rest in enumerate(rests):
            tokens[row, width - len(rest) :] = torch.tensor(rest)
            mask[row, shared + width - len(rest) :] = 1
        mask = mask.to(self._device)
        return cache, mask, self._forward(tokens.to(self._device), mask, cache)

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits behind the last token of each row."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        output = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _common_prefix(prompts: list[list[int]]) -> int:
    """How many first tokens all prompts share, leaving at least one to each."""
    limit = min(map(len, prompts)) - 1
    first = prompts[0]
    for place in range(limit):
        if any(prompt[place] != first[place] for prompt in prompts):
            return place
    return max(limit, 0)


def _choose(logits: Tensor, sampling: Sampling, random: torch.Generator) -> Tensor:
    if sampling.temperature <= 0:
        return logits.argmax(dim=-1)
    probabilities = torch.softmax(logits.float() / sampling.temperature, dim=-1).cpu()
    ordered, order = probabilities.sort(dim=-1, descending=True)
    # Keep the smallest set of tokens whose probability reaches top_p; the first always stays.
    outside = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
    picked = ordered.masked_fill(outside, 0.0).multinomial(1, generator=random)
    return order.gather(1, picked).squeeze(1).to(logits.device)
