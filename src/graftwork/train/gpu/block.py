"""One decoder block, forward and backward, written out: Llama, Qwen2, Qwen3, Mistral, OLMo2 and their kin.

In: hidden states [tokens, width] and the block's weights. Out: the next hidden states, and exactly
those tensors that the plan keeps for the backward pass; or the gradient. Attention itself stands
between the pieces, because it is a kernel of its own. Pure functions, compiled or not.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

from graftwork.train.gpu.quantized import (
    EightBitWeight,
    FrozenWeight,
    product,
    transposed_product,
    transposed_product_of_codes,
)


class LoraGroup(NamedTuple):
    """Adapters beside one frozen product. Empty tuples where nothing is adapted."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]
    outs: tuple[int, ...]
    """Output widths of the layers side by side, also of those without an adapter (their b is absent)."""
    places: tuple[int, ...]
    """Which of the layers each adapter belongs to."""


class LoraGradient(NamedTuple):
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


def stacked_a(graft: LoraGroup, dtype: torch.dtype) -> Tensor:
    return torch.cat([a.to(dtype) for a in graft.a])


def stacked_b(graft: LoraGroup, dtype: torch.dtype) -> Tensor:
    """[all outputs, all ranks], zero where an output does not belong to the rank's layer."""
    ranks = [b.shape[1] for b in graft.b]
    strips = []
    for place, out in enumerate(graft.outs):
        blocks = []
        for at, rank in enumerate(ranks):
            if graft.places[at] == place:
                blocks.append((graft.b[at] * graft.scales[at]).to(dtype))
            else:
                blocks.append(torch.zeros(out, rank, dtype=dtype, device=graft.b[at].device))
        strips.append(torch.cat(blocks, dim=1))
    return torch.cat(strips)


@torch.library.custom_op("graftwork::add_thin", mutates_args={"y"})
def add_thin(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left right, in place: a plain `addmm` in a compiled function copies y first."""
    y.addmm_(left, right)


def lora_product(frozen: FrozenWeight, graft: LoraGroup, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ + s (x Aᵀ) Bᵀ, and x Aᵀ, which the backward pass wants again."""
    y = product(frozen, x)
    if not graft.a:
        return y, None
    low = x @ stacked_a(graft, x.dtype).t()
    add_thin(y, low, stacked_b(graft, x.dtype).t())
    return y, low


def input_gradient(
    frozen: FrozenWeight, graft: LoraGroup, dy: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input, and of x Aᵀ. `base` is dy W where somebody has computed it already."""
    dx = transposed_product(frozen, dy) if base is None else base
    if not graft.a:
        return dx, None
    dlow = dy @ stacked_b(graft, dy.dtype)
    add_thin(dx, dlow, stacked_a(graft, dy.dtype))
    return dx, dlow


def thin_gradient(graft: LoraGroup, dy: Tensor) -> Tensor | None:
    """The gradient of x Aᵀ alone, for a block below which nobody asks."""
    return dy @ stacked_b(graft, dy.dtype) if graft.a else None


def lora_gradient(
    graft: LoraGroup, x: Tensor, low: Tensor | None, dy: Tensor, dlow: Tensor | None
) -> LoraGradient:
    """The gradient of A and B."""
    if low is None or dlow is None:
        return LoraGradient((), ())
    return _gradient(graft, dlow.t() @ x, low.t() @ dy)


def _gradient(graft: LoraGroup, da: Tensor, db: Tensor) -> LoraGradient:
    """Cut the stacked gradients into those of each layer."""
    starts = [sum(graft.outs[:place]) for place in range(len(graft.outs))]
    ga, gb, at = [], [], 0
    for number, b in enumerate(graft.b):
        rank, begin = b.shape[1], starts[graft.places[number]]
        end = begin + graft.outs[graft.places[number]]
        ga.append(da[at : at + rank].float().contiguous())
        gb.append((db[at : at + rank, begin:end].t().float() * graft.scales[number]).contiguous())
        at += rank
    return LoraGradient(tuple(ga), tuple(gb))


class BlockShape(NamedTuple):
    heads: int
    groups: int
    head_width: int
    epsilon: float


class BlockWeights(NamedTuple):
    """What a block holds. Norms that a family has not are absent: most norm what goes into attention and
    MLP, OLMo2 what comes out of them; Qwen3 norms each head's queries and keys, OLMo2 those of all heads."""

    before_attention: Tensor | None
    before_mlp: Tensor | None
    after_attention: Tensor | None
    after_mlp: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: FrozenWeight
    out: FrozenWeight
    gate_up: FrozenWeight
    down: FrozenWeight
    qkv_graft: LoraGroup
    out_graft: LoraGroup
    gate_up_graft: LoraGroup
    down_graft: LoraGroup


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    even = wide * inverse
    d = dy.float() * weight.float()
    return (inverse * (d - even * (d * even).mean(-1, keepdim=True))).to(dy.dtype)


def norm_if(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return x if weight is None else norm(x, weight, epsilon)


def norm_if_backward(dy: Tensor, x: Tensor | None, weight: Tensor | None, epsilon: float) -> Tensor:
    return dy if weight is None or x is None else norm_backward(dy, x, weight, epsilon)


def _wide(heads: Tensor, weight: Tensor) -> Tensor:
    """Heads as their norm sees them: each by itself, or all of a token at once."""
    return heads if weight.numel() == heads.shape[-1] else heads.reshape(heads.shape[0], -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; x is [tokens, heads, width]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def rotate_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = dy.shape[-1] // 2
    d = dy * sin[:, None]
    return dy * cos[:, None] + torch.cat((d[..., half:], -d[..., :half]), dim=-1)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, keys, values; the thin product; and what heads were before their norm, where they have one."""
    qkv, low = lora_product(w.qkv, w.qkv_graft, norm_if(x, w.before_attention, shape.epsilon))
    q, k, v = _split(qkv, shape)
    raw = None
    if w.query_norm is not None and w.key_norm is not None:
        raw = qkv[:, : (shape.heads + shape.groups) * shape.head_width].contiguous()
        q = norm(_wide(q, w.query_norm), w.query_norm, shape.epsilon).view(q.shape)
        k = norm(_wide(k, w.key_norm), w.key_norm, shape.epsilon).view(k.shape)
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous(), low, raw


def before_attention_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dx2: Tensor,
    x: Tensor,
    low: Tensor | None,
    raw: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    w: BlockWeights,
    shape: BlockShape,
    wants_input: bool,
) -> tuple[Tensor | None, LoraGradient]:
    tokens = x.shape[0]
    dq, dk = rotate_backward(dq, cos, sin), rotate_backward(dk, cos, sin)
    if raw is not None and w.query_norm is not None and w.key_norm is not None:
        heads = raw.view(tokens, -1, shape.head_width)
        q, k = _wide(heads[:, : shape.heads], w.query_norm), _wide(heads[:, shape.heads :], w.key_norm)
        dq = norm_backward(dq.reshape(q.shape), q, w.query_norm, shape.epsilon)
        dk = norm_backward(dk.reshape(k.shape), k, w.key_norm, shape.epsilon)
    dqkv = torch.cat((dq.reshape(tokens, -1), dk.reshape(tokens, -1), dv.reshape(tokens, -1)), dim=1)
    normed = norm_if(x, w.before_attention, shape.epsilon)
    if not wants_input:
        return None, lora_gradient(w.qkv_graft, normed, low, dqkv, thin_gradient(w.qkv_graft, dqkv))
    dn, dlow = input_gradient(w.qkv, w.qkv_graft, dqkv)
    dx = dx2 + norm_if_backward(dn, x, w.before_attention, shape.epsilon)
    return dx, lora_gradient(w.qkv_graft, normed, low, dqkv, dlow)


class SavedActivations(NamedTuple):
    """What the second half keeps for its backward pass; `gate_up` is absent where it is computed again."""

    middle: Tensor
    gate_up: Tensor | None
    low_out: Tensor | None
    low_gate_up: Tensor | None
    attended: Tensor | None
    """What a norm behind attention normed, and below what one behind the MLP did."""
    added: Tensor | None


def after_attention(
    x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, SavedActivations]:
    """The rest of the block: output product, norm, gated MLP, both residual sums."""
    kept = _middle(x, mixed, w, shape)
    added = _added(kept, w)
    y = kept.middle + norm_if(added, w.after_mlp, shape.epsilon)
    return y, kept if w.after_mlp is None else kept._replace(added=added)


def recompute_activations(x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape) -> SavedActivations:
    """What the backward pass needs of the second half; its last product only where that is normed."""
    kept = _middle(x, mixed, w, shape)
    return kept if w.after_mlp is None else kept._replace(added=_added(kept, w))


def _middle(x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape) -> SavedActivations:
    attended, low_out = lora_product(w.out, w.out_graft, mixed)
    middle = x + norm_if(attended, w.after_attention, shape.epsilon)
    normed = norm_if(middle, w.before_mlp, shape.epsilon)
    gate_up, low = lora_product(w.gate_up, w.gate_up_graft, normed)
    return SavedActivations(
        middle, gate_up, low_out, low, None if w.after_attention is None else attended, None
    )


def _added(kept: SavedActivations, w: BlockWeights) -> Tensor:
    assert kept.gate_up is not None
    gate, up = kept.gate_up.chunk(2, dim=1)
    return lora_product(w.down, w.down_graft, silu(gate) * up)[0]


class HalfGradient(NamedTuple):
    out: LoraGradient
    gate_up: LoraGradient
    down: LoraGradient


def after_attention_backward(
    dy: Tensor, mixed: Tensor, kept: SavedActivations, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, Tensor, HalfGradient]:
    """Gradients of the attention's output, of the residual stream, and of the adapters."""
    normed = norm_if(kept.middle, w.before_mlp, shape.epsilon)
    gate_up = kept.gate_up
    if gate_up is None:
        gate_up, _ = lora_product(w.gate_up, w.gate_up_graft, normed)
    d_added = norm_if_backward(dy, kept.added, w.after_mlp, shape.epsilon)
    d_lifted, d_low_down = input_gradient(w.down, w.down_graft, d_added)
    lifted, d_gate_up, dn = _gate_backward(gate_up, d_lifted, w.gate_up)
    low_down = lifted @ stacked_a(w.down_graft, dy.dtype).t() if w.down_graft.a else None
    dn, d_low = input_gradient(w.gate_up, w.gate_up_graft, d_gate_up, dn)
    d_middle = dy + norm_if_backward(dn, kept.middle, w.before_mlp, shape.epsilon)
    d_attended = norm_if_backward(d_middle, kept.attended, w.after_attention, shape.epsilon)
    d_mixed, d_low_out = input_gradient(w.out, w.out_graft, d_attended)
    gradient = HalfGradient(
        out=lora_gradient(w.out_graft, mixed, kept.low_out, d_attended, d_low_out),
        gate_up=lora_gradient(w.gate_up_graft, normed, kept.low_gate_up, d_gate_up, d_low),
        down=lora_gradient(w.down_graft, lifted, low_down, d_added, d_low_down),
    )
    return d_mixed, d_middle, gradient


def _gate_backward(
    gate_up: Tensor, d_lifted: Tensor, frozen: FrozenWeight
) -> tuple[Tensor, Tensor, Tensor | None]:
    """silu(gate) · up again, the gradient of both, and what that gives through an 8-bit weight."""
    if (
        isinstance(frozen, EightBitWeight)
        and gate_up.device.type == "cuda"
        and gate_up.dtype == torch.bfloat16
    ):
        from graftwork.train.gpu.kernels import gate_backward_eight

        lifted, d_gate_up, codes, scale = gate_backward_eight(gate_up, d_lifted, frozen.scale.view(-1))
        return lifted, d_gate_up, transposed_product_of_codes(frozen, codes, scale, gate_up.dtype)
    gate, up = gate_up.chunk(2, dim=1)
    # The activation is rounded as in the forward pass.
    lit = silu(gate)
    sigmoid = torch.sigmoid(gate.float())
    slope = sigmoid * (1 + gate.float() * (1 - sigmoid))
    d_gate = (d_lifted.float() * up.float() * slope).to(gate_up.dtype)
    return lit * up, torch.cat((d_gate, d_lifted * lit), dim=1), None


def _split(qkv: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.view(qkv.shape[0], -1, shape.head_width)
    q = heads[:, : shape.heads]
    k = heads[:, shape.heads : shape.heads + shape.groups]
    return q, k, heads[:, shape.heads + shape.groups :]


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
