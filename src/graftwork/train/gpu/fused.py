"""Fused pieces of a training step, the loss too: each is one launch where PyTorch takes five to fifteen.

Input: tensors. Output: the same numbers as the plain functions, which run on a CPU and are the reference in
the tests; on a GPU a Triton kernel runs instead. Each piece is a custom operator, so that on both devices a
step's memory holds its results and no intermediates. Compiled steps use the plain functions, which the
compiler fuses by itself.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import silu

from graftwork.model import blocks
from graftwork.model.blocks import Activation
from graftwork.model.parts import LogitsEnding
from graftwork.train.loss import loss_and_gradient, token_losses


class NormWeights(NamedTuple):
    """RMS norm; `centered`: of mean and variance, perhaps with a bias."""

    weight: Tensor
    bias: Tensor | None = None
    centered: bool = False


def apply_norm(x: Tensor, norm_weights: NormWeights, epsilon: float) -> Tensor:
    if not norm_weights.centered:
        return norm(x, norm_weights.weight, epsilon)
    return _centered(x, norm_weights, epsilon)[0]


def apply_norm_backward(
    dy: Tensor, x: Tensor, norm_weights: NormWeights, epsilon: float, add: Tensor | None = None
) -> Tensor:
    if not norm_weights.centered:
        return norm_backward(dy, x, norm_weights.weight, epsilon, add)
    _, mean, inverse = _centered(x, norm_weights, epsilon)
    dx, _, _ = torch.ops.aten.native_layer_norm_backward(
        dy, x, x.shape[-1:], mean, inverse, norm_weights.weight, norm_weights.bias, [True, False, False]
    )
    total: Tensor = dx if add is None else dx.add_(add)
    return total


def _centered(x: Tensor, norm_weights: NormWeights, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch's own kernel: the result, the mean and the reciprocal standard deviation of each row."""
    return torch.native_layer_norm(x, x.shape[-1:], norm_weights.weight, norm_weights.bias, epsilon)


def activate(gate_up: Tensor, activation: Activation, *, gated: bool) -> Tensor:
    """activation(gate) · up; without a gate the activation alone."""
    if gated and activation == "silu":
        return gate(gate_up)
    gate_half, right = gate_up.chunk(2, dim=1) if gated else (gate_up, None)
    lit = blocks.activate(gate_half, activation)
    return lit if right is None else lit.mul_(right)


def activate_backward(
    gate_up: Tensor, d_lifted: Tensor, activation: Activation, *, gated: bool
) -> tuple[Tensor, Tensor]:
    """The same recomputed, and the gradient of its input."""
    if gated and activation == "silu":
        return gate_backward(gate_up, d_lifted)
    gate_half, right = gate_up.chunk(2, dim=1) if gated else (gate_up, None)
    lit = blocks.activate(gate_half, activation)
    if right is None:
        return lit, _activation_gradient(d_lifted, gate_half, activation)
    d_right = d_lifted * lit
    lifted = lit.mul_(right)
    d_left = _activation_gradient(d_lifted * right, gate_half, activation)
    return lifted, torch.cat((d_left, d_right), dim=1)


def _activation_gradient(dy: Tensor, x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(dy, x)  # type: ignore[no-any-return]
    approximate = "tanh" if activation == "gelu_pytorch_tanh" else "none"
    return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)  # type: ignore[no-any-return]


P = ParamSpec("P")
R = TypeVar("R")


def one_launch(reference: Callable[P, R]) -> Callable[P, R]:
    """The function as one operator: its Triton kernel on a GPU; unchanged if a compiler fuses it."""
    name = reference.__name__
    operator = torch.library.custom_op(f"graftwork::{name}", reference, mutates_args=())

    def launch(*arguments: Any) -> Any:
        # Triton is only installed where a GPU is.
        from graftwork.train.gpu import kernels

        return getattr(kernels, name)(*arguments)

    operator.register_kernel("cuda")(launch)

    @wraps(reference)
    def call(*arguments: P.args, **kwargs: P.kwargs) -> R:
        if is_compiling():
            return reference(*arguments, **kwargs)
        result: R = operator(*arguments, **kwargs)
        return result

    return call


def _plain_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    even = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return (weight * even).to(x.dtype)


@one_launch
def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension; x may be a strided slice of heads."""
    return _plain_norm(x, weight, epsilon).contiguous()


@one_launch
def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    total = x + y
    return total, _plain_norm(total, weight, epsilon)


@one_launch
def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float, add: Tensor | None) -> Tensor:
    """The gradient of the norm's input, plus `add`."""
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    even = wide * inverse
    d = dy.float() * weight.float()
    dx = (inverse * (d - even * (d * even).mean(-1, keepdim=True))).to(dy.dtype)
    return dx.contiguous() if add is None else add + dx


@one_launch
def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with rotary position embeddings, and values: each contiguous.

    The inputs are [tokens, heads, width] and may be slices of one product.
    """
    copy = v.clone(memory_format=torch.contiguous_format)
    return blocks.rotate(q, cos, sin), blocks.rotate(k, cos, sin), copy


@one_launch
def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of queries, keys and values, concatenated: [tokens, all heads × width]."""
    parts = []
    for dy in (dq, dk):
        half = dy.shape[-1] // 2
        d = dy * sin[:, None]
        parts.append(dy * cos[:, None] + torch.cat((d[..., half:], -d[..., :half]), dim=-1))
    return torch.cat([part.reshape(dq.shape[0], -1) for part in (*parts, dv)], dim=1)


@one_launch
def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up."""
    gate_half, right = gate_up.chunk(2, dim=1)
    return silu(gate_half) * right


@one_launch
def gate_backward(gate_up: Tensor, d_gated: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) · up recomputed, and the gradient of gate and up."""
    gate_half, right = gate_up.chunk(2, dim=1)
    # The activation is rounded as in the forward pass.
    lit = silu(gate_half)
    sigmoid = torch.sigmoid(gate_half.float())
    slope = sigmoid * (1 + gate_half.float() * (1 - sigmoid))
    d_left = (d_gated.float() * right.float() * slope).to(gate_up.dtype)
    return lit * right, torch.cat((d_left, d_gated * lit), dim=1)


def replace_by_gradient(
    logits: Tensor, targets: Tensor, weights: Tensor | None, ending: LogitsEnding
) -> Tensor:
    """-log p of each target, not weighted; the logits are replaced by the gradient of the weighted sum."""
    losses: Tensor = _cross_entropy_(logits, targets, weights, ending.multiplier / ending.divisor, ending.cap)
    return losses


def target_losses(logits: Tensor, targets: Tensor, ending: LogitsEnding) -> Tensor:
    """-log p of each target; of positions without one, of token 0."""
    losses: Tensor = _cross_entropy(logits, targets, ending.multiplier / ending.divisor, ending.cap)
    return losses


@torch.library.custom_op("graftwork::cross_entropy_", mutates_args={"logits"})
def _cross_entropy_(
    logits: Tensor, targets: Tensor, weights: Tensor | None, factor: float, cap: float | None
) -> Tensor:
    ending = LogitsEnding(multiplier=factor, cap=cap)
    wide = ending.apply_(logits.float() if logits.dtype != torch.float32 else logits.clone())
    losses = token_losses(wide, targets.clamp(min=0))
    _, d = loss_and_gradient(wide, targets, weights)
    logits.copy_(ending.backward_(d, wide))
    return losses


@_cross_entropy_.register_kernel("cuda")
def _(logits: Tensor, targets: Tensor, weights: Tensor | None, factor: float, cap: float | None) -> Tensor:
    from graftwork.train.gpu import kernels

    return kernels.cross_entropy(
        logits, targets, weights, LogitsEnding(multiplier=factor, cap=cap), gradient=True
    )


@torch.library.custom_op("graftwork::cross_entropy", mutates_args=())
def _cross_entropy(logits: Tensor, targets: Tensor, factor: float, cap: float | None) -> Tensor:
    ending = LogitsEnding(multiplier=factor, cap=cap)
    return token_losses(ending.of(logits.float()), targets.clamp(min=0))


@_cross_entropy.register_kernel("cuda")
def _(logits: Tensor, targets: Tensor, factor: float, cap: float | None) -> Tensor:
    from graftwork.train.gpu import kernels

    return kernels.cross_entropy(
        logits, targets, None, LogitsEnding(multiplier=factor, cap=cap), gradient=False
    )
