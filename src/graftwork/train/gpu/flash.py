"""Attention of packed documents as Triton kernels, with or without a window and a cap of the scores.

In: queries [tokens, heads, width], keys and values [tokens, groups, width], and for each token where its
document begins and ends. Out: mixed values and the logarithm of each row's sum, or gradients. Scores are
never in memory. No atomic sums: a gradient is added up by one program in one order, so the same input gives
the same bytes. Only imported where there is a GPU; `attention.py` has the same in plain PyTorch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

FlashRule = tuple[float, float, int]
"""The scale, the cap of scores (0: none), and how many tokens a token sees, its own included."""


class _Blocks(NamedTuple):
    """A program's own queries and the keys of one turn of its loop, or the other way round."""

    own: int
    turn: int
    warps: int = 4
    stages: int = 2


ROOMY = 160 * 1024
"""Bytes of shared memory of a block: an A100 or H200 has as much, a consumer's card about 99 KiB."""
FEW_PROGRAMS = 264
"""Two for each processor of an H200: with fewer, smaller blocks of keys are faster."""

Kernel = Literal["forward", "queries", "keys"]


@lru_cache
def _blocks(kernel: Kernel, width: int, programs: int, device: torch.device) -> _Blocks:
    """What was fastest on an H200, and fits the shared memory of smaller cards (compiled for 8.6 to 12.0).

    `programs`: how many there would be with 64 queries or keys each.
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
    """Scores [rows, keys] as powers of two, their slope before the scale, and which of them count."""
    raw = tl.dot(q, kt, input_precision="ieee")
    seen = (keys[None, :] >= lowest[:, None]) & (keys[None, :] <= rows[:, None])
    if capped:
        bent = 2 * tl.sigmoid(2 * (raw * (scale / cap))) - 1
        return bent * (cap * LOG2_E), 1 - bent * bent, seen
    return raw * (scale * LOG2_E), tl.full(raw.shape, 1.0, dtype=tl.float32), seen


@triton.jit  # type: ignore[untyped-decorator]
def _forward(q, k, v, first, mixed, sums, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some queries of one head against all keys that they see."""
    begin, head = tl.program_id(0) * own, tl.program_id(1)
    rows, column = begin + tl.arange(0, own), tl.arange(0, columns)
    there, wide = rows < tokens, column < width
    row_at = rows.to(tl.int64)
    queries = tl.load(
        q + row_at[:, None] * q_token + head * q_head + column[None, :],
        mask=there[:, None] & wide[None, :],
        other=0.0,
    )
    lowest = tl.maximum(tl.load(first + rows, mask=there, other=tokens), rows - window + 1)
    best = tl.full([own], -1.0e30, dtype=tl.float32)
    total = tl.zeros([own], dtype=tl.float32)
    found = tl.zeros([own, columns], dtype=tl.float32)
    k += (head // shared) * k_head
    v += (head // shared) * v_head
    for start in range(tl.min(lowest, axis=0) // turn * turn, tl.minimum(begin + own, tokens), turn):
        keys = start + tl.arange(0, turn)
        at, inside = keys.to(tl.int64), keys < tokens
        kt = tl.load(
            k + at[None, :] * k_token + column[:, None], mask=inside[None, :] & wide[:, None], other=0.0
        )
        scores, _, seen = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
        # Finite: a block of keys may have none that a row sees. What it adds there is wiped out later.
        scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(best, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        values = tl.load(
            v + at[:, None] * v_token + column[None, :], mask=inside[:, None] & wide[None, :], other=0.0
        )
        total = total * shrink + tl.sum(weights, axis=1)
        found = tl.dot(weights.to(values.dtype), values, found * shrink[:, None], input_precision="ieee")
        best = higher
    tl.store(
        mixed + (row_at[:, None] * heads + head) * width + column[None, :],
        (found / total[:, None]).to(mixed.dtype.element_ty),
        mask=there[:, None] & wide[None, :],
    )
    tl.store(sums + row_at * heads + head, best + tl.log2(total), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _along(mixed, d_mixed, along, count, width, rows: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  # fmt: skip
    """What the gradient of each row has along the row itself."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    at, inside = row[:, None] * width + column[None, :], (row < count)[:, None] & (column < width)[None, :]
    product = tl.load(mixed + at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(d_mixed + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(along + row, tl.sum(product, axis=1), mask=row < count)


@triton.jit  # type: ignore[untyped-decorator]
def _query_gradient(q, k, v, d_mixed, sums, along, first, dq, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some queries of one head, over all keys that they see."""
    begin, head = tl.program_id(0) * own, tl.program_id(1)
    rows, column = begin + tl.arange(0, own), tl.arange(0, columns)
    there, wide = rows < tokens, column < width
    row_at = rows.to(tl.int64)
    tile = there[:, None] & wide[None, :]
    queries = tl.load(q + row_at[:, None] * q_token + head * q_head + column[None, :], mask=tile, other=0.0)
    place = (row_at[:, None] * heads + head) * width + column[None, :]
    d_own = tl.load(d_mixed + place, mask=tile, other=0.0)
    total = tl.load(sums + row_at * heads + head, mask=there, other=0.0)
    shift = tl.load(along + row_at * heads + head, mask=there, other=0.0)
    lowest = tl.maximum(tl.load(first + rows, mask=there, other=tokens), rows - window + 1)
    found = tl.zeros([own, columns], dtype=tl.float32)
    k += (head // shared) * k_head
    v += (head // shared) * v_head
    for start in range(tl.min(lowest, axis=0) // turn * turn, tl.minimum(begin + own, tokens), turn):
        keys = start + tl.arange(0, turn)
        at, inside = keys.to(tl.int64), keys < tokens
        turned = inside[None, :] & wide[:, None]
        kt = tl.load(k + at[None, :] * k_token + column[:, None], mask=turned, other=0.0)
        vt = tl.load(v + at[None, :] * v_token + column[:, None], mask=turned, other=0.0)
        scores, slope, seen = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
        weights = tl.where(seen, tl.exp2(scores - total[:, None]), 0.0)
        d_scores = weights * (tl.dot(d_own, vt, input_precision="ieee") - shift[:, None]) * slope * scale
        found = tl.dot(d_scores.to(kt.dtype), tl.trans(kt), found, input_precision="ieee")
    tl.store(dq + place, found.to(dq.dtype.element_ty), mask=tile)


@triton.jit  # type: ignore[untyped-decorator]
def _key_gradient(q, k, v, d_mixed, sums, along, first, last, dk, dv, tokens, heads, shared, q_token, q_head, k_token, k_head, v_token, v_head, width, scale, cap, window, capped: tl.constexpr, own: tl.constexpr, turn: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some keys of one group, over all queries of all its heads that see them."""
    begin, group = tl.program_id(0) * own, tl.program_id(1)
    keys, column = begin + tl.arange(0, own), tl.arange(0, columns)
    there, wide = keys < tokens, column < width
    at = keys.to(tl.int64)
    tile, turned = there[:, None] & wide[None, :], there[None, :] & wide[:, None]
    kt = tl.load(k + at[None, :] * k_token + group * k_head + column[:, None], mask=turned, other=0.0)
    vt = tl.load(v + at[None, :] * v_token + group * v_head + column[:, None], mask=turned, other=0.0)
    seen_until = tl.minimum(tl.load(last + keys, mask=there, other=0), keys + window)
    end = tl.max(tl.where(there, seen_until, 0), axis=0)
    d_keys = tl.zeros([own, columns], dtype=tl.float32)
    d_values = tl.zeros([own, columns], dtype=tl.float32)
    for head in range(group * shared, group * shared + shared):
        for start in range(begin // turn * turn, end, turn):
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
            scores, slope, seen = _scores(queries, kt, rows, keys, lowest, scale, cap, capped)
            weights = tl.where(seen & inside[:, None], tl.exp2(scores - total[:, None]), 0.0)
            d_scores = weights * (tl.dot(d_own, vt, input_precision="ieee") - shift[:, None]) * slope * scale
            d_values = tl.dot(tl.trans(weights.to(d_own.dtype)), d_own, d_values, input_precision="ieee")
            d_keys = tl.dot(tl.trans(d_scores.to(queries.dtype)), queries, d_keys, input_precision="ieee")
    groups = heads // shared
    place = (at[:, None] * groups + group) * width + column[None, :]
    tl.store(dk + place, d_keys.to(dk.dtype.element_ty), mask=tile)
    tl.store(dv + place, d_values.to(dv.dtype.element_ty), mask=tile)


def document_bounds(tokens: int, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token, where its document begins and ends."""
    places = torch.arange(tokens, device=starts.device, dtype=starts.dtype)
    document = torch.searchsorted(starts, places, right=True, out_int32=True)
    return starts[document - 1], starts[document]


def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, rule: FlashRule) -> tuple[Tensor, Tensor]:
    """Mixed values, and the logarithm of each row's sum."""
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
    """`saved`: what went into `attend`, and what came out."""
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
    own = _blocks("queries", width, triton.cdiv(tokens, 64) * heads, q.device)
    _query_gradient[(triton.cdiv(tokens, own.own), heads)](
        q, k, v, d_mixed, sums, along, first, dq, *sizes, own.own, own.turn, columns,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    own = _blocks("keys", width, triton.cdiv(tokens, 64) * groups, q.device)
    _key_gradient[(triton.cdiv(tokens, own.own), groups)](
        q, k, v, d_mixed, sums, along, first, last, dk, dv, *sizes, own.own, own.turn, columns,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
    return dq, dk, dv


def _strides(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    return tuple(stride for x in (q, k, v) for stride in (x.stride(0), x.stride(1)))
