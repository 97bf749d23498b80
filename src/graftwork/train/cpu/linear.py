"""The products of the CPU step: frozen weights laid out once for oneDNN, and LoRA added up in place.

Input: a layer of the model, frozen or a `LoraLinear`. Output: a function x -> x Wᵀ (+ scale · B A x) with its
own backward pass, or without one where nothing flows back. The layout makes short rows a third faster. Its
counterpart is `gpu/linear.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.adapters.lora import LoraLinear
from graftwork.model.blocks import PACKED_FOR, has_onednn_products

Product = Callable[[Tensor], Tensor]


def pack_product(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Product:
    """x -> x Wᵀ + bias."""
    if not (packed and has_onednn_products()):
        return lambda x: nn.functional.linear(x, weight, bias)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, laid_out, bias, "none", [], "")


def frozen_product(layer: Any, *, packed: bool) -> Product:
    """Product of a layer that no gradient flows through."""
    if type(layer) is nn.Linear:
        return pack_product(layer.weight, layer.bias, packed=packed)
    return layer  # type: ignore[no-any-return]


def trainable_product(layer: Any, *, packed: bool) -> Product:
    """Product of a layer that the gradient flows through: frozen, or with one active adapter."""
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if type(base) is not nn.Linear:
        return layer  # type: ignore[no-any-return]
    forward = pack_product(base.weight, base.bias, packed=packed)
    back = (
        pack_product(base.weight.t().contiguous(), None, packed=True)
        if packed and has_onednn_products()
        else None
    )
    turned = back if back is not None else lambda g: g @ base.weight
    if base is layer:
        return lambda x: _apply(_FrozenProduct, x, forward, turned)
    name = layer.active
    if name not in layer.scales or name in layer.lora_magnitude_vector:
        return layer  # type: ignore[no-any-return]
    a, b, scale = layer.lora_A[name], layer.lora_B[name], layer.scales[name]
    return lambda x: _apply(_LoraProduct, x, a, b, scale, forward, turned)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)  # type: ignore[no-any-return]


class _FrozenProduct(torch.autograd.Function):
    """y = W x. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Product, turned: Product) -> Tensor:
        ctx.turned = turned
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.turned(gradients[0]), None, None


class _LoraProduct(torch.autograd.Function):
    """y = W x + s · B (A x), accumulated in place; saves x and A x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, forward: Product, turned: Product
    ) -> Tensor:
        low = x @ a.t()
        y = forward(x).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.scale, ctx.turned = scale, turned
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g: Tensor = gradients[0]
        x, low, a, b = ctx.saved_tensors
        thin = (g @ b).mul_(ctx.scale)
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = ctx.turned(g).addmm_(thin, a)
        return for_x, thin.t() @ x, (low.t() @ g).t().mul(ctx.scale), None, None, None
