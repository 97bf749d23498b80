"""The tokens of a batch side by side: the shared beginning once, then every row's rest, no padding.

In: rows. Out: the position of each token, and the positions that predict a reply token. The last
token of a row predicts nothing that is trained, so it is not read at all.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.costmodel.processor import DISK_SHARE, MEMORY_SHARE, OPERATIONS_A_SECOND
from graftwork.model.adapters.lora import LoraLinear
from graftwork.model.blocks import RotaryPositions, layout_of
from graftwork.model.families.registry import why_not_written_out
from graftwork.model.parts import decoder_parts, logits_ending
from graftwork.process.memory import machine_memory
from graftwork.records.dataset import Row
from graftwork.train.cpu.layers import (
    CacheBudget,
    CacheChoice,
    CacheLoad,
    CpuBlock,
    FileCache,
    FrozenLayers,
    HiddenStateCache,
    KeysValues,
    MemoryCache,
    NoCache,
    attend,
    choose_cache,
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
        logits = self._head(self._norm(self._climb(x, layout)))
        return logits if self._ending.plain else self._ending.of(logits)

    def _enter(self, rows: Sequence[Row], layout: TokenLayout) -> Tensor:
        """What enters the first adapted block. The shared beginning is that of the first row."""
        states = [self._trunk.read(row) for row in rows]
        return torch.cat([states[0][: layout.shared], *(state[layout.shared :] for state in states)])

    def _climb(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Through the adapted blocks; the output is at the positions that predict a reply."""
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
        last = self._blocks[-1]
        turn = turns[last.turn]
        normed, known = last.read(x, turn)
        shared, own = _cut(known, layout)
        asked = last.query(_pick(normed, layout), (_pick(turn[0], layout), _pick(turn[1], layout)))
        return last.finish(
            _pick(x, layout), attend(asked.split_with_sizes(layout.predicting), own, shared, last.rule)
        )


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
    model: Any, rows: Sequence[Row], *, settings: TrainSettings, folder: Path
) -> tuple[CpuStep, str] | None:
    first = first_trained_block(model)
    if first is None or not is_supported(model):
        return None
    memory = machine_memory().get("limit", 0.0) * 2**30
    packed = packed_bytes(model, first) <= memory * MEMORY_SHARE
    load = cache_load(model, first, rows, settings=settings)
    budget = CacheBudget(
        memory_bytes=memory * MEMORY_SHARE,
        disk_bytes=shutil.disk_usage(folder).free * DISK_SHARE,
        operations_a_second=torch.get_num_threads() * OPERATIONS_A_SECOND,
    )
    choice = choose_cache(load, budget)
    if settings.objective == "grpo":
        choice = CacheChoice("nowhere", "answers are new in every step")
    states: HiddenStateCache = MemoryCache() if choice.place == "memory" else NoCache()
    if choice.place == "file":
        skipped = len(shared_prefix(rows)) + 1
        lengths = tuple(len(tokens) - skipped for tokens in number_rows(rows))
        states = FileCache(folder, lengths=lengths, width=model.config.hidden_size, dtype=model.dtype)
    message = f"hidden states of the frozen layers are {_WHERE[choice.place]}: {choice.why}"
    return CpuStep(model, first, rows, states=states, packed=packed), message


def is_supported(model: Any) -> bool:
    """Blocks as ours do them, on a processor, in float32, and nothing learns but adapters."""
    if any(p.device.type != "cpu" for p in model.parameters()) or model.dtype != torch.float32:
        return False
    if why_not_written_out(model.config.to_dict()) is not None:
        return False
    return not model.training and _only_adapters_learn(model)


def first_trained_block(model: Any) -> int | None:
    """The lowest block with something to learn."""
    blocks = enumerate(decoder_parts(model).blocks)
    return next((at for at, block in blocks if any(p.requires_grad for p in block.parameters())), None)


def packed_bytes(model: Any, first: int) -> int:
    """What the packed copies take: one of each weight, two where the gradient comes back."""
    parts = decoder_parts(model)
    below = sum(_linear_weights(block) for block in parts.blocks[:first])
    above = sum(_linear_weights(block) for block in [*parts.blocks[first:], parts.head])
    return (below + 2 * above) * int(parts.head.weight.element_size())


def cache_load(model: Any, first: int, rows: Sequence[Row], *, settings: TrainSettings) -> CacheLoad:
    skipped = len(shared_prefix(rows)) + 1
    steps = plan_steps(rows, settings=settings)
    return CacheLoad(
        distinct_tokens=sum(len(tokens) - skipped for tokens in number_rows(rows)),
        visited_tokens=sum(len(rows[at].tokens) - skipped for step in steps for at in step),
        bytes_a_token=model.config.hidden_size * decoder_parts(model).head.weight.element_size(),
        operations_a_token=2.0 * sum(_linear_weights(block) for block in decoder_parts(model).blocks[:first]),
    )


def _linear_weights(module: Any) -> int:
    return sum(part.weight.numel() for part in module.modules() if type(part) is nn.Linear)


def _only_adapters_learn(model: Any) -> bool:
    """Then frozen weights can be copied: the copies stay true."""
    adapters = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LoraLinear)
        for name, parameter in module.named_parameters()
        if name.startswith("lora_")
    }
    return all(id(p) in adapters for p in model.parameters() if p.requires_grad)


_WHERE = {
    "memory": "cached in memory",
    "file": "cached in a file of the run's folder",
    "nowhere": "not cached",
}
