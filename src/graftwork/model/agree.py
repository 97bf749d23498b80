"""Do two ways to a model give the same logits? Measured on rows, one model in memory at a time.

In: a loaded model and rows; later another and the same rows. Out: how far apart they are at every
token that predicts a reply, and whether that is within what the type of the weights explains.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graftwork.records.dataset import Row
from graftwork.records.release import Agreement

MOST_TOKENS = 512
"""A longer row is read up to here."""

ALLOWED = {"float32": (1e-4, 0.999), "float16": (0.02, 0.98), "bfloat16": (0.08, 0.95)}
"""Largest difference as a share of the largest logit, and the least share of equal first choices.

In float32 the two ways differ by the order of sums alone. In 16 bits the merged weight itself is
rounded, which the unmerged pair is not: that is the price of merging, and it is bounded here.
"""


@torch.inference_mode()
def reply_logits(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """For each row the logits that predict its reply, in float32 on the host."""
    found = []
    device = next(model.parameters()).device
    for row in rows:
        tokens = torch.tensor(row.tokens[:MOST_TOKENS], device=device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        first = min(row.trained_from, tokens.shape[1] - 1) - 1
        found.append(logits[max(first, 0) : -1].float().cpu())
    return found


def compare(one: Sequence[Tensor], other: Sequence[Tensor], *, dtype: str) -> Agreement:
    """How far `other` is from `one`, position by position."""
    largest = total = 0.0
    top = highest = positions = 0.0
    count = 0
    for left, right in zip(one, other, strict=True):
        apart = (left - right).abs()
        # What is no number agrees with nothing, and would be lost in a maximum.
        largest = max(largest, float(apart.max())) if torch.isfinite(apart).all() else math.inf
        total += float(apart.sum())
        count += apart.numel()
        highest = max(highest, float(left.abs().max()))
        top += float((left.argmax(dim=-1) == right.argmax(dim=-1)).sum())
        positions += left.shape[0]
    difference, first = ALLOWED.get(dtype, ALLOWED["bfloat16"])
    return Agreement(
        rows=len(one),
        positions=int(positions),
        dtype=dtype,
        largest_difference=largest,
        mean_difference=total / max(count, 1),
        largest_logit=highest,
        same_first=top / max(positions, 1),
        allowed_difference=difference,
        allowed_first=first,
    )
