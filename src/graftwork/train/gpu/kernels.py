"""The Triton kernels: the few that a compiler does not write well by itself, and packed attention.

Input: tensors on a GPU. Output: the same numbers as the plain functions next to which they are used and which
are the reference in the tests. Only imported where there is a GPU. Attention never has its scores in memory,
and no kernel adds up atomically: the same input gives the same bytes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork.model.parts import LogitsEnding

COLUMNS = 2048
HEADS = 8


# Annotations of a kernel are read by its compiler: only names that it knows are allowed.
@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(gate_up, d_lifted, weight_scale, lifted, d_gate_up, codes, row_scale, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """One row: the gate's backward pass, then its two halves in 8 bits under one scale."""
    row = tl.program_id(0).to(tl.int64)
    wide, narrow = row * 2 * width, row * width
    largest = tl.zeros([columns], dtype=tl.float32)
    for start in range(0, width, columns):
        offsets = start + tl.arange(0, columns)
        inside = offsets < width
        gate = tl.load(gate_up + wide + offsets, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + wide + width + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_lifted + narrow + offsets, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        lit = (gate * sigmoid).to(tl.bfloat16).to(tl.float32)
        tl.store(lifted + narrow + offsets, (lit * up).to(tl.bfloat16), mask=inside)
        d_gate = (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(tl.bfloat16)
        d_up = (d * lit).to(tl.bfloat16)
        tl.store(d_gate_up + wide + offsets, d_gate, mask=inside)
        tl.store(d_gate_up + wide + width + offsets, d_up, mask=inside)
        scale_gate = tl.load(weight_scale + offsets, mask=inside, other=0.0)
        scale_up = tl.load(weight_scale + width + offsets, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(d_gate.to(tl.float32) * scale_gate))
        largest = tl.maximum(largest, tl.abs(d_up.to(tl.float32) * scale_up))
    scale = tl.maximum(tl.max(largest, axis=0) / 448.0, 1e-12)
    tl.store(row_scale + row, scale)
    # Every thread must see what the others wrote before the row is read again.
    tl.debug_barrier()
    for start in range(0, 2 * width, columns):
        offsets = start + tl.arange(0, columns)
        inside = offsets < 2 * width
        d = tl.load(d_gate_up + wide + offsets, mask=inside, other=0.0).to(tl.float32)
        d = d * tl.load(weight_scale + offsets, mask=inside, other=0.0) / scale
        d = tl.minimum(tl.maximum(d, -448.0), 448.0)
        tl.store(codes + wide + offsets, d.to(tl.float8e4nv), mask=inside)


@torch.library.triton_op("graftwork::gate_backward_eight", mutates_args={})
def gate_backward_eight(
    gate_up: Tensor, d_lifted: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gated values recomputed, the gradient of gate and up, and that gradient in 8 bits with its
    scales.
    """
    rows, width = d_lifted.shape
    lifted, d_gate_up = torch.empty_like(d_lifted), torch.empty_like(gate_up)
    codes = torch.empty(rows, 2 * width, dtype=torch.float8_e4m3fn, device=gate_up.device)
    row_scale = torch.empty(rows, 1, dtype=torch.float32, device=gate_up.device)
    torch.library.wrap_triton(_gate_backward)[(rows,)](
        gate_up, d_lifted, weight_scale, lifted, d_gate_up, codes, row_scale, width, COLUMNS, num_warps=8
    )
    return lifted, d_gate_up, codes, row_scale


@triton.jit  # type: ignore[untyped-decorator]
def _norm(x, weight, y, heads, x_token, x_head, width, epsilon, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One row: RMS norm."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, columns)
    inside = offsets < width
    wide = tl.load(
        x + (row // heads) * x_token + (row % heads) * x_head + offsets, mask=inside, other=0.0
    ).to(tl.float32)
    even = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)).to(y.dtype.element_ty)
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + offsets, (scale * even.to(tl.float32)).to(y.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads, width = _rows_of(x)
    columns = triton.next_power_of_2(width)
    _norm[(x.numel() // width,)](
        x, weight, y, heads, x.stride(0), x.stride(-2), width, epsilon, columns, num_warps=_warps(columns)
    )
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(x, y, weight, added, normed, width, epsilon, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One row: a residual sum and its RMS norm."""
    start = tl.program_id(0).to(tl.int64) * width
    offsets = tl.arange(0, columns)
    inside = offsets < width
    wide = tl.load(x + start + offsets, mask=inside, other=0.0).to(tl.float32)
    wide += tl.load(y + start + offsets, mask=inside, other=0.0).to(tl.float32)
    total = wide.to(added.dtype.element_ty)
    tl.store(added + start + offsets, total, mask=inside)
    wide = total.to(tl.float32)
    even = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)).to(added.dtype.element_ty)
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + start + offsets, (scale * even.to(tl.float32)).to(added.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    added, normed = torch.empty_like(x), torch.empty_like(x)
    rows, width = x.shape
    columns = triton.next_power_of_2(width)
    _add_norm[(rows,)](x, y, weight, added, normed, width, epsilon, columns, num_warps=_warps(columns))
    return added, normed


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(dy, x, weight, add, dx, heads, dy_token, dy_head, x_token, x_head, width, epsilon, has_add: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """One row: the gradient of an RMS norm's input."""
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, columns)
    inside = offsets < width
    token, head = row // heads, row % heads
    wide = tl.load(x + token * x_token + head * x_head + offsets, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + token * dy_token + head * dy_head + offsets, mask=inside, other=0.0).to(tl.float32)
    d *= tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    even = wide * inverse
    gradient = (inverse * (d - even * (tl.sum(d * even, axis=0) / width))).to(dx.dtype.element_ty)
    if has_add:
        residual = tl.load(add + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
        gradient = (residual + gradient.to(tl.float32)).to(dx.dtype.element_ty)
    tl.store(dx + row * width + offsets, gradient, mask=inside)


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float, add: Tensor | None) -> Tensor:
    dx = torch.empty(x.shape, dtype=dy.dtype, device=dy.device)
    heads, width = _rows_of(x)
    columns = triton.next_power_of_2(width)
    _norm_backward[(x.numel() // width,)](
        dy, x, weight, dx if add is None else add, dx, heads, dy.stride(0), dy.stride(-2),
        x.stride(0), x.stride(-2), width, epsilon, add is not None, columns, num_warps=_warps(columns),
    )  # fmt: skip
    return dx


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(q, k, v, cos, sin, q_out, k_out, v_out, queries, keys, q_token, q_head, k_token, k_head, v_token, v_head, half, heads: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some heads of one token: rotary positions of queries and keys, a copy of values."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    offsets = tl.arange(0, columns)[None]
    inside = offsets < half
    kind = q_out.dtype.element_ty
    cos_low = tl.load(cos + token * 2 * half + offsets, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + token * 2 * half + half + offsets, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + token * 2 * half + offsets, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + token * 2 * half + half + offsets, mask=inside, other=0.0).to(tl.float32)
    is_query, is_key = head < queries, (head >= queries) & (head < queries + keys)
    is_value = (head >= queries + keys) & (head < queries + 2 * keys)
    q_at = token * q_token + head * q_head + offsets
    k_at = token * k_token + (head - queries) * k_head + offsets
    low = tl.load(q + q_at, mask=inside & is_query, other=0.0).to(tl.float32)
    high = tl.load(q + q_at + half, mask=inside & is_query, other=0.0).to(tl.float32)
    low += tl.load(k + k_at, mask=inside & is_key, other=0.0).to(tl.float32)
    high += tl.load(k + k_at + half, mask=inside & is_key, other=0.0).to(tl.float32)
    first = ((low * cos_low).to(kind).to(tl.float32) + (-high * sin_low).to(kind).to(tl.float32)).to(kind)
    second = ((high * cos_high).to(kind).to(tl.float32) + (low * sin_high).to(kind).to(tl.float32)).to(kind)
    out = (token * queries + head) * 2 * half + offsets
    tl.store(q_out + out, first, mask=inside & is_query)
    tl.store(q_out + out + half, second, mask=inside & is_query)
    out = (token * keys + head - queries) * 2 * half + offsets
    tl.store(k_out + out, first, mask=inside & is_key)
    tl.store(k_out + out + half, second, mask=inside & is_key)
    v_at = token * v_token + (head - queries - keys) * v_head + offsets
    out = (token * keys + head - queries - keys) * 2 * half + offsets
    tl.store(v_out + out, tl.load(v + v_at, mask=inside & is_value, other=0.0), mask=inside & is_value)
    tl.store(
        v_out + out + half,
        tl.load(v + v_at + half, mask=inside & is_value, other=0.0),
        mask=inside & is_value,
    )


def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    tokens, queries, width = q.shape
    keys, half = k.shape[1], width // 2
    strides = [stride for x in (q, k, v) for stride in (x.stride(0), x.stride(1))]
    blocks = triton.cdiv(queries + 2 * keys, HEADS)
    _rotate[(tokens, blocks)](
        q,
        k,
        v,
        cos,
        sin,
        *out,
        queries,
        keys,
        *strides,
        half,
        HEADS,
        triton.next_power_of_2(half),
        num_warps=4,
    )
    return out[0], out[1], out[2]


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_backward(dq, dk, dv, cos, sin, out, queries, keys, q_token, q_head, k_token, k_head, v_token, v_head, half, heads: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some heads of one token: the gradient of all heads before rotary positions, concatenated."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    column = tl.arange(0, columns)[None]
    inside = column < half
    kind = out.dtype.element_ty
    cos_low = tl.load(cos + token * 2 * half + column, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + token * 2 * half + half + column, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + token * 2 * half + column, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + token * 2 * half + half + column, mask=inside, other=0.0).to(tl.float32)
    is_query, is_key = head < queries, (head >= queries) & (head < queries + keys)
    is_value = (head >= queries + keys) & (head < queries + 2 * keys)
    q_at = token * q_token + head * q_head + column
    k_at = token * k_token + (head - queries) * k_head + column
    v_at = token * v_token + (head - queries - keys) * v_head + column
    low = tl.load(dq + q_at, mask=inside & is_query, other=0.0).to(tl.float32)
    high = tl.load(dq + q_at + half, mask=inside & is_query, other=0.0).to(tl.float32)
    low += tl.load(dk + k_at, mask=inside & is_key, other=0.0).to(tl.float32)
    high += tl.load(dk + k_at + half, mask=inside & is_key, other=0.0).to(tl.float32)
    first = ((low * cos_low).to(kind).to(tl.float32) + (high * sin_high).to(kind).to(tl.float32)).to(kind)
    second = ((high * cos_high).to(kind).to(tl.float32) - (low * sin_low).to(kind).to(tl.float32)).to(kind)
    first = tl.where(is_value, tl.load(dv + v_at, mask=inside & is_value, other=0.0), first)
    second = tl.where(is_value, tl.load(dv + v_at + half, mask=inside & is_value, other=0.0), second)
    offsets = (token * (queries + 2 * keys) + head) * 2 * half + column
    valid = inside & (head < queries + 2 * keys)
    tl.store(out + offsets, first, mask=valid)
    tl.store(out + offsets + half, second, mask=valid)


def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, queries, width = dq.shape
    keys, half = dk.shape[1], width // 2
    out = torch.empty(tokens, (queries + 2 * keys) * width, dtype=dq.dtype, device=dq.device)
    strides = [stride for x in (dq, dk, dv) for stride in (x.stride(0), x.stride(1))]
    blocks = triton.cdiv(queries + 2 * keys, HEADS)
    _rotate_backward[(tokens, blocks)](
        dq,
        dk,
        dv,
        cos,
        sin,
        out,
        queries,
        keys,
        *strides,
        half,
        HEADS,
        triton.next_power_of_2(half),
        num_warps=4,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gate_up, lifted, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = offsets < width
    kind = lifted.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + offsets, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(gate_up + row * 2 * width + width + offsets, mask=inside, other=0.0).to(tl.float32)
    lit = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
    tl.store(lifted + row * width + offsets, (lit * right).to(kind), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    lifted = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gate[(rows, triton.cdiv(width, COLUMNS))](gate_up, lifted, width, COLUMNS, num_warps=8)
    return lifted


@triton.jit  # type: ignore[untyped-decorator]
def _gate_gradient(gate_up, d_lifted, lifted, d_gate_up, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = offsets < width
    kind = lifted.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * width + offsets, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(gate_up + row * 2 * width + width + offsets, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_lifted + row * width + offsets, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    lit = (gate * sigmoid).to(kind).to(tl.float32)
    tl.store(lifted + row * width + offsets, (lit * right).to(kind), mask=inside)
    tl.store(
        d_gate_up + row * 2 * width + offsets,
        (d * right * sigmoid * (1 + gate * (1 - sigmoid))).to(kind),
        mask=inside,
    )
    tl.store(d_gate_up + row * 2 * width + width + offsets, (d * lit).to(kind), mask=inside)


def gate_backward(gate_up: Tensor, d_lifted: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = d_lifted.shape
    lifted, d_gate_up = torch.empty_like(d_lifted), torch.empty_like(gate_up)
    _gate_gradient[(rows, triton.cdiv(width, COLUMNS))](
        gate_up, d_lifted, lifted, d_gate_up, width, COLUMNS, num_warps=8
    )
    return lifted, d_gate_up


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_rows(x, columns_scale, codes, row_scale, width, has_scale: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One row in 8 bits: its largest value first, then its codes; the second read comes from the cache."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([columns], dtype=tl.float32)
    for start in range(0, width, columns):
        offsets = start + tl.arange(0, columns)
        value = tl.load(x + row * width + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        if has_scale:
            value *= tl.load(columns_scale + offsets, mask=offsets < width, other=0.0)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest, axis=0) / 448.0, 1e-12)
    tl.store(row_scale + row, scale)
    for start in range(0, width, columns):
        offsets = start + tl.arange(0, columns)
        value = tl.load(x + row * width + offsets, mask=offsets < width, other=0.0).to(tl.float32)
        if has_scale:
            value *= tl.load(columns_scale + offsets, mask=offsets < width, other=0.0)
        value = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
        tl.store(codes + row * width + offsets, value.to(tl.float8e4nv), mask=offsets < width)


def quantize_rows(x: Tensor, columns_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, width = x.shape
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    row_scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _quantize_rows[(rows,)](
        x, row_scale if columns_scale is None else columns_scale, codes, row_scale, width,
        columns_scale is not None, min(COLUMNS, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return codes, row_scale


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, weights, losses, width, factor, cap, capped: tl.constexpr, weighted: tl.constexpr, gradient: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """One row: -log p of its target; if requested, logits are replaced by their weighted gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    target = tl.load(targets + row)
    best = tl.full([columns], -1.0e30, dtype=tl.float32)
    total = tl.zeros([columns], dtype=tl.float32)
    for start in range(0, width, columns):
        offsets = start + tl.arange(0, columns)
        value, _ = _ending(
            tl.load(logits + offsets, mask=offsets < width, other=0.0).to(tl.float32), factor, cap, capped
        )
        value = tl.where(offsets < width, value, -1.0e30)
        higher = tl.maximum(best, value)
        total = total * tl.exp(best - higher) + tl.exp(value - higher)
        best = higher
    top = tl.max(best, axis=0)
    level = top + tl.log(tl.sum(total * tl.exp(best - top), axis=0))
    target_value, _ = _ending(tl.load(logits + tl.maximum(target, 0)).to(tl.float32), factor, cap, capped)
    weight = tl.where(target >= 0, 1.0, 0.0)
    tl.store(losses + row, level - target_value)
    if gradient:
        if weighted:
            weight *= tl.load(weights + row)
        # Every thread must have read the target's logit before it is overwritten.
        tl.debug_barrier()
        for start in range(0, width, columns):
            offsets = start + tl.arange(0, columns)
            raw = tl.load(logits + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            value, slope = _ending(raw, factor, cap, capped)
            d = (tl.exp(value - level) - tl.where(offsets == target, 1.0, 0.0)) * weight * slope
            tl.store(logits + offsets, d.to(logits.dtype.element_ty), mask=offsets < width)


@triton.jit  # type: ignore[untyped-decorator]
def _ending(value, factor, cap, capped: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """A family's transformation of logits, and its derivative."""
    if capped:
        bent = 2 * tl.sigmoid(2 * value / cap) - 1
        return cap * bent, 1 - bent * bent
    return value * factor, factor + value * 0


def cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor | None, ending: LogitsEnding, *, gradient: bool
) -> Tensor:
    """-log p of each target, not weighted. With `gradient`, logits are replaced by the weighted gradient."""
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](
        logits, targets, losses if weights is None else weights, losses, width,
        ending.multiplier / ending.divisor, ending.cap or 1.0, ending.cap is not None,
        weights is not None, gradient, 2 * COLUMNS, num_warps=8,
    )  # fmt: skip
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _gather_rows(table, tokens, rows, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * columns + tl.arange(0, columns)
    token = tl.load(tokens + row)
    value = tl.load(table + token * width + offsets, mask=offsets < width)
    tl.store(rows + row * width + offsets, value, mask=offsets < width)


def gather_rows(table: Tensor, tokens: Tensor) -> Tensor:
    """Gather rows of a table that may be in pinned host memory."""
    width = table.shape[1]
    rows = torch.empty(*tokens.shape, width, dtype=table.dtype, device=tokens.device)
    grid = (tokens.numel(), triton.cdiv(width, COLUMNS))
    _gather_rows[grid](table, tokens.contiguous(), rows, width, COLUMNS, num_warps=8)
    return rows


@triton.jit  # type: ignore[untyped-decorator]
def _copy_strided(table, columns: tl.constexpr, to_half: tl.constexpr, add: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """One tile of one matrix: `target[row, column] (+)= source[row, column] · scale`, both strided."""
    entry = table + tl.program_id(0).to(tl.int64) * 9
    rows, width = tl.load(entry + 2), tl.load(entry + 3)
    first = tl.program_id(1).to(tl.int64) * columns
    if first < rows * width:
        offsets = first + tl.arange(0, columns)
        inside = offsets < rows * width
        row, column = offsets // width, offsets % width
        scale = tl.load((entry + 8).to(tl.pointer_type(tl.float64))).to(tl.float32)
        if to_half:
            source = tl.load(entry).to(tl.pointer_type(tl.float32))
            target = tl.load(entry + 1).to(tl.pointer_type(kind))
        else:
            source = tl.load(entry).to(tl.pointer_type(tl.float32))
            target = tl.load(entry + 1).to(tl.pointer_type(tl.float32))
        value = (
            tl.load(source + row * tl.load(entry + 4) + column * tl.load(entry + 5), mask=inside, other=0.0)
            * scale
        )
        pointers = target + row * tl.load(entry + 6) + column * tl.load(entry + 7)
        if add:
            value += tl.load(pointers, mask=inside, other=0.0)
        tl.store(pointers, value.to(target.dtype.element_ty), mask=inside)


class StridedCopies:
    """Many small copies between fixed tensors in one launch: float32 to half, or float32 added to float32."""

    def __init__(self, copies: Sequence[tuple[Tensor, Tensor, float]], *, add: bool) -> None:
        """(source, target, scale) of each; both have the same two dimensions."""
        self._kept = [(source, target) for source, target, _ in copies]
        entries = np.zeros((len(copies), 9), dtype=np.int64)
        for entry, (source, target, scale) in zip(entries, copies, strict=True):
            entry[:8] = [
                source.data_ptr(),
                target.data_ptr(),
                *source.shape,
                *source.stride(),
                *target.stride(),
            ]
            entry[8:].view(np.float64)[:] = scale
        self._table = torch.from_numpy(entries).to(copies[0][0].device)
        self._add = add
        self._half = copies[0][1].dtype != torch.float32
        self._kind = tl.bfloat16 if copies[0][1].dtype == torch.bfloat16 else tl.float16
        tiles = max(source.numel() for source, _, _ in copies)
        self._grid = (len(copies), triton.cdiv(tiles, COLUMNS))

    def run(self) -> None:
        _copy_strided[self._grid](self._table, COLUMNS, self._half, self._add, self._kind, num_warps=4)


def _rows_of(x: Tensor) -> tuple[int, int]:
    """How many rows each token has, and their width."""
    return (x.shape[1] if x.dim() == 3 else 1), x.shape[-1]


def _warps(columns: int) -> int:
    return max(1, min(16, columns // 256))


FlashRule = tuple[float, float, int]
"""The scale, the cap of scores (0: none), and how many tokens a token attends to, itself included."""


class _Blocks(NamedTuple):
    """A program's own queries and the keys of one iteration of its loop, or vice versa."""

    own: int
    turn: int
    warps: int = 4
    stages: int = 2


ROOMY = 160 * 1024
"""Bytes of shared memory of a block: an A100 or H200 has this much, a consumer GPU about 99 KiB."""
FEW_PROGRAMS = 264
"""Two per multiprocessor of an H200: with fewer programs, smaller blocks of keys are faster."""

Kernel = Literal["forward", "queries", "keys"]


@lru_cache
def _blocks(kernel: Kernel, width: int, programs: int, device: torch.device) -> _Blocks:
    """The fastest block sizes on an H200 that fit the shared memory of smaller GPUs (compiled for 8.6 to
    12.0). `programs`: the number with 64 queries or keys each.
    """
    shared = 0
    if device.type == "cuda":
        shared = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    if width > 128 and shared < ROOMY:
        return _Blocks(64, 32, 8) if kernel == "forward" else _Blocks(64, 16, 8)
    if width > 128:
        return {"forward": _Blocks(128, 64, 8), "queries": _Blocks(64, 64), "keys": _Blocks(32, 64)}[kernel]
    few = programs < FEW_PROGRAMS or (width > 64 and shared < ROOMY)
    return _Blocks(32, 64) if kernel == "keys" and few else _Blocks(64, 64)


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


# Annotations of a kernel are read by its compiler: only names that it knows are allowed.
@triton.jit  # type: ignore[untyped-decorator]
def _scores(q, kt, rows, keys, lowest, scale, cap, capped: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """Scores [rows, keys] in base 2, their derivative before the scale, and the mask."""
    raw = tl.dot(q, kt, input_precision="ieee")
    visible = (keys[None, :] >= lowest[:, None]) & (keys[None, :] <= rows[:, None])
    if capped:
        bent = 2 * tl.sigmoid(2 * (raw * (scale / cap))) - 1
        return bent * (cap * LOG2_E), 1 - bent * bent, visible
    return raw * (scale * LOG2_E), tl.full(raw.shape, 1.0, dtype=tl.float32), visible


@triton.jit  # type: ignore[untyped-decorator]
def _forward(q, k, v, first, mixed, sums, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some queries of one head against all keys that they attend to."""
    own_start, head = tl.program_id(0) * own, tl.program_id(1)
    rows, column = own_start + tl.arange(0, own), tl.arange(0, columns)
    in_rows, wide = rows < tokens, column < width
    row_at = rows.to(tl.int64)
    queries = tl.load(
        q + row_at[:, None] * q_token + head * q_head + column[None, :],
        mask=in_rows[:, None] & wide[None, :],
        other=0.0,
    )
    lowest = tl.maximum(tl.load(first + rows, mask=in_rows, other=tokens), rows - window + 1)
    best = tl.full([own], -1.0e30, dtype=tl.float32)
    total = tl.zeros([own], dtype=tl.float32)
    output = tl.zeros([own, columns], dtype=tl.float32)
    k += (head // shared) * k_head
    v += (head // shared) * v_head
    for start in range(tl.min(lowest, axis=0) // turn * turn, tl.minimum(own_start + own, tokens), turn):
        keys = start + tl.arange(0, turn)
        key_at, inside = keys.to(tl.int64), keys < tokens
        kt = tl.load(
            k + key_at[None, :] * k_token + column[:, None], mask=inside[None, :] & wide[:, None], other=0.0
        )
        scores, _, visible = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
        # Finite: a block of keys may have none that a row sees. What it adds there is wiped out later.
        scores = tl.where(visible, scores, -1.0e30)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        values = tl.load(
            v + key_at[:, None] * v_token + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0
        )
        total = total * shrink + tl.sum(weights, axis=1)
        output = tl.dot(weights.to(values.dtype), values, output * shrink[:, None], input_precision="ieee")
        best = higher
    tl.store(
        mixed + (row_at[:, None] * heads + head) * width + column[None, :],
        (output / total[:, None]).to(mixed.dtype.element_ty),
        mask=in_rows[:, None] & wide[None, :],
    )
    tl.store(sums + row_at * heads + head, best + tl.log2(total), mask=in_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _along(mixed, d_mixed, along, count, width, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """Row-wise sum of output times gradient."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    offsets, inside = (
        row[:, None] * width + column[None, :],
        (row < count)[:, None] & (column < width)[None, :],
    )
    product = tl.load(mixed + offsets, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(d_mixed + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(along + row, tl.sum(product, axis=1), mask=row < count)


@triton.jit  # type: ignore[untyped-decorator]
def _query_gradient(q, k, v, d_mixed, sums, along, first, dq, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some queries of one head, over all keys that they attend to."""
    own_start, head = tl.program_id(0) * own, tl.program_id(1)
    rows, column = own_start + tl.arange(0, own), tl.arange(0, columns)
    in_rows, wide = rows < tokens, column < width
    row_at = rows.to(tl.int64)
    tile = in_rows[:, None] & wide[None, :]
    queries = tl.load(q + row_at[:, None] * q_token + head * q_head + column[None, :], mask=tile, other=0.0)
    offsets = (row_at[:, None] * heads + head) * width + column[None, :]
    d_own = tl.load(d_mixed + offsets, mask=tile, other=0.0)
    total = tl.load(sums + row_at * heads + head, mask=in_rows, other=0.0)
    shift = tl.load(along + row_at * heads + head, mask=in_rows, other=0.0)
    lowest = tl.maximum(tl.load(first + rows, mask=in_rows, other=tokens), rows - window + 1)
    gradient = tl.zeros([own, columns], dtype=tl.float32)
    k += (head // shared) * k_head
    v += (head // shared) * v_head
    for start in range(tl.min(lowest, axis=0) // turn * turn, tl.minimum(own_start + own, tokens), turn):
        keys = start + tl.arange(0, turn)
        key_at, inside = keys.to(tl.int64), keys < tokens
        turned = inside[None, :] & wide[:, None]
        kt = tl.load(k + key_at[None, :] * k_token + column[:, None], mask=turned, other=0.0)
        vt = tl.load(v + key_at[None, :] * v_token + column[:, None], mask=turned, other=0.0)
        scores, slope, visible = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
        weights = tl.where(visible, tl.exp2(scores - total[:, None]), 0.0)
        d_scores = weights * (tl.dot(d_own, vt, input_precision="ieee") - shift[:, None]) * slope * scale
        gradient = tl.dot(d_scores.to(kt.dtype), tl.trans(kt), gradient, input_precision="ieee")
    tl.store(dq + offsets, gradient.to(dq.dtype.element_ty), mask=tile)


@triton.jit  # type: ignore[untyped-decorator]
def _key_gradient(q, k, v, d_mixed, sums, along, first, last, dk, dv, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some keys of one group, over all queries of all its heads that attend to them."""
    own_start, group = tl.program_id(0) * own, tl.program_id(1)
    keys, column = own_start + tl.arange(0, own), tl.arange(0, columns)
    in_keys, wide = keys < tokens, column < width
    key_at = keys.to(tl.int64)
    tile, turned = in_keys[:, None] & wide[None, :], in_keys[None, :] & wide[:, None]
    kt = tl.load(k + key_at[None, :] * k_token + group * k_head + column[:, None], mask=turned, other=0.0)
    vt = tl.load(v + key_at[None, :] * v_token + group * v_head + column[:, None], mask=turned, other=0.0)
    seen_until = tl.minimum(tl.load(last + keys, mask=in_keys, other=0), keys + window)
    end = tl.max(tl.where(in_keys, seen_until, 0), axis=0)
    d_keys = tl.zeros([own, columns], dtype=tl.float32)
    d_values = tl.zeros([own, columns], dtype=tl.float32)
    for head in range(group * shared, group * shared + shared):
        for start in range(own_start // turn * turn, end, turn):
            rows = start + tl.arange(0, turn)
            row_at, inside = rows.to(tl.int64), rows < tokens
            strip = inside[:, None] & wide[None, :]
            queries = tl.load(
                q + row_at[:, None] * q_token + head * q_head + column[None, :], mask=strip, other=0.0
            )
            d_own = tl.load(
                d_mixed + (row_at[:, None] * heads + head) * width + column[None, :], mask=strip, other=0.0
            )
            total = tl.load(sums + row_at * heads + head, mask=inside, other=0.0)
            shift = tl.load(along + row_at * heads + head, mask=inside, other=0.0)
            lowest = tl.maximum(tl.load(first + rows, mask=inside, other=tokens), rows - window + 1)
            scores, slope, visible = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
            weights = tl.where(visible & inside[:, None], tl.exp2(scores - total[:, None]), 0.0)
            d_scores = weights * (tl.dot(d_own, vt, input_precision="ieee") - shift[:, None]) * slope * scale
            d_values = tl.dot(tl.trans(weights.to(d_own.dtype)), d_own, d_values, input_precision="ieee")
            d_keys = tl.dot(tl.trans(d_scores.to(queries.dtype)), queries, d_keys, input_precision="ieee")
    groups = heads // shared
    offsets = (key_at[:, None] * groups + group) * width + column[None, :]
    tl.store(dk + offsets, d_keys.to(dk.dtype.element_ty), mask=tile)
    tl.store(dv + offsets, d_values.to(dv.dtype.element_ty), mask=tile)


def document_bounds(tokens: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the document of each token begins and ends."""
    positions = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    document = torch.searchsorted(starts, positions, right=True, out_int32=True)
    return starts[document - 1], starts[document]


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, rule: FlashRule) -> tuple[Tensor, Tensor]:
    """Attention output, and the log-sum-exp of each row."""
    tokens, heads, width = q.shape
    mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    first, _ = document_bounds(tokens, starts)
    blocks = _blocks("forward", width, triton.cdiv(tokens, 64) * heads, q.device)
    _forward[(triton.cdiv(tokens, blocks.own), heads)](
        q, k, v, first, mixed, sums, tokens, heads, heads // k.shape[1], *_strides(q, k, v),
        width, *rule, rule[1] > 0,
        blocks.own, blocks.turn, triton.next_power_of_2(width),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return mixed, sums


def attend_backward(
    saved: Sequence[Tensor], d_mixed: Tensor, rule: FlashRule
) -> tuple[Tensor, Tensor, Tensor]:
    """`saved`: the inputs and outputs of `attend`."""
    q, k, v, starts, mixed, sums = saved
    tokens, heads, width = q.shape
    groups = k.shape[1]
    d_mixed = d_mixed.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    along = torch.empty_like(sums)
    columns = triton.next_power_of_2(width)
    _along[(triton.cdiv(tokens * heads, 16),)](
        mixed, d_mixed, along, tokens * heads, width, 16, columns, num_warps=4
    )
    first, last = document_bounds(tokens, starts)
    sizes = (tokens, heads, heads // groups, *_strides(q, k, v), width, *rule, rule[1] > 0)
    blocks = _blocks("queries", width, triton.cdiv(tokens, 64) * heads, q.device)
    _query_gradient[(triton.cdiv(tokens, blocks.own), heads)](
        q, k, v, d_mixed, sums, along, first, dq, *sizes, blocks.own, blocks.turn, columns,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    blocks = _blocks("keys", width, triton.cdiv(tokens, 64) * groups, q.device)
    _key_gradient[(triton.cdiv(tokens, blocks.own), groups)](
        q, k, v, d_mixed, sums, along, first, last, dk, dv, *sizes, blocks.own, blocks.turn, columns,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    return dq, dk, dv


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in (q, k, v) for stride in (x.stride(0), x.stride(1)))
