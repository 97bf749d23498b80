"""Attention of packed documents, forward and backward: fused kernels on a GPU, plain operations elsewhere.

Input: queries, keys and values [tokens, heads, width] and where documents begin. Output: the mixed values,
and for training a small graph of its own around them. A rule names the scale, the window and the cap of the
scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from graftwork.model.blocks import AttentionRule


@dataclass(frozen=True)
class Documents:
    """Where the documents of a packed sequence begin and end."""

    starts: Tensor
    """Cumulative lengths, int32, one more than documents."""
    lengths: tuple[int, ...]
    at_most: int = 0
    """Upper bound of document lengths: a round number, so that few different ones occur. 0: the longest
    itself.
    """

    @property
    def longest(self) -> int:
        return self.at_most or max(self.lengths)

    @property
    def even(self) -> bool:
        """All of the same length."""
        return min(self.lengths) == max(self.lengths)


@dataclass(frozen=True)
class Island:
    """One attention with its own small autograd graph, detached from everything around it."""

    inputs: tuple[Tensor, Tensor, Tensor]
    mixed: Tensor

    def backward(self, d_mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(self.mixed, self.inputs, d_mixed.view_as(self.mixed))
        return dq, dk, dv


def attend(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: AttentionRule) -> Tensor:
    """Return the attention output [tokens, heads, width]."""
    window = None if rule.window is None or rule.window >= documents.longest else rule.window
    # For rows of one length cuDNN's kernels are faster; they may add up in another order each time.
    own_kernels = window is not None or not documents.even or torch.are_deterministic_algorithms_enabled()
    if rule.cap is not None or (q.is_cuda and own_kernels):
        scale = q.shape[-1] ** -0.5 if rule.scale is None else rule.scale
        reach = _Reach(scale, rule.cap or 0.0, min(window or documents.longest, documents.longest), window)
        mixed: Tensor = _PackedAttention.apply(q, k, v, documents.starts, reach)  # type: ignore[no-untyped-call]
        return mixed
    if documents.even:
        return _attend_evenly(q, k, v, documents, rule._replace(window=window))
    split = [torch.split(x, list(documents.lengths)) for x in (q, k, v)]
    parts = [
        _attend_evenly(a, b, c, Documents(documents.starts[:2], (a.shape[0],)), rule)
        for a, b, c in zip(*split, strict=True)
    ]
    return torch.cat(parts)


def attend_keeping(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: AttentionRule) -> Island:
    """The same, with the tensors for its backward pass."""
    inputs = (q.detach().requires_grad_(), k.detach().requires_grad_(), v.detach().requires_grad_())
    with torch.enable_grad():
        return Island(inputs, attend(*inputs, documents, rule))


def _attend_evenly(q: Tensor, k: Tensor, v: Tensor, documents: Documents, rule: AttentionRule) -> Tensor:
    count, length = len(documents.lengths), documents.lengths[0]
    batched = [x.view(count, length, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v)]
    mask = None
    if rule.window is not None and rule.window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - rule.window)
    # cuDNN's attention is the fastest on recent GPUs; the others are fallbacks.
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if q.is_cuda and q.dtype != torch.float32:
        order = [SDPBackend.CUDNN_ATTENTION, *order]
    with sdpa_kernel(order, set_priority=True):
        mixed = scaled_dot_product_attention(
            batched[0],
            batched[1],
            batched[2],
            attn_mask=mask,
            is_causal=mask is None,
            scale=rule.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    return mixed.transpose(1, 2).reshape(q.shape)


TILE = 256
"""Queries of one tile, if attention with capped scores is computed without kernels."""


class _Reach(NamedTuple):
    scale: float
    cap: float
    """0: scores are not capped; only the kernels of a GPU can do without."""
    back: int
    """Upper bound of the tokens that any token attends to, so that shapes do not depend on the documents."""
    window: int | None

    @classmethod
    def of(cls, numbers: Sequence[float]) -> "_Reach":
        scale, cap, back, window = numbers
        return cls(scale, cap, int(back), int(window) or None)

    @property
    def numbers(self) -> list[float]:
        return [self.scale, self.cap, float(self.back), float(self.window or 0)]

    @property
    def flash(self) -> tuple[float, float, int]:
        """Scale, cap and window in the form for the kernels."""
        return self.scale, self.cap, self.window or self.back


def _tiles(tokens: int, starts: Tensor, reach: _Reach) -> list[tuple[slice, slice, Tensor]]:
    """Some queries, the keys that they may attend to, and the mask."""
    positions = torch.arange(tokens, device=starts.device)
    document = torch.bucketize(positions, starts[1:].long(), right=True)
    tiles = []
    for start in range(0, tokens, TILE):
        queries, keys = slice(start, min(start + TILE, tokens)), slice(max(start - reach.back + 1, 0), 0)
        keys = slice(keys.start, queries.stop)
        distance = positions[queries, None] - positions[None, keys]
        visible = (distance >= 0) & (document[queries, None] == document[None, keys])
        if reach.window is not None:
            visible &= distance < reach.window
        tiles.append((queries, keys, visible))
    return tiles


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[tokens, heads, width] as [groups, heads of a group · tokens, width]."""
    tokens, width = heads.shape[0], heads.shape[2]
    return heads.view(tokens, groups, -1, width).permute(1, 2, 0, 3).reshape(groups, -1, width)


def _by_token(grouped: Tensor, tokens: int) -> Tensor:
    """The inverse: [tokens, heads, width]."""
    groups, _, width = grouped.shape
    return grouped.view(groups, -1, tokens, width).permute(2, 0, 1, 3).reshape(tokens, -1, width)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a.float(), b.float())


def _capped_scores(q: Tensor, k: Tensor, reach: _Reach) -> Tensor:
    """[groups, heads of a group, queries, keys] in float32, before the mask."""
    count, groups = q.shape[0], k.shape[1]
    scores = _product(_by_group(q, groups), k.permute(1, 2, 0))
    return (
        scores.mul_(reach.scale / reach.cap).tanh_().mul_(reach.cap).view(groups, -1, count, scores.shape[2])
    )


class _PackedAttention(torch.autograd.Function):
    """softmax(cap · tanh(q k / cap)) v, or without a cap; scores are recomputed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, reach: _Reach) -> Tensor:
        mixed: Tensor
        mixed, sums = _attend_packed(q, k, v, starts, reach.numbers)
        ctx.save_for_backward(q, k, v, starts, mixed, sums)
        ctx.reach = reach
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_inputs = _attend_packed_backward(list(ctx.saved_tensors), gradients[0], ctx.reach.numbers)
        return *d_inputs, None, None


@torch.library.custom_op("graftwork::attend_packed", mutates_args=())
def _attend_packed(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, rule: list[float]
) -> tuple[Tensor, Tensor]:
    """Attention output, and the log-sum-exp of each row: a tile of queries at a time."""
    reach = _Reach.of(rule)
    tokens, heads, _ = q.shape
    mixed = torch.empty_like(q, memory_format=torch.contiguous_format)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    for queries, keys, visible in _tiles(tokens, starts, reach):
        scores = _capped_scores(q[queries], k[keys], reach).masked_fill_(~visible, float("-inf"))
        total = torch.logsumexp(scores, dim=-1)
        weights = scores.sub_(total[..., None]).exp_().flatten(1, 2).to(v.dtype)
        tile_mixed = _product(weights, v[keys].transpose(0, 1))
        mixed[queries] = _by_token(tile_mixed, total.shape[2]).to(q.dtype)
        sums[queries] = total.permute(2, 0, 1).reshape(-1, heads)
    return mixed, sums


@_attend_packed.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, rule: list[float]) -> tuple[Tensor, Tensor]:
    from graftwork.train.gpu import kernels

    return kernels.attend(q, k, v, starts, _Reach.of(rule).flash)


@torch.library.custom_op("graftwork::attend_packed_backward", mutates_args=())
def _attend_packed_backward(
    saved: list[Tensor], d_mixed: Tensor, rule: list[float]
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, starts, mixed, sums = saved
    reach = _Reach.of(rule)
    groups = k.shape[1]
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    for queries, keys, visible in _tiles(q.shape[0], starts, reach):
        asking = _by_group(q[queries], groups)
        d_own = _by_group(d_mixed[queries], groups)
        along = (d_own.float() * _by_group(mixed[queries], groups).float()).sum(-1)
        total = sums[queries].view(-1, groups, sums.shape[1] // groups).permute(1, 2, 0)
        scores = _capped_scores(q[queries], k[keys], reach)
        slope = torch.square(scores).mul_(-reach.scale / reach.cap**2).add_(reach.scale).flatten(1, 2)
        weights = scores.sub_(total[..., None]).exp_().masked_fill_(~visible, 0.0).flatten(1, 2)
        dv[keys] += _product(weights.to(v.dtype).transpose(1, 2), d_own).transpose(0, 1)
        d_weights = _product(d_own, v[keys].permute(1, 2, 0)).sub_(along[..., None])
        d_scores = d_weights.mul_(weights).mul_(slope).to(q.dtype)
        dq[queries] = _by_token(_product(d_scores, k[keys].transpose(0, 1)), total.shape[2]).to(q.dtype)
        dk[keys] += _product(d_scores.transpose(1, 2), asking).transpose(0, 1)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_attend_packed_backward.register_kernel("cuda")
def _(saved: list[Tensor], d_mixed: Tensor, rule: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    from graftwork.train.gpu import kernels

    return kernels.attend_backward(saved, d_mixed, _Reach.of(rule).flash)
