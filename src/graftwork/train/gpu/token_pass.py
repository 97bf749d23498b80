"""One new token for each row, by the weights and adapters in training and by the kernels of their step.

In: the decoder of a training engine, and the cache of a generator's slots. Out: logits. It takes a third of
the kernels of the model's own pass, and multiplies as training does: what is sampled is what is trained.
"""

import torch
from torch import Tensor

from graftwork.model.blocks import AttentionRule, attend_to_slots
from graftwork.model.generate.cache import SlotCache
from graftwork.train.gpu.decoder import GpuDecoder


class CardTokenPass:
    """Call `update` after the adapters changed, and `run` for each token."""

    def __init__(self, decoder: GpuDecoder) -> None:
        self._decoder = decoder

    @classmethod
    def of(cls, decoder: GpuDecoder) -> "CardTokenPass | None":
        """None where keys of earlier tokens, which the model itself wrote, have another order or a window."""
        plain = all(
            not shape.interleaved and shape.attention.window is None and shape.attention.cap is None
            for shape in decoder.shapes
        )
        return cls(decoder) if plain else None

    def update(self) -> None:
        self._decoder.refresh_adapters()

    def run(self, tokens: Tensor, positions: Tensor, cache: SlotCache, columns: int) -> Tensor:
        """Logits behind a token of each of the first slots. `tokens` and `positions` are [rows]."""
        seen = torch.arange(columns, device=positions.device) <= positions[:, None]
        bias = torch.zeros(seen.shape, dtype=cache.dtype, device=seen.device)
        bias.masked_fill_(~seen, float("-inf"))

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
            keys, values = cache.write_tokens(block, k, v, positions, columns)
            return attend_to_slots(q, keys, values, bias, on_card=True, scale=rule.scale)

        return self._decoder.advance(tokens, positions, attend)
