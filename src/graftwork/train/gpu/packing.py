"""Rows packed into the passes of a step: documents one after another, without padding between them.

Input: rows, and the few sizes of packs that the tuning gives. Output: passes, their numbers in one tensor
that goes to the GPU in one copy. Does not know the model.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from graftwork.costmodel.run import (
    COMPILED_SHAPES,
    RECORDED_SHAPES,
    bin_rows,
    round_places,
    round_tokens,
    token_step,
)
from graftwork.records.dataset import Row
from graftwork.records.plan import Tuning
from graftwork.train.gpu.attention import Documents

FEWEST_DOCUMENTS = 16


class PackedLayout(NamedTuple):
    """One pass: documents one after another in one sequence, and the positions that predict."""

    flat: Tensor
    """Tokens, positions, prediction positions and targets, and where documents begin."""
    counts: tuple[int, int]
    """Number of tokens, and of positions that predict."""
    documents: Documents
    weights: Tensor | None = None
    """The objective's weight for each target; None: every target has weight 1."""

    @property
    def tokens(self) -> Tensor:
        return self.flat[: self.counts[0]]

    @property
    def positions(self) -> Tensor:
        return self.flat[self.counts[0] : 2 * self.counts[0]]

    @property
    def predicts(self) -> Tensor:
        """Positions whose next token is trained on."""
        start = 2 * self.counts[0]
        return self.flat[start : start + self.counts[1]]

    @property
    def targets(self) -> Tensor:
        start = 2 * self.counts[0] + self.counts[1]
        return self.flat[start : start + self.counts[1]]

    def clone(self) -> "PackedLayout":
        flat = self.flat.clone()
        starts = _starts_in(flat, self.counts, documents=self.documents.starts.shape[0])
        weights = None if self.weights is None else self.weights.clone()
        return PackedLayout(flat, self.counts, replace(self.documents, starts=starts), weights)

    def copy_(self, other: "PackedLayout") -> None:
        """Copy the numbers of a pass of the same sizes."""
        self.flat.copy_(other.flat)
        if self.weights is not None and other.weights is not None:
            self.weights.copy_(other.weights)


def _starts_in(flat: Tensor, counts: tuple[int, int], *, documents: int) -> Tensor:
    return flat[2 * sum(counts) :].view(torch.int32)[:documents]


def pack(
    rows: Sequence[Row], tuning: Tuning, *, device: str, weights: Sequence[Tensor] | None = None
) -> list[PackedLayout]:
    """The passes of a step. Their sizes, which are the shapes that are compiled and recorded, follow from
    the tuning."""
    bins = bin_rows([len(row.tokens) for row in rows], room=tuning.micro_tokens)
    return [
        pack_rows(
            [rows[index] for index in indices],
            tuning,
            device=device,
            weights=None if weights is None else [weights[index] for index in indices],
        )
        for indices in bins
    ]


def pack_rows(
    rows: Sequence[Row], tuning: Tuning, *, device: str, weights: Sequence[Tensor] | None = None
) -> PackedLayout:
    """Pack all these rows into one pass."""
    count = sum(len(row.tokens) for row in rows)
    room, shapes = tuning.micro_tokens, COMPILED_SHAPES if tuning.compiled else RECORDED_SHAPES
    fill = round_tokens(count, room=room, shapes=shapes) - count
    lengths = [len(row.tokens) for row in rows] + ([fill] if fill else [])
    starts = [0, *np.cumsum(lengths).tolist()]
    tokens = np.zeros(starts[-1] + 1, dtype=np.int64)
    for start, row in zip(starts, rows, strict=False):
        tokens[start : start + len(row.tokens)] = row.tokens
    # The token before a trained one predicts it.
    predicting = [
        np.arange(start + row.trained_from - 1, start + len(row.tokens) - 1)
        for start, row in zip(starts, rows, strict=False)
    ]
    predicts = np.concatenate(predicting)
    idle = round_places(len(predicts), head_tokens=tuning.head_tokens) - len(predicts)
    bounds, at_most = _document_bounds(starts, lengths, max(tuning.longest, token_step(room, shapes)))
    padded = np.zeros(len(bounds) + len(bounds) % 2, dtype=np.int32)
    padded[: len(bounds)] = bounds
    positions = [np.arange(length) for length in lengths]
    targets = np.pad(tokens[predicts + 1], (0, idle), constant_values=-1)
    joined = np.concatenate(
        (tokens[:-1], *positions, np.pad(predicts, (0, idle)), targets, padded.view(np.int64))
    )
    flat, counts = torch.from_numpy(joined), (starts[-1], len(targets))
    if device.startswith("cuda"):
        flat = flat.pin_memory()
    flat = flat.to(device, non_blocking=True)
    return PackedLayout(
        flat,
        counts,
        Documents(_starts_in(flat, counts, documents=len(bounds)), tuple(lengths), at_most),
        weights=None
        if weights is None
        else nn.functional.pad(torch.cat(list(weights)).to(device), (0, idle)),
    )


def _document_bounds(starts: list[int], lengths: list[int], longest: int) -> tuple[list[int], int]:
    """Where documents begin, and an upper bound of their length (0: none is needed). Empty documents at the
    end round their number up: number and bound are shapes of a recording, and few different ones may occur.
    """
    if min(lengths) == max(lengths):
        return starts, 0
    number = max(1 << (len(lengths) - 1).bit_length(), FEWEST_DOCUMENTS)
    padded = starts + [starts[-1]] * (number - len(lengths))
    return padded, 1 << (max(longest, *lengths) - 1).bit_length()
