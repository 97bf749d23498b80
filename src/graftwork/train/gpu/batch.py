"""Rows packed behind each other, in few different shapes: each shape is compiled and recorded once.

In: the rows of a step and how many tokens go at a time. Out: packed batches; a row is never cut, and
what fills a batch up is a document of its own that nobody learns from. Pure but for making tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.train.gpu.attention import Documents
from graftwork.train.gpu.decoder import PackedLayout

COMPILED_SHAPES, RECORDED_SHAPES = 4, 8
"""A batch is filled up to a quarter, a half, three quarters or all of the tokens of a pass where each size is
compiled for; recording a size costs less, so there are twice as many and half as much filling."""

SMALLEST_PASS = 1024
FEWEST_PLACES = 64
FEWEST_DOCUMENTS = 16


@dataclass(frozen=True)
class PackedPass:
    """One pass: its tokens, and what the decoder is told about them."""

    tokens: Tensor
    packed: PackedLayout
    count: int


def bin_rows(lengths: Sequence[int], *, room: int) -> list[list[int]]:
    """Which rows go together: the longest first, each where it leaves the least room. Pure."""
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
    step = _token_step(room, shapes)
    return -(-count // step) * step


def _token_step(room: int, shapes: int) -> int:
    return max(-(-room // shapes), SMALLEST_PASS // shapes)


def round_places(count: int, *, head_tokens: int) -> int:
    """How many places the head looks at: full chunks, or one whose size is a power of two. Replies are
    short, and a head of a hundred thousand columns is not computed for places that predict nothing."""
    if count >= head_tokens:
        return -(-count // head_tokens) * head_tokens
    return min(max(1 << max(count - 1, 0).bit_length(), FEWEST_PLACES), head_tokens)


class PackSizes(NamedTuple):
    """The sizes that packs come in, which are the shapes that are compiled and recorded."""

    room: int
    """Tokens of a pass at most, but for a single longer row."""
    head_tokens: int
    longest: int = 0
    """Tokens of the longest row of the run: given, all packs share a bound."""
    shapes: int = COMPILED_SHAPES


def pack(rows: Sequence[Row], sizes: PackSizes, *, device: str) -> list[PackedPass]:
    """The passes of a step."""
    bins = bin_rows([len(row.tokens) for row in rows], room=sizes.room)
    return [_pack([rows[at] for at in some], sizes, device) for some in bins]


def _pack(rows: Sequence[Row], sizes: PackSizes, device: str) -> PackedPass:
    count = sum(len(row.tokens) for row in rows)
    step = _token_step(sizes.room, sizes.shapes)
    fill = round_tokens(count, room=sizes.room, shapes=sizes.shapes) - count
    lengths = [len(row.tokens) for row in rows] + ([fill] if fill else [])
    starts = [0, *np.cumsum(lengths).tolist()]
    tokens = np.zeros(starts[-1] + 1, dtype=np.int64)
    for begin, row in zip(starts, rows, strict=False):
        tokens[begin : begin + len(row.tokens)] = row.tokens
    # The token before a trained one predicts it.
    places = [
        np.arange(begin + row.trained_from - 1, begin + len(row.tokens) - 1)
        for begin, row in zip(starts, rows, strict=False)
    ]
    predicts = np.concatenate(places)
    idle = round_places(len(predicts), head_tokens=sizes.head_tokens) - len(predicts)
    packed = PackedLayout(
        positions=_tensor(np.concatenate([np.arange(length) for length in lengths]), device),
        documents=_documents(starts, lengths, max(sizes.longest, step), device),
        predicts=_tensor(np.pad(predicts, (0, idle)), device),
        targets=_tensor(np.pad(tokens[predicts + 1], (0, idle), constant_values=-1), device),
    )
    return PackedPass(_tensor(tokens[:-1], device), packed, count)


def _tensor(numbers: "np.ndarray[Any, Any]", device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True)


def _documents(starts: list[int], lengths: list[int], longest: int, device: str) -> Documents:
    """Documents of no length at the end make their number a round one.

    Their number and the bound on their length are shapes of a recording: few different ones may occur.
    """
    if min(lengths) == max(lengths):
        return Documents(torch.tensor(starts, dtype=torch.int32).to(device), tuple(lengths))
    number = max(1 << (len(lengths) - 1).bit_length(), FEWEST_DOCUMENTS)
    padded = starts + [starts[-1]] * (number - len(lengths))
    at_most = 1 << (max(longest, *lengths) - 1).bit_length()
    return Documents(torch.tensor(padded, dtype=torch.int32).to(device), tuple(lengths), at_most)
