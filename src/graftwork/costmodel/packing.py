"""How rows become passes of a GPU's step: which rows go together, and the few sizes of packs. Pure.

In: lengths of rows, tokens of a pass at most. Out: bins of rows, rounded numbers of tokens and of places. The
engine packs by it (`train/gpu`), and plans count by it.
"""

from collections.abc import Sequence

COMPILED_SHAPES, RECORDED_SHAPES = 4, 8
"""A batch is filled up to a quarter, a half, three quarters or all of the tokens of a pass where each size is
compiled for; recording a size costs less, so there are twice as many and half as much filling."""
SMALLEST_PASS = 1024
FEWEST_PLACES = 64


def bin_rows(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Which rows go together: the longest first, each where it leaves the least room."""
    bins: list[list[int]] = []
    left: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        fitting = [at for at, space in enumerate(left) if space >= lengths[row]]
        if fitting:
            best = min(fitting, key=lambda at: (left[at], at))
            bins[best].append(row)
            left[best] -= lengths[row]
        else:
            bins.append([row])
            left.append(max(room - lengths[row], 0))
    return bins


def round_tokens(count: int, *, room: int, shapes: int = COMPILED_SHAPES) -> int:
    """The next of the few sizes that batches have."""
    step = token_step(room, shapes)
    return -(-count // step) * step


def token_step(room: int, shapes: int) -> int:
    return max(-(-room // shapes), SMALLEST_PASS // shapes)


def round_places(count: int, *, head_tokens: int) -> int:
    """How many places the head looks at: full chunks, or one whose size is a power of two. Replies are
    short, and a head of a hundred thousand columns is not computed for places that predict nothing."""
    if count >= head_tokens:
        return -(-count // head_tokens) * head_tokens
    return min(max(1 << max(count - 1, 0).bit_length(), FEWEST_PLACES), head_tokens)
