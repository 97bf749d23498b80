"""How the rows of a step are dealt to the processes that share it. Pure: rows in, portions out.

Every process gets as many portions as every other, because those that hold only a part of the model
must call it equally often. Long rows are dealt first, each to whoever has the fewest tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from graftwork.records.dataset import Row


@dataclass(frozen=True)
class MicroBatch:
    """Rows for one forward and backward. Who has nothing to do works on a row that does not count."""

    rows: Sequence[Row]
    counts: bool = True
    last: bool = True
    """No other portion follows: the gradients can be added up over all processes."""


def split_into_micro_batches(
    rows: Sequence[Row], *, size: int, micro_rows: int | None = None
) -> list[list[MicroBatch]]:
    """The portions of each process, by rank. Every row is in exactly one that counts."""
    hands = balance_rows([len(row.tokens) for row in rows], size=size)
    most = max(len(hand) for hand in hands)
    rounds = -(-most // max(micro_rows or most, 1))
    spare = min(rows, key=lambda row: len(row.tokens))
    return [_micro_batches([rows[at] for at in hand], rounds, spare) for hand in hands]


def balance_rows(lengths: Sequence[int], *, size: int) -> list[list[int]]:
    """Row numbers for each of `size`, in their order, so that the tokens are about even."""
    hands: list[list[int]] = [[] for _ in range(size)]
    tokens = [0] * size
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        least = min(range(size), key=lambda rank: (tokens[rank], rank))
        hands[least].append(row)
        tokens[least] += lengths[row]
    return [sorted(hand) for hand in hands]


def _micro_batches(rows: Sequence[Row], rounds: int, spare: Row) -> list[MicroBatch]:
    """As many portions as there are rounds, none larger than needed."""
    bounds = [len(rows) * number // rounds for number in range(rounds + 1)]
    portions = []
    for number in range(rounds):
        some = rows[bounds[number] : bounds[number + 1]]
        portions.append(MicroBatch(some or (spare,), counts=bool(some), last=number == rounds - 1))
    return portions
