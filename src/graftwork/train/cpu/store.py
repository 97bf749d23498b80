"""Where the trunk's output waits for the next epoch: in memory, in a file of the run's folder, or nowhere.

In: how much there is, how often it is asked for, what computing it again costs, what may be spent.
Out: a place. What comes out of it is what was put in, bit by bit, so the place never changes a result.
"""

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from graftwork.files.private import make_folder
from graftwork.records.units import MIB

MEMORY_BYTES_A_SECOND = 2e9
FILE_BYTES_A_SECOND = 2e8
"""Cautious: what a slow disk gives. Behind a fast one the file is only better than expected."""


@dataclass(frozen=True)
class Trunkload:
    """What the trunk would have to give over a run."""

    distinct_tokens: int
    visited_tokens: int
    bytes_a_token: int
    operations_a_token: float
    """Multiplications and additions of one token through the frozen blocks."""

    @property
    def bytes(self) -> int:
        return self.distinct_tokens * self.bytes_a_token


@dataclass(frozen=True)
class Budget:
    memory_bytes: float
    disk_bytes: float
    operations_a_second: float


@dataclass(frozen=True)
class Choice:
    place: Literal["memory", "file", "nowhere"]
    why: str


def choose_place(load: Trunkload, budget: Budget) -> Choice:
    """The nearest place that is large enough and faster than computing again. Pure."""
    again = load.operations_a_token / budget.operations_a_second
    from_memory = load.bytes_a_token / MEMORY_BYTES_A_SECOND
    # Written once and read at each later visit.
    from_file = 2 * load.bytes_a_token / FILE_BYTES_A_SECOND
    size = f"{load.bytes / MIB:.0f} MiB of hidden states"
    if load.operations_a_token == 0:
        return Choice("nowhere", "no block below the adapters")
    if load.visited_tokens <= load.distinct_tokens:
        return Choice("nowhere", "no row is seen twice")
    if load.bytes <= budget.memory_bytes and from_memory < again:
        return Choice("memory", f"{size} instead of computing them again")
    if budget.memory_bytes < load.bytes <= budget.disk_bytes and from_file < again:
        return Choice("file", f"{size} are more than memory allows")
    return Choice("nowhere", f"{size} are too many to keep, or as fast computed again")


class States(Protocol):
    def get(self, number: int) -> Tensor | None: ...

    def put(self, number: int, state: Tensor) -> None: ...


class Nowhere:
    def get(self, number: int) -> Tensor | None:
        return None

    def put(self, number: int, state: Tensor) -> None: ...


class InMemory:
    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}

    def get(self, number: int) -> Tensor | None:
        return self._states.get(number)

    def put(self, number: int, state: Tensor) -> None:
        self._states[number] = state


class InFile:
    """A mapped file that has no name any more: whatever ends the process also frees the disk."""

    def __init__(self, folder: Path, *, lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        make_folder(folder)
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._spans = list(pairwise(ends))
        self._held = [False] * len(lengths)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="trunk-") as file:
            self._mapped = torch.from_file(file.name, shared=True, size=ends[-1] * width, dtype=dtype)
        self._mapped = self._mapped.view(ends[-1], width)

    def get(self, number: int) -> Tensor | None:
        begin, end = self._spans[number]
        return self._mapped[begin:end] if self._held[number] else None

    def put(self, number: int, state: Tensor) -> None:
        begin, end = self._spans[number]
        self._mapped[begin:end] = state
        self._held[number] = True
