"""Fused pieces of a training step: each is one launch where plain PyTorch takes five to fifteen.

In: tensors. Out: the same numbers as the plain functions, which are what runs on a processor and the
reference in the tests; on a card a Triton kernel runs instead. Each piece is a custom operator, so that
the memory of a step is its results and nothing else on either device. Compiled steps do not use these:
the compiler fuses the plain functions by itself.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def plain_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def plain_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    even = wide * inverse
    d = dy.float() * weight.float()
    return (inverse * (d - even * (d * even).mean(-1, keepdim=True))).to(dy.dtype)


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x is [tokens, heads, width]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def plain_rotate_backward(dy: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = dy.shape[-1] // 2
    d = dy * sin[:, None]
    return dy * cos[:, None] + torch.cat((d[..., half:], -d[..., :half]), dim=-1)


def plain_gate_backward(gate_up: Tensor, d_lifted: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.chunk(2, dim=1)
    # The activation is rounded as in the forward pass.
    lit = silu(gate)
    sigmoid = torch.sigmoid(gate.float())
    slope = sigmoid * (1 + gate.float() * (1 - sigmoid))
    d_gate = (d_lifted.float() * up.float() * slope).to(gate_up.dtype)
    return lit * up, torch.cat((d_gate, d_lifted * lit), dim=1)


@torch.library.custom_op("graftwork::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension; x may be a strided slice of heads."""
    return plain_norm(x, weight, epsilon).contiguous()


@torch.library.custom_op("graftwork::add_norm", mutates_args=())
def add_norm(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x + y, and its norm."""
    added = x + y
    return added, plain_norm(added, weight, epsilon)


@torch.library.custom_op("graftwork::norm_backward", mutates_args=())
def norm_backward(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float, add: Tensor | None) -> Tensor:
    """The gradient of the norm's input, plus `add`."""
    dx = plain_norm_backward(dy, x, weight, epsilon)
    return dx.contiguous() if add is None else add + dx


@torch.library.custom_op("graftwork::rotate", mutates_args=())
def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, each contiguous; the inputs may be slices of one product."""
    return (
        plain_rotate(q, cos, sin),
        plain_rotate(k, cos, sin),
        v.clone(memory_format=torch.contiguous_format),
    )


@torch.library.custom_op("graftwork::rotate_backward", mutates_args=())
def rotate_backward(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of queries, keys and values next to each other: [tokens, all heads × width]."""
    tokens = dq.shape[0]
    turned = (plain_rotate_backward(dq, cos, sin), plain_rotate_backward(dk, cos, sin), dv)
    return torch.cat([d.reshape(tokens, -1) for d in turned], dim=1)


@torch.library.custom_op("graftwork::gate", mutates_args=())
def gate(gate_up: Tensor) -> Tensor:
    """silu(gate) · up."""
    left, right = gate_up.chunk(2, dim=1)
    return silu(left) * right


@torch.library.custom_op("graftwork::gate_backward", mutates_args=())
def gate_backward(gate_up: Tensor, d_lifted: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) · up again, and the gradient of gate and up."""
    return plain_gate_backward(gate_up, d_lifted)


@norm.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _kernels().norm(x, weight, epsilon)


@add_norm.register_kernel("cuda")
def _(x: Tensor, y: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return _kernels().add_norm(x, y, weight, epsilon)


@norm_backward.register_kernel("cuda")
def _(dy: Tensor, x: Tensor, weight: Tensor, epsilon: float, add: Tensor | None) -> Tensor:
    return _kernels().norm_backward(dy, x, weight, epsilon, add)


@rotate.register_kernel("cuda")
def _(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _kernels().rotate(q, k, v, cos, sin)


@rotate_backward.register_kernel("cuda")
def _(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _kernels().rotate_backward(dq, dk, dv, cos, sin)


@gate.register_kernel("cuda")
def _(gate_up: Tensor) -> Tensor:
    return _kernels().gate(gate_up)


@gate_backward.register_kernel("cuda")
def _(gate_up: Tensor, d_lifted: Tensor) -> tuple[Tensor, Tensor]:
    return _kernels().gate_backward(gate_up, d_lifted)


def _kernels() -> Any:
    """Triton is there only where a card is."""
    from graftwork.train.gpu import kernels

    return kernels
