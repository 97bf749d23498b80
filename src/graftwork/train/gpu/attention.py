"""Causal attention over packed documents that never see each other, forward and backward.

In: queries, keys, values [tokens, heads, width] and where documents begin. Out: the mixed values, and
an island of autograd that gives their gradient later. Documents of one length go as a plain batch
through the fastest kernel there is; others through variable-length attention.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed sequence begin and end."""

    starts: Tensor
    """Cumulative lengths, int32, one more than documents."""
    lengths: tuple[int, ...]
    at_most: int = 0
    """No document is longer: a round number, so that few different ones occur. 0: the longest itself."""

    @property
    def longest(self) -> int:
        return self.at_most or max(self.lengths)

    @property
    def even(self) -> bool:
        """All of one length."""
        return min(self.lengths) == max(self.lengths)


@dataclass(frozen=True)
class Island:
    """One attention with its own small graph, cut off from everything around it."""

    inputs: tuple[Tensor, Tensor, Tensor]
    mixed: Tensor

    def backward(self, d_mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(self.mixed, self.inputs, d_mixed.view_as(self.mixed))
        return dq, dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """[tokens, heads, width] of mixed values."""
    if documents.even:
        return _attend_evenly(q, k, v, documents)
    if q.device.type == "cuda":
        return _attend_packed(q, k, v, documents)
    split = [torch.split(x, list(documents.lengths)) for x in (q, k, v)]
    parts = [
        _attend_evenly(a, b, c, Documents(documents.starts[:2], (a.shape[0],)))
        for a, b, c in zip(*split, strict=True)
    ]
    return torch.cat(parts)


def attend_keeping(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Island:
    """The same, with what its backward pass needs."""
    inputs = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
    with torch.enable_grad():
        return Island(inputs, attend(*inputs, documents))


def _attend_evenly(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    count, length = len(documents.lengths), documents.lengths[0]
    batched = [x.view(count, length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v)]
    with _kernels(q):
        mixed = scaled_dot_product_attention(
            batched[0], batched[1], batched[2], is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
    return mixed.transpose(1, 2).reshape(q.shape)


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Since 2.12 the caller must say that heads share keys; before, the word is unknown.
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _words_of(varlen_attn) else {}
    starts, longest = documents.starts, documents.longest
    mixed: Tensor = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)  # type: ignore[assignment, arg-type]
    return mixed


@lru_cache
def _words_of(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _kernels(q: Tensor) -> AbstractContextManager[None]:
    """cuDNN's attention is the fastest on recent cards; the others stand behind it."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    if q.device.type != "cuda" or q.dtype == torch.float32:
        order = order[1:]
    return sdpa_kernel(order, set_priority=True)
