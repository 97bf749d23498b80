"""The training step on a CPU: frozen layers read once, adapted ones written out, no padding.

In: a batch of rows. Out: logits of the trained tokens. The tokens of a batch lie side by side: the shared
beginning once, then every row's rest. The last token of a row predicts nothing that is trained, so it is not
read at all.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graftwork.costmodel.cpu_step import (
    MEMORY_SHARE,
    TrunkTokens,
    choose_kept,
    packed_bytes,
    states_bytes,
)
from graftwork.model.blocks import RotaryPositions, layout_of
from graftwork.model.parts import decoder_parts, logits_ending
from graftwork.process.memory import machine_memory
from graftwork.records.base import GIB, MIB
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape
from graftwork.train.cpu.layers import (
    CpuBlock,
    FileCache,
    FrozenLayers,
    HiddenStateCache,
    KeysValues,
    MemoryCache,
    attend,
    number_rows,
    shared_prefix,
    trainable_product,
)
from graftwork.train.loss import TokenBatch
from graftwork.train.objectives.epochs import plan_steps, shared_tokens
from graftwork.train.settings import TrainSettings


@dataclass(frozen=True)
class TokenLayout:
    """`shared` tokens, then `rests[i]` of row i, the last `predicting[i]` of which predict its reply."""

    shared: int
    rests: tuple[int, ...]
    predicting: tuple[int, ...]

    @property
    def parts(self) -> list[int]:
        return [self.shared, *self.rests]

    def positions(self) -> Tensor:
        """The position of each token in its row."""
        return torch.cat([torch.arange(self.shared), *(torch.arange(n) + self.shared for n in self.rests)])


def layout_tokens(rows: Sequence[Row]) -> TokenLayout:
    shared = shared_tokens(rows)
    return TokenLayout(
        shared=shared,
        rests=tuple(len(row.tokens) - 1 - shared for row in rows),
        predicting=tuple(len(row.tokens) - row.trained_from for row in rows),
    )


class CpuStep:
    def __init__(
        self, model: Any, first: int, rows: Sequence[Row], *, states: HiddenStateCache, packed: bool
    ) -> None:
        parts = decoder_parts(model)
        layout, self._norm = layout_of(model), parts.decoder.norm
        self._rotary = RotaryPositions(parts.decoder, interleaved=layout.interleaved)
        self._head, self._ending = trainable_product(parts.head, packed=packed), logits_ending(model.config)
        self._trunk = FrozenLayers(parts.decoder, first, rows, states=states, packed=packed)
        self._blocks = [
            CpuBlock(layer, layout, turn=self._rotary.kind(layer), learns=True, packed=packed)
            for layer in parts.blocks[first:]
        ]

    def logits(self, batch: TokenBatch) -> Tensor:
        """The logits of the trained tokens, equal to those of the eager forward pass up to rounding."""
        layout = layout_tokens(batch.rows)
        x = self._enter(batch.rows, layout)
        turns = self._rotary.of(x, layout.positions())
        for block in self._blocks[:-1]:
            turn = turns[block.turn]
            normed, known = block.read(x, turn)
            shared, own = _cut(known, layout)
            queries = block.query(normed, turn).split_with_sizes(layout.parts)
            mixed = attend(queries[1:], own, shared, block.rule)
            if shared is not None:
                mixed = torch.cat((attend(queries[:1], [shared], None, block.rule), mixed))
            x = block.finish(x, mixed)
        # The output of the last block is at the positions that predict a reply.
        last = self._blocks[-1]
        turn = turns[last.turn]
        normed, known = last.read(x, turn)
        shared, own = _cut(known, layout)
        asked = last.query(_pick(normed, layout), (_pick(turn[0], layout), _pick(turn[1], layout)))
        mixed = attend(asked.split_with_sizes(layout.predicting), own, shared, last.rule)
        logits = self._head(self._norm(last.finish(_pick(x, layout), mixed)))
        return logits if self._ending.plain else self._ending.of(logits)

    def _enter(self, rows: Sequence[Row], layout: TokenLayout) -> Tensor:
        """What enters the first adapted block. The shared beginning is that of the first row."""
        states = [self._trunk.read(row) for row in rows]
        return torch.cat([states[0][: layout.shared], *(state[layout.shared :] for state in states)])


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


def make_cpu_step(
    model: Any, rows: Sequence[Row], *, settings: TrainSettings, shape: ModelShape, folder: Path
) -> tuple[CpuStep, str]:
    """The step of a model that it is written for (`costmodel/run.py`), and where it caches what."""
    first = first_trained_block(model)
    adapted = shape.layers - first
    memory = machine_memory().get("limit", 0.0) * GIB
    numbers, skipped = number_rows(rows), len(shared_prefix(rows)) + 1
    trunk = TrunkTokens(
        distinct=sum(len(tokens) - skipped for tokens in numbers),
        visited=sum(
            len(rows[at].tokens) - skipped for step in plan_steps(rows, settings=settings) for at in step
        ),
    )
    kept = choose_kept(
        shape,
        trunk,
        adapted=adapted,
        memory_bytes=memory,
        disk_bytes=shutil.disk_usage(folder).free,
        threads=torch.get_num_threads(),
    )
    size = f"{states_bytes(shape, trunk.distinct) / MIB:.0f} MiB of hidden states"
    why = f"{size} instead of computing them again"
    states: HiddenStateCache = MemoryCache()
    if settings.objective == "grpo":
        kept, why = "nowhere", "answers are new in every step"
    elif first == 0:
        why = "no block below the adapters"
    elif trunk.visited <= trunk.distinct:
        why = "no row is seen twice"
    elif kept == "nowhere":
        why = f"{size} are too many to keep, or as fast computed again"
    if kept == "nowhere":
        states = HiddenStateCache()
    if kept == "file":
        why = f"{size} are more than memory allows"
        lengths = tuple(len(tokens) - skipped for tokens in numbers)
        states = FileCache(folder, lengths=lengths, width=shape.hidden_size, dtype=model.dtype)
    packed = packed_bytes(shape, adapted=adapted, method=settings.method) <= memory * MEMORY_SHARE
    step = CpuStep(model, first, rows, states=states, packed=packed)
    return step, f"hidden states of the frozen layers are {_WHERE[kept]}: {why}"


def first_trained_block(model: Any) -> int:
    """The lowest block with something to learn."""
    blocks = enumerate(decoder_parts(model).blocks)
    return next(at for at, block in blocks if any(p.requires_grad for p in block.parameters()))


_WHERE = {
    "memory": "cached in memory",
    "file": "cached in a file of the run's folder",
    "nowhere": "not cached",
}
