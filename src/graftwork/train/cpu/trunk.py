"""The frozen blocks below the adapters: each row once, whatever batch it stands in.

In: a row. Out: the hidden states that enter the first adapted block, computed or remembered. They are
a function of the row alone: a row is read by itself behind the beginning that all rows of the run
share, which is read once. So no batch, no epoch and no restart changes a bit of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.train.cpu.block import CpuBlock, KeysValues, attend
from graftwork.train.cpu.store import HiddenStateCache
from graftwork.train.order import shared_tokens


class FrozenLayers:
    def __init__(
        self, decoder: Any, first: int, rows: Sequence[Row], *, states: HiddenStateCache, packed: bool
    ) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._blocks = [CpuBlock(layer, learns=False, packed=packed) for layer in decoder.layers[:first]]
        self._beginning = shared_prefix(rows)
        self._numbers = number_rows(rows)
        self._states = states
        self._read_beginning: tuple[Tensor, list[KeysValues]] | None = None

    def read(self, row: Row) -> Tensor:
        """[tokens but the last, width]."""
        begins_alike = row.tokens[: len(self._beginning)] == self._beginning
        if not begins_alike:
            return self._pass(row.tokens[:-1], None)[0]
        beginning, known = self._shared()
        number = self._numbers.get(row.tokens)
        rest = None if number is None else self._states.get(number)
        if rest is None:
            rest, _ = self._pass(row.tokens[len(self._beginning) : -1], known)
            if number is not None:
                self._states.put(number, rest)
        return torch.cat((beginning, rest))

    def _shared(self) -> tuple[Tensor, list[KeysValues]]:
        if self._read_beginning is None:
            self._read_beginning = self._pass(self._beginning, None)
        return self._read_beginning

    @torch.no_grad()
    def _pass(
        self, tokens: tuple[int, ...], before: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Through the frozen blocks, behind what was read before."""
        past = before[0].keys.shape[0] if before else 0
        x: Tensor = self._embed(torch.tensor(tokens, dtype=torch.long))
        known: list[KeysValues] = []
        if not tokens or not self._blocks:
            return x, known
        cos, sin = self._rotary(x[None], torch.arange(past, past + len(tokens))[None])
        turn = cos[0], sin[0]
        for number, block in enumerate(self._blocks):
            normed, own = block.read(x, turn)
            known.append(own)
            shared = before[number] if before else None
            x = block.finish(x, attend([block.query(normed, turn)], [own], shared))
        return x, known


def shared_prefix(rows: Sequence[Row]) -> tuple[int, ...]:
    """The first tokens that all rows of the run share."""
    return rows[0].tokens[: shared_tokens(rows)] if rows else ()


def number_rows(rows: Sequence[Row]) -> dict[tuple[int, ...], int]:
    """A number for each distinct row, in the order in which they first stand."""
    numbers: dict[tuple[int, ...], int] = {}
    for row in rows:
        numbers.setdefault(row.tokens, len(numbers))
    return numbers
