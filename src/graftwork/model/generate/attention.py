"""Attention for generation: one new token for each row, keys and values shared by a group of heads.

The stock path copies keys and values for every head of a group, which costs more than the attention itself
when there is one new token. Here the heads of a group use their shared keys in one product. Registered
through the interface of transformers; nothing is patched.
"""

from typing import Any

import torch
from torch import Tensor

ATTENTION_NAME = "graft_grouped"


def register_attention() -> str:
    """Make the attention known to transformers; its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, grouped_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """(batch, heads, 1, d) against (batch, groups, length, d); more than one token goes the stock way."""
    rows, heads, new, width = query.shape
    if new != 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
        return output, None
    groups = key.shape[1]
    scale = scaling if scaling is not None else width**-0.5
    grouped = query.reshape(rows, groups, heads // groups, width) * scale
    scores = grouped @ key.transpose(-1, -2)
    if attention_mask is not None:
        seen = attention_mask[..., : key.shape[2]]
        scores = scores.masked_fill(~seen, float("-inf")) if seen.dtype == torch.bool else scores + seen
    mixed = scores.float().softmax(dim=-1).to(value.dtype) @ value
    return mixed.reshape(rows, 1, heads, width), None
