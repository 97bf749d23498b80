"""The step on a processor for known decoders: a cached trunk, and the fewest products above it.

In: rows. Out: their loss and gradients, as the plain way finds them. Below the first adapted block
nothing changes, so its output is asked of the trunk; above it every token is read once without
padding; in the last block only the places that predict a reply are followed to the end.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts
from graftwork.records.dataset import Row
from graftwork.train.cpu.block import CpuBlock, KeysValues, attend
from graftwork.train.cpu.layout import TokenLayout, layout_tokens
from graftwork.train.cpu.products import trainable_product
from graftwork.train.cpu.store import HiddenStateCache
from graftwork.train.cpu.trunk import FrozenLayers
from graftwork.train.loss import TokenBatch


class CpuStep:
    def __init__(
        self, model: Any, first: int, rows: Sequence[Row], *, states: HiddenStateCache, packed: bool
    ) -> None:
        parts = decoder_parts(model)
        self._rotary, self._norm = parts.decoder.rotary_emb, parts.decoder.norm
        self._head = trainable_product(parts.head, packed=packed)
        self._trunk = FrozenLayers(parts.decoder, first, rows, states=states, packed=packed)
        self._blocks = [CpuBlock(layer, learns=True, packed=packed) for layer in parts.blocks[first:]]

    def summed_loss(self, batch: TokenBatch) -> Tensor:
        """Cross entropy over the trained tokens, summed: what the plain loss is."""
        layout = layout_tokens(batch.rows)
        x = self._enter(batch.rows, layout)
        logits = self._head(self._norm(self._climb(x, layout)))
        return nn.functional.cross_entropy(logits.float(), batch.targets, reduction="sum")

    def _enter(self, rows: Sequence[Row], layout: TokenLayout) -> Tensor:
        """What enters the first adapted block. The shared beginning is that of the first row."""
        states = [self._trunk.read(row) for row in rows]
        return torch.cat([states[0][: layout.shared], *(state[layout.shared :] for state in states)])

    def _climb(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Through the adapted blocks; what comes out stands at the places that predict a reply."""
        cos, sin = self._rotary(x[None], layout.positions()[None])
        turn = cos[0], sin[0]
        for block in self._blocks[:-1]:
            normed, known = block.read(x, turn)
            shared, own = _cut(known, layout)
            queries = block.query(normed, turn).split_with_sizes(layout.parts)
            mixed = attend(queries[1:], own, shared)
            if shared is not None:
                mixed = torch.cat((attend(queries[:1], [shared], None), mixed))
            x = block.finish(x, mixed)
        last = self._blocks[-1]
        normed, known = last.read(x, turn)
        shared, own = _cut(known, layout)
        asked = last.query(_pick(normed, layout), (_pick(turn[0], layout), _pick(turn[1], layout)))
        return last.finish(_pick(x, layout), attend(asked.split_with_sizes(layout.predicting), own, shared))


def _cut(known: KeysValues, layout: TokenLayout) -> tuple[KeysValues | None, list[KeysValues]]:
    """The shared beginning's keys and values, and each row's own."""
    parts = [
        KeysValues(keys, values)
        for keys, values in zip(
            known.keys.split_with_sizes(layout.parts),
            known.values.split_with_sizes(layout.parts),
            strict=True,
        )
    ]
    return parts[0] if layout.shared else None, parts[1:]


def _pick(x: Tensor, layout: TokenLayout) -> Tensor:
    """Of all tokens, those that predict a reply: the last ones of each row."""
    cuts = [layout.shared]
    for rest, count in zip(layout.rests, layout.predicting, strict=True):
        cuts += [rest - count, count]
    return torch.cat(x.split_with_sizes(cuts)[2::2])
