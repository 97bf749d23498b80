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
from torch.nn.functional import scaled_dot_product_attention

from graftwork.train.gpu import fused
from graftwork.train.gpu.lora import (
    LoraGradient,
    LoraGroup,
    input_gradient,
    lora_gradient,
    lora_product,
    stacked_a,
    thin_gradient,
)
from graftwork.train.gpu.quantized import (
    EightBitWeight,
    FrozenWeight,
    transposed_product_of_codes,
)


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


def norm_if(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return x if weight is None else fused.norm(x, weight, epsilon)


def norm_if_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor | None, epsilon: float, add: Tensor | None = None
) -> Tensor:
    if weight is None or x is None:
        return dy if add is None else add + dy
    return fused.norm_backward(dy, x, weight, epsilon, add)


def _wide(heads: Tensor, weight: Tensor) -> Tensor:
    """Heads as their norm sees them: each by itself, or all of a token at once."""
    return heads if weight.numel() == heads.shape[-1] else heads.reshape(heads.shape[0], -1)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, keys, values; the thin product; and what heads were before their norm, where they have one."""
    qkv, low = lora_product(w.qkv, w.qkv_graft, norm_if(x, w.before_attention, shape.epsilon))
    q, k, v = _split(qkv, shape)
    raw = None
    if w.query_norm is not None and w.key_norm is not None:
        raw = qkv[:, : (shape.heads + shape.groups) * shape.head_width].contiguous()
        q = fused.norm(_wide(q, w.query_norm), w.query_norm, shape.epsilon).view(q.shape)
        k = fused.norm(_wide(k, w.key_norm), w.key_norm, shape.epsilon).view(k.shape)
    return *fused.rotate(q, k, v, cos, sin), low, raw


class SavedInput(NamedTuple):
    """What the first half keeps for its backward pass; `raw` are heads before their norm."""

    x: Tensor
    low: Tensor | None
    raw: Tensor | None


def before_attention_backward(
    d_heads: tuple[Tensor, Tensor, Tensor],
    dx2: Tensor,
    kept: SavedInput,
    rotary: tuple[Tensor, Tensor],
    w: BlockWeights,
    shape: BlockShape,
    wants_input: bool,
) -> tuple[Tensor | None, LoraGradient]:
    x, low, raw = kept
    tokens = x.shape[0]
    dqkv = fused.rotate_backward(*d_heads, *rotary)
    if raw is not None and w.query_norm is not None and w.key_norm is not None:
        heads, (dq, dk, dv) = raw.view(tokens, -1, shape.head_width), _split(dqkv, shape)
        q, k = _wide(heads[:, : shape.heads], w.query_norm), _wide(heads[:, shape.heads :], w.key_norm)
        dq = fused.norm_backward(dq.reshape(q.shape), q, w.query_norm, shape.epsilon)
        dk = fused.norm_backward(dk.reshape(k.shape), k, w.key_norm, shape.epsilon)
        dqkv = torch.cat((dq.reshape(tokens, -1), dk.reshape(tokens, -1), dv.reshape(tokens, -1)), dim=1)
    normed = norm_if(x, w.before_attention, shape.epsilon)
    if not wants_input:
        return None, lora_gradient(w.qkv_graft, normed, low, dqkv, thin_gradient(w.qkv_graft, dqkv))
    dn, dlow = input_gradient(w.qkv, w.qkv_graft, dqkv)
    dx = norm_if_backward(dn, x, w.before_attention, shape.epsilon, dx2)
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
    if w.after_attention is None and w.before_mlp is not None:
        middle, normed = fused.add_norm(x, attended, w.before_mlp, shape.epsilon)
    else:
        middle = x + norm_if(attended, w.after_attention, shape.epsilon)
        normed = norm_if(middle, w.before_mlp, shape.epsilon)
    gate_up, low = lora_product(w.gate_up, w.gate_up_graft, normed)
    return SavedActivations(
        middle, gate_up, low_out, low, None if w.after_attention is None else attended, None
    )


def _added(kept: SavedActivations, w: BlockWeights) -> Tensor:
    assert kept.gate_up is not None
    return lora_product(w.down, w.down_graft, fused.gate(kept.gate_up))[0]


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
    d_middle = norm_if_backward(dn, kept.middle, w.before_mlp, shape.epsilon, dy)
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
    return *fused.gate_backward(gate_up, d_lifted), None


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

    # Since 2.12 the caller must say that heads share keys; before, the argument is unknown.
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _words_of(varlen_attn) else {}
    starts, longest = documents.starts, documents.longest
    mixed: Tensor = varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)  # type: ignore[assignment, arg-type]
    return mixed


@lru_cache
def _words_of(function: Callable[..., object]) -> frozenset[str]:
    return frozenset(signature(function).parameters)


def _kernels(q: Tensor) -> AbstractContextManager[None]:
    """cuDNN's attention is the fastest on recent cards; the others are fallbacks."""
    order = [
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    ]
    if q.device.type != "cuda" or q.dtype == torch.float32:
        order = order[1:]
    return sdpa_kernel(order, set_priority=True)
