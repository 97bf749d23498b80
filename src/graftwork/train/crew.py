"""Who works together on a step: alone, or several processes that share its rows.

In: the rows of a step. Out: this process's share of them, and sums over all. What is summed does not
depend on how many share it, so a run on two gives the losses of a run on one.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import nn

from graftwork.records.dataset import Row


class Crew(Protocol):
    rank: int
    size: int

    def share(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        """The parts of a step that this process works on, one forward and backward each."""

    def sum_up(self, loss: float, parameters: Sequence[nn.Parameter]) -> float:
        """Add losses and gradients of all processes; every process then holds the same."""


class Alone:
    """One process, one device."""

    rank = 0
    size = 1

    def share(self, rows: Sequence[Row]) -> Iterable[Sequence[Row]]:
        return (rows,)

    def sum_up(self, loss: float, _parameters: Sequence[nn.Parameter]) -> float:
        return loss
