"""Rows into training sequences: best fit decreasing, and the borders that keep documents apart.

In: lengths. Out: which rows share a sequence; for one sequence, where its documents begin and what
position each token has in its own. Pure; knows nothing of tokens or files.

A row is never divided. The longest row goes first, each into the fullest sequence that still has
room. The open sequences lie in buckets by the room that is left, and a bit for each bucket that is
not empty finds the best one, so that no sequence is ever searched for.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Lengths = Sequence[int] | NDArray[np.integer]


class Packed(NamedTuple):
    """Sequence k holds the rows `order[boundaries[k] : boundaries[k + 1]]`, the longest first."""

    order: "NDArray[np.int64]"
    boundaries: "NDArray[np.int64]"

    @property
    def sequences(self) -> int:
        return len(self.boundaries) - 1


def pack(lengths: "Lengths", *, length: int) -> Packed:
    """Every row once, in sequences of at most `length` tokens. The same lengths always pack alike."""
    import numpy as np

    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not (sizes.min() >= 1 and sizes.max() <= length):
        raise ValueError(f"every row must have 1 to {length} tokens, not {sizes.min()} to {sizes.max()}")
    longest_first = np.argsort(-sizes, kind="stable")
    sequence_of = _fit(sizes[longest_first].tolist(), length=length)
    order = longest_first[np.argsort(sequence_of, kind="stable")]
    return Packed(order=order, boundaries=boundaries(np.bincount(sequence_of)).astype(np.int64))


def _fit(sizes: list[int], *, length: int) -> "NDArray[np.int64]":
    """The sequence of each row, for rows that come longest first."""
    import numpy as np

    bits = [1 << room for room in range(length + 1)]
    buckets: list[list[int]] = [[] for _ in range(length + 1)]
    open_rooms = 0  # bit r is set while a sequence with room for r tokens is open
    sequence_of: list[int] = []
    sequences = 0
    for size in sizes:
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            bucket = buckets[room]
            sequence = bucket.pop()
            if not bucket:
                open_rooms ^= bits[room]
        else:
            room, sequence = length, sequences
            sequences += 1
        sequence_of.append(sequence)
        left = room - size
        if left:
            buckets[left].append(sequence)
            open_rooms |= bits[left]
    return np.array(sequence_of, dtype=np.int64)


def boundaries(lengths: "Lengths") -> "NDArray[np.int32]":
    """Where the documents of one sequence begin, and where the last one ends (`cu_seqlens`)."""
    import numpy as np

    return np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64)))).astype(np.int32)


def positions(lengths: "Lengths") -> "NDArray[np.int64]":
    """The position of each token of a sequence in its own document: it begins anew at each border."""
    import numpy as np

    sizes = np.asarray(lengths, dtype=np.int64)
    begins = np.cumsum(sizes) - sizes
    return np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(begins, sizes)
