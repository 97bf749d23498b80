"""The training step on a CPU: frozen layers read once, adapted ones written out, no padding.

Input: a batch of rows. Output: logits of the trained tokens. The tokens of a batch lie side by side: the
shared prefix once, then every row's rest. The states that frozen layers give can be kept, in memory or in
a file.
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from graftwork.files.disk import make_folder
from graftwork.model.blocks import (
    AttentionRule,
    RotaryPositions,
    activate,
    attention_rule,
    find_activation,
    layout_of,
    look_back,
    pairs_to_halves,
    rotate,
)
from graftwork.model.families import BlockLayout
from graftwork.model.parts import decoder_parts, logits_ending
from graftwork.process.machine import machine_memory
from graftwork.records.base import GIB, MIB
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape
from graftwork.train.cpu.linear import Product, frozen_product, trainable_product
from graftwork.train.loss import TokenBatch
from graftwork.train.objectives.epochs import plan_steps, shared_tokens
from graftwork.train.settings import TrainSettings


@dataclass(frozen=True)
class KeysValues:
    """[tokens, groups, width] each."""

    keys: Tensor
    values: Tensor


class CpuBlock:
    """`learns`: the gradient flows through it."""

    def __init__(self, layer: Any, layout: BlockLayout, *, turn: int = 0, learns: bool, packed: bool) -> None:
        self._layer, self._layout = layer, layout
        self._attention = layer.self_attn
        self._width, self._groups = int(self._attention.head_dim), self._attention.config.num_key_value_heads
        self.turn, self.rule = turn, attention_rule(layer)
        self._residual = float(getattr(layer, "residual_multiplier", 1.0))
        self._activation = find_activation(layer)
        make = trainable_product if learns else frozen_product
        paths = (*layout.qkv, layout.out, *layout.gate_up, layout.down)
        self._product: dict[str, Product] = {
            path: make(layer.get_submodule(path), packed=packed) for path in paths
        }

    def read(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """Return the inputs of queries, and the keys and values of all tokens."""
        asking = self._norm(self._layout.before_attention, x)
        if len(self._layout.qkv) == 1:
            qkv, kv = self._product[self._layout.qkv[0]](asking), self._groups * self._width
            asking, keys, values = qkv.split_with_sizes((qkv.shape[1] - 2 * kv, kv, kv), dim=1)
        else:
            keys, values = (self._product[path](asking) for path in self._layout.qkv[1:])
        return asking, KeysValues(self._turned(keys, "k_norm", turn), self._heads(values))

    def query(self, asking: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        fused = len(self._layout.qkv) == 1
        return self._turned(asking if fused else self._product[self._layout.qkv[0]](asking), "q_norm", turn)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """From attention output to the block's output."""
        layout = self._layout
        attended = self._norm(layout.after_attention, self._product[layout.out](mixed.flatten(1)))
        middle = x + self._scaled(attended)
        normed = self._norm(layout.before_mlp, x if layout.parallel else middle)
        projections = [self._product[path](normed) for path in layout.gate_up]
        if layout.gated and len(projections) == 1:
            projections = list(projections[0].chunk(2, dim=1))
        lifted = activate(projections[0], self._activation)
        added = self._product[layout.down](lifted * projections[1] if layout.gated else lifted)
        return middle + self._scaled(self._norm(layout.after_mlp, added))

    def _norm(self, path: str | None, x: Tensor) -> Tensor:
        normed: Tensor = x if path is None else self._layer.get_submodule(path)(x)
        return normed

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._residual == 1 else x * self._residual

    def _turned(self, x: Tensor, norm: str, turn: tuple[Tensor, Tensor]) -> Tensor:
        head_norm = getattr(self._attention, norm, None)
        heads = self._heads(x)
        if head_norm is not None:
            # Norms of each head, or of all heads of a token at once.
            per_head = head_norm.weight.numel() == self._width
            heads = head_norm(heads) if per_head else self._heads(head_norm(x))
        if self._layout.interleaved:
            heads = pairs_to_halves(heads)
        return rotate(heads, *turn)

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1, self._width)


def attend(
    queries: Sequence[Tensor],
    keys_values: Sequence[KeysValues],
    shared: KeysValues | None,
    rule: AttentionRule,
) -> Tensor:
    """Each row's last tokens attend to the shared prefix and to their own row up to themselves."""
    mixed = []
    for query, row in zip(queries, keys_values, strict=True):
        keys, values = row.keys, row.values
        if shared is not None:
            keys, values = torch.cat((shared.keys, keys)), torch.cat((shared.values, values))
        mixed.append(look_back(query, keys.transpose(0, 1), values.transpose(0, 1), rule))
    return torch.cat(mixed)


class HiddenStateCache:
    """Stores nothing; subclasses store the states of rows by number."""

    def get(self, number: int) -> Tensor | None:
        return None

    def put(self, number: int, state: Tensor) -> None: ...


class MemoryCache(HiddenStateCache):
    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}

    def get(self, number: int) -> Tensor | None:
        return self._states.get(number)

    def put(self, number: int, state: Tensor) -> None:
        self._states[number] = state


class FileCache(HiddenStateCache):
    """A memory-mapped file without a name: when the process ends, the disk space is freed."""

    def __init__(self, folder: Path, *, lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        make_folder(folder)
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._spans = list(pairwise(ends))
        self._held = [False] * len(lengths)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="trunk-") as file:
            self._mapped = torch.from_file(file.name, shared=True, size=ends[-1] * width, dtype=dtype)
        self._mapped = self._mapped.view(ends[-1], width)

    def get(self, number: int) -> Tensor | None:
        start, end = self._spans[number]
        return self._mapped[start:end] if self._held[number] else None

    def put(self, number: int, state: Tensor) -> None:
        start, end = self._spans[number]
        self._mapped[start:end] = state
        self._held[number] = True


class FrozenLayers:
    def __init__(
        self, decoder: Any, first: int, rows: Sequence[Row], *, states: HiddenStateCache, packed: bool
    ) -> None:
        layout = layout_of(decoder)
        self._embed, self._multiplier = decoder.embed_tokens, getattr(decoder, "embedding_multiplier", 1.0)
        self._rotary = RotaryPositions(decoder, interleaved=layout.interleaved)
        self._blocks = [
            CpuBlock(layer, layout, turn=self._rotary.kind(layer), learns=False, packed=packed)
            for layer in decoder.layers[:first]
        ]
        self._beginning = shared_prefix(rows)
        self._numbers = number_rows(rows)
        self._states = states
        self._read_beginning: tuple[Tensor, list[KeysValues]] | None = None

    def read(self, row: Row) -> Tensor:
        """[tokens but the last, width]."""
        begins_alike = row.tokens[: len(self._beginning)] == self._beginning
        if not begins_alike:
            return self._pass(row.tokens[:-1], None)[0]
        if self._read_beginning is None:
            self._read_beginning = self._pass(self._beginning, None)
        beginning, prefix = self._read_beginning
        number = self._numbers.get(row.tokens)
        suffix = None if number is None else self._states.get(number)
        if suffix is None:
            suffix, _ = self._pass(row.tokens[len(self._beginning) : -1], prefix)
            if number is not None:
                self._states.put(number, suffix)
        return torch.cat((beginning, suffix))

    @torch.no_grad()
    def _pass(
        self, tokens: tuple[int, ...], before: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Run the frozen blocks, after the prefix that was read before."""
        past = before[0].keys.shape[0] if before else 0
        x: Tensor = self._embed(torch.tensor(tokens, dtype=torch.long))
        if self._multiplier != 1:
            x = x * self._multiplier
        keys_values: list[KeysValues] = []
        if not tokens or not self._blocks:
            return x, keys_values
        turns = self._rotary.of(x, torch.arange(past, past + len(tokens)))
        for number, block in enumerate(self._blocks):
            turn = turns[block.turn]
            normed, block_kv = block.read(x, turn)
            keys_values.append(block_kv)
            shared = before[number] if before else None
            x = block.finish(x, attend([block.query(normed, turn)], [block_kv], shared, block.rule))
        return x, keys_values


def shared_prefix(rows: Sequence[Row]) -> tuple[int, ...]:
    """The first tokens that all rows of the run share."""
    return rows[0].tokens[: shared_tokens(rows)] if rows else ()


def number_rows(rows: Sequence[Row]) -> dict[tuple[int, ...], int]:
    """A number for each distinct row, in the order of first occurrence."""
    numbers: dict[tuple[int, ...], int] = {}
    for row in rows:
        numbers.setdefault(row.tokens, len(numbers))
    return numbers


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
            normed, keys_values = block.read(x, turn)
            shared, by_row = _cut(keys_values, layout)
            queries = block.query(normed, turn).split_with_sizes(layout.parts)
            mixed = attend(queries[1:], by_row, shared, block.rule)
            if shared is not None:
                mixed = torch.cat((attend(queries[:1], [shared], None, block.rule), mixed))
            x = block.finish(x, mixed)
        # The output of the last block is at the positions that predict a reply.
        last = self._blocks[-1]
        turn = turns[last.turn]
        normed, keys_values = last.read(x, turn)
        shared, by_row = _cut(keys_values, layout)
        last_queries = last.query(_pick(normed, layout), (_pick(turn[0], layout), _pick(turn[1], layout)))
        mixed = attend(last_queries.split_with_sizes(layout.predicting), by_row, shared, last.rule)
        logits = self._head(self._norm(last.finish(_pick(x, layout), mixed)))
        return logits if self._ending.plain else self._ending.of(logits)

    def _enter(self, rows: Sequence[Row], layout: TokenLayout) -> Tensor:
        """Return the input of the first adapted block. The shared prefix is that of the first row."""
        states = [self._trunk.read(row) for row in rows]
        return torch.cat([states[0][: layout.shared], *(state[layout.shared :] for state in states)])


def _cut(keys_values: KeysValues, layout: TokenLayout) -> tuple[KeysValues | None, list[KeysValues]]:
    """Split into the shared prefix's keys and values, and each row's own."""
    parts = [
        KeysValues(keys, values)
        for keys, values in zip(
            keys_values.keys.split_with_sizes(layout.parts),
            keys_values.values.split_with_sizes(layout.parts),
            strict=True,
        )
    ]
    return parts[0] if layout.shared else None, parts[1:]


def _pick(x: Tensor, layout: TokenLayout) -> Tensor:
    """Pick the tokens that predict a reply: the last ones of each row."""
    cuts = [layout.shared]
    for length, count in zip(layout.rests, layout.predicting, strict=True):
        cuts += [length - count, count]
    return torch.cat(x.split_with_sizes(cuts)[2::2])


def make_cpu_step(
    model: Any, rows: Sequence[Row], *, settings: TrainSettings, shape: ModelShape, folder: Path
) -> tuple[CpuStep, str]:
    """The step of a supported model (`costmodel/run.py`), and where it caches what."""
    first = first_trained_block(model)
    adapted = shape.layers - first
    memory = machine_memory().get("limit", 0.0) * GIB
    numbers, skipped = number_rows(rows), len(shared_prefix(rows)) + 1
    trunk = TrunkTokens(
        distinct=sum(len(tokens) - skipped for tokens in numbers),
        visited=sum(
            len(rows[index].tokens) - skipped
            for step in plan_steps(rows, settings=settings)
            for index in step
        ),
    )
    location = choose_kept(
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
        location, why = "nowhere", "answers are new in every step"
    elif first == 0:
        why = "no block below the adapters"
    elif trunk.visited <= trunk.distinct:
        why = "no row is seen twice"
    elif location == "nowhere":
        why = f"{size} are too many to keep, or as fast computed again"
    if location == "nowhere":
        states = HiddenStateCache()
    if location == "file":
        why = f"{size} are more than memory allows"
        lengths = tuple(len(tokens) - skipped for tokens in numbers)
        states = FileCache(folder, lengths=lengths, width=shape.hidden_size, dtype=model.dtype)
    packed = packed_bytes(shape, adapted=adapted, method=settings.method) <= memory * MEMORY_SHARE
    step = CpuStep(model, first, rows, states=states, packed=packed)
    return step, f"hidden states of the frozen layers are {_WHERE[location]}: {why}"


def first_trained_block(model: Any) -> int:
    """The lowest block with trainable weights."""
    blocks = enumerate(decoder_parts(model).blocks)
    return next(index for index, block in blocks if any(p.requires_grad for p in block.parameters()))


_WHERE = {
    "memory": "cached in memory",
    "file": "cached in a file of the run's folder",
    "nowhere": "not cached",
}
