"""Kernels whose memory the `meta` device does not show, by shape: attention, four bits, the fused loss.

Each model is what the kernel's own host code allocates: see the notes beside them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from graftwork.model.trace.sizes import dequantised_sizes, flash_backward_sizes, tile_places

ATTENTION = "graftwork_traced"


def register_attention() -> None:
    """Let transformers find the traced attention by its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, traced_attention)


def traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal flash attention, as `sdpa` runs it on a card where no mask is given."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(low), key.to(low), value.to(low)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, return_debug_mask=False, scale=scaling
    )[0]
    return out.transpose(1, 2).contiguous(), None


def is_product(func: Callable[..., Any]) -> bool:
    """Whether it goes to cuBLAS."""
    return getattr(func, "__name__", "").split(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "gemm_4bit")


def bytes_before(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """What an operation takes before its results, and gives back after them."""
    if getattr(func, "__name__", "").startswith("gemm_4bit"):
        return dequantised_sizes(math.prod(args[2]), args[0].element_size())
    return []


def hidden_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """What an operation takes and gives back before it returns, beside its results."""
    name = getattr(func, "__name__", "")
    if name.startswith("_scaled_dot_product_flash_attention_backward"):
        query, key = args[1], args[2]
        rows, heads, queries, width = query.shape
        return flash_backward_sizes(
            rows, queries, key.shape[2], heads, key.shape[1], width, query.element_size()
        )
    if name.startswith("embedding_dense_backward"):
        # The places sorted by word, and where they came from.
        return [args[1].numel() * 8] * 2
    return []


class FusedLoss(torch.autograd.Function):
    """Head and loss in one, a tile of places at a time; the gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, low: torch.dtype, trained: bool
    ) -> torch.Tensor:
        places, width = hidden.shape
        tile = tile_places(places, width, weight.shape[0])
        gradient = torch.empty_like(hidden)
        weight_gradient = torch.empty_like(weight) if trained else None
        losses = torch.empty(places, dtype=torch.float32, device=hidden.device)
        same = hidden.dtype == weight.dtype == low
        shared = torch.empty(tile, weight.shape[0], dtype=low, device=hidden.device) if same else None
        for start in range(0, places, tile):
            part = hidden[start : start + tile]
            if shared is not None:
                # Where nothing is cast, all tiles share one buffer and write in place.
                logits = torch.mm(part, weight.t(), out=shared[: part.shape[0]])
                torch.mm(logits, weight, out=gradient[start : start + tile])
            else:
                logits = part.to(low) @ weight.to(low).t()
                gradient[start : start + tile] = logits @ weight.to(low)
            if weight_gradient is not None:
                weight_gradient += logits.t() @ part.to(low)
            del logits
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None, None
