"""One decoder block, forward and backward, written out: Llama's and those of the families with a BlockLayout.

Input: hidden states [tokens, width] and the block's weights. Output: the next hidden states, and exactly
those tensors that the plan keeps for the backward pass; or the gradient. Attention itself comes between the
pieces (attention.py). Pure functions, compiled or not.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graftwork.model.blocks import Activation, AttentionRule, pairs_to_halves
from graftwork.train.gpu import fused
from graftwork.train.gpu.fused import NormWeights
from graftwork.train.gpu.linear import (
    EightBitWeight,
    FrozenWeight,
    LoraGradient,
    LoraGroup,
    input_gradient,
    lora_gradient,
    lora_product,
    stacked_a,
    stacked_b,
    transposed_product_of_codes,
)


class BlockShape(NamedTuple):
    heads: int
    groups: int
    head_width: int
    epsilon: float
    activation: Activation = "silu"
    gated: bool = True
    parallel: bool = False
    """Attention and MLP read the same normed input, and both are added to it."""
    interleaved: bool = False
    residual: float = 1.0
    """Factor on the output of attention and MLP."""
    attention: AttentionRule = AttentionRule()
    turn: int = 0
    """Index of the decoder's rotary positions."""


class BlockWeights(NamedTuple):
    """Weights of a block. Missing norms are None: most families norm the inputs of attention and MLP, OLMo2
    their outputs, Gemma 2 and 3 both; Qwen3 norms each head's queries and keys, OLMo2 those of all heads.
    """

    before_attention: NormWeights | None
    before_mlp: NormWeights | None
    after_attention: NormWeights | None
    after_mlp: NormWeights | None
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    qkv: FrozenWeight
    out: FrozenWeight
    gate_up: FrozenWeight
    down: FrozenWeight
    qkv_graft: LoraGroup
    out_graft: LoraGroup
    gate_up_graft: LoraGroup
    down_graft: LoraGroup


def norm_if(x: Tensor, norm: NormWeights | None, epsilon: float) -> Tensor:
    return x if norm is None else fused.apply_norm(x, norm, epsilon)


def norm_if_backward(
    dy: Tensor, x: Tensor | None, norm: NormWeights | None, epsilon: float, add: Tensor | None = None
) -> Tensor:
    if norm is None or x is None:
        return dy if add is None else add + dy
    return fused.apply_norm_backward(dy, x, norm, epsilon, add)


def _wide(heads: Tensor, norm: NormWeights) -> Tensor:
    """Heads in the layout of their norm: separately, or all of a token at once."""
    return heads if norm.weight.numel() == heads.shape[-1] else heads.reshape(heads.shape[0], -1)


def before_attention(
    x: Tensor, cos: Tensor, sin: Tensor, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Queries, keys, values; the thin product; and heads before their norm, if they have one."""
    qkv, low = lora_product(w.qkv, w.qkv_graft, norm_if(x, w.before_attention, shape.epsilon))
    q, k, v = _split(qkv, shape)
    raw = None
    if w.query_norm is not None and w.key_norm is not None:
        raw = qkv[:, : (shape.heads + shape.groups) * shape.head_width].contiguous()
        q = fused.apply_norm(_wide(q, w.query_norm), w.query_norm, shape.epsilon).view(q.shape)
        k = fused.apply_norm(_wide(k, w.key_norm), w.key_norm, shape.epsilon).view(k.shape)
    if shape.interleaved:
        q, k = pairs_to_halves(q), pairs_to_halves(k)
    return *fused.rotate(q, k, v, cos, sin), low, raw


def _halves_to_pairs(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def _heads_in_pairs(dqkv: Tensor, shape: BlockShape) -> Tensor:
    dq, dk, dv = _split(dqkv, shape)
    turned = (_halves_to_pairs(dq), _halves_to_pairs(dk), dv)
    return torch.cat([part.reshape(dqkv.shape[0], -1) for part in turned], dim=1)


def before_attention_backward(
    d_heads: tuple[Tensor, Tensor, Tensor],
    dx2: Tensor,
    saved: tuple[Tensor, Tensor | None, Tensor | None],
    rotary: tuple[Tensor, Tensor],
    w: BlockWeights,
    shape: BlockShape,
    wants_input: bool,
) -> tuple[Tensor | None, LoraGradient]:
    """`saved` are the block's input, the thin product, and what heads were before their norm."""
    x, low, raw = saved
    tokens = x.shape[0]
    dqkv = fused.rotate_backward(*d_heads, *rotary)
    if shape.interleaved:
        dqkv = _heads_in_pairs(dqkv, shape)
    if raw is not None and w.query_norm is not None and w.key_norm is not None:
        heads, (dq, dk, dv) = raw.view(tokens, -1, shape.head_width), _split(dqkv, shape)
        q, k = _wide(heads[:, : shape.heads], w.query_norm), _wide(heads[:, shape.heads :], w.key_norm)
        dq = fused.apply_norm_backward(dq.reshape(q.shape), q, w.query_norm, shape.epsilon)
        dk = fused.apply_norm_backward(dk.reshape(k.shape), k, w.key_norm, shape.epsilon)
        dqkv = torch.cat((dq.reshape(tokens, -1), dk.reshape(tokens, -1), dv.reshape(tokens, -1)), dim=1)
    normed = norm_if(x, w.before_attention, shape.epsilon)
    if not wants_input:
        dlow = dqkv @ stacked_b(w.qkv_graft, dqkv.dtype) if w.qkv_graft.a else None
        return None, lora_gradient(w.qkv_graft, normed, low, dqkv, dlow)
    dn, dlow = input_gradient(w.qkv, w.qkv_graft, dqkv)
    dx = norm_if_backward(dn, x, w.before_attention, shape.epsilon, dx2)
    return dx, lora_gradient(w.qkv_graft, normed, low, dqkv, dlow)


class SavedActivations(NamedTuple):
    """Tensors that the second half saves for its backward pass; `gate_up` is None if it is recomputed."""

    middle: Tensor
    gate_up: Tensor | None
    low_out: Tensor | None
    low_gate_up: Tensor | None
    attended: Tensor | None
    """Input of a norm after attention, and below it that of one after the MLP."""
    added: Tensor | None


def after_attention(
    x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, SavedActivations]:
    """The rest of the block: output product, norms, MLP, both residual sums."""
    saved, start = _middle(x, mixed, w, shape)
    added = _added(saved, w, shape)
    y = start + norm_if(added, w.after_mlp, shape.epsilon)
    return y, saved if w.after_mlp is None else saved._replace(added=added)


def recompute_activations(x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape) -> SavedActivations:
    """Recompute what the backward pass needs of the second half; its last product only if that is normed."""
    saved, _ = _middle(x, mixed, w, shape)
    return saved if w.after_mlp is None else saved._replace(added=_added(saved, w, shape))


def _middle(x: Tensor, mixed: Tensor, w: BlockWeights, shape: BlockShape) -> tuple[SavedActivations, Tensor]:
    """The saved tensors, and the tensor that the MLP's output is added to."""
    attended, low_out = lora_product(w.out, w.out_graft, mixed)
    if shape.residual != 1:
        attended.mul_(shape.residual)
    start = None
    if shape.parallel:
        middle, start = x, x + attended
        normed = norm_if(x, w.before_mlp, shape.epsilon)
    elif w.after_attention is None and w.before_mlp is not None and not w.before_mlp.centered:
        middle, normed = fused.add_norm(x, attended, w.before_mlp.weight, shape.epsilon)
    else:
        middle = x + norm_if(attended, w.after_attention, shape.epsilon)
        normed = norm_if(middle, w.before_mlp, shape.epsilon)
    gate_up, low = lora_product(w.gate_up, w.gate_up_graft, normed)
    saved = SavedActivations(
        middle, gate_up, low_out, low, None if w.after_attention is None else attended, None
    )
    return saved, middle if start is None else start


def _added(saved: SavedActivations, w: BlockWeights, shape: BlockShape) -> Tensor:
    assert saved.gate_up is not None
    lifted = fused.activate(saved.gate_up, shape.activation, gated=shape.gated)
    added = lora_product(w.down, w.down_graft, lifted)[0]
    return added if shape.residual == 1 else added.mul_(shape.residual)


def after_attention_backward(
    dy: Tensor, mixed: Tensor, saved: SavedActivations, w: BlockWeights, shape: BlockShape
) -> tuple[Tensor, Tensor, tuple[LoraGradient, LoraGradient, LoraGradient]]:
    """Gradients of the attention's output, of the residual stream, and of the adapters in order."""
    normed = norm_if(saved.middle, w.before_mlp, shape.epsilon)
    gate_up = saved.gate_up
    if gate_up is None:
        gate_up, _ = lora_product(w.gate_up, w.gate_up_graft, normed)
    d_added = norm_if_backward(dy, saved.added, w.after_mlp, shape.epsilon)
    d_added = d_added if shape.residual == 1 else d_added * shape.residual
    d_lifted, d_low_down = input_gradient(w.down, w.down_graft, d_added)
    lifted, d_gate_up, dn = _activate_backward(gate_up, d_lifted, w.gate_up, shape)
    low_down = lifted @ stacked_a(w.down_graft, dy.dtype).t() if w.down_graft.a else None
    dn, d_low = input_gradient(w.gate_up, w.gate_up_graft, d_gate_up, dn)
    d_middle = norm_if_backward(dn, saved.middle, w.before_mlp, shape.epsilon, dy)
    reached = dy if shape.parallel else d_middle
    d_attended = norm_if_backward(reached, saved.attended, w.after_attention, shape.epsilon)
    d_attended = d_attended if shape.residual == 1 else d_attended * shape.residual
    d_mixed, d_low_out = input_gradient(w.out, w.out_graft, d_attended)
    gradients = (
        lora_gradient(w.out_graft, mixed, saved.low_out, d_attended, d_low_out),
        lora_gradient(w.gate_up_graft, normed, saved.low_gate_up, d_gate_up, d_low),
        lora_gradient(w.down_graft, lifted, low_down, d_added, d_low_down),
    )
    return d_mixed, d_middle, gradients


def _activate_backward(
    gate_up: Tensor, d_lifted: Tensor, frozen: FrozenWeight, shape: BlockShape
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Recompute the MLP's inner activation; return the gradient of its input, and its product with an 8-bit
    weight.
    """
    if shape.activation != "silu" or not shape.gated:
        return *fused.activate_backward(gate_up, d_lifted, shape.activation, gated=shape.gated), None
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
