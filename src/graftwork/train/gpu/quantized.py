"""Frozen weights in the forms that memory allows, and the two products that training needs of them.

In: a weight [out, in]. Out: it whole, in 8 bits (a scale a row, for products in 8 bits) or in 4 bits
(NF4, dequantised once a use). `product` is x Wᵀ, `turned_product` is y W: training wants both, and
never a gradient of W. Functions of tensors only, so that they can be compiled with what surrounds them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from graftwork.model.nf4 import ROWS_AT_ONCE, Nf4Weight, dequantize, dequantize_into

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that e4m3 holds."""

SMALLEST_SCALE = 1e-12


class WholeWeight(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class EightBitWeight(NamedTuple):
    """Row i of the weight is `codes[i] * scale[i]`. `turned` is the same turned over, where memory allows."""

    codes: Tensor
    scale: Tensor
    turned: Tensor | None
    bias: Tensor | None


class FourBitWeight(NamedTuple):
    """4-bit weights of layers that are used side by side."""

    parts: tuple[Nf4Weight, ...]
    levels: Tensor
    bias: Tensor | None


FrozenWeight = WholeWeight | EightBitWeight | FourBitWeight


def quantize_eight(
    weights: Sequence[Tensor], bias: Tensor | None, *, turned: bool, device: str | torch.device
) -> EightBitWeight:
    """The nearest 8-bit weight of layers below each other, with a scale a row; some rows at a time."""
    rows, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    codes = torch.empty(rows, inputs, dtype=FLOAT8, device=device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    begin = 0
    for weight in weights:
        for some in torch.split(weight.detach(), max(1, ROWS_AT_ONCE // inputs)):
            wide = some.to(device).float()
            own = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
            end = begin + some.shape[0]
            scale[begin:end] = own
            codes[begin:end] = wide.div_(own).clamp_(-LARGEST, LARGEST)
            begin = end
    return EightBitWeight(codes, scale, codes.t().contiguous() if turned else None, bias)


def dequantize_four(four: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """The 4-bit weight as numbers, its layers below each other."""
    tensors = [tensor for part in four.parts for tensor in part]
    whole: Tensor = dequantize_nf4(tensors, four.levels, dtype)
    return whole


@torch.library.custom_op("graftwork::dequantize_nf4", mutates_args=())
def dequantize_nf4(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the tensors of layers, one Nf4Weight behind the other. One kernel a layer on a card: operation by
    operation, a weight passes through 22 bytes a number."""
    return torch.cat([dequantize(part, dtype) for part in _weights_of(tensors)])


@dequantize_nf4.register_kernel("cuda")
def _(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    whole, begin = _room_for(tensors, dtype), 0
    for part in _weights_of(tensors):
        rows = part.codes.shape[0]
        dequantize_into(part, levels, whole[begin : begin + rows])
        begin += rows
    return whole


@dequantize_nf4.register_fake
def _(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    return _room_for(tensors, dtype)


def _weights_of(tensors: list[Tensor]) -> list[Nf4Weight]:
    size = len(Nf4Weight._fields)
    return [Nf4Weight(*tensors[at : at + size]) for at in range(0, len(tensors), size)]


def _room_for(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    codes = [part.codes for part in _weights_of(tensors)]
    rows = sum(part.shape[0] for part in codes)
    return torch.empty(rows, 2 * codes[0].shape[1], dtype=dtype, device=codes[0].device)


def product(frozen: FrozenWeight, x: Tensor) -> Tensor:
    """x Wᵀ + bias."""
    if isinstance(frozen, EightBitWeight):
        codes, scale = quantize_rows(x)
        y = _eight_product(codes, scale, frozen.codes, frozen.scale.t(), x.dtype)
    else:
        y = x @ _as_numbers(frozen, x.dtype).t()
    return y if frozen.bias is None else y + frozen.bias


def transposed_product(frozen: FrozenWeight, y: Tensor) -> Tensor:
    """y W."""
    if isinstance(frozen, EightBitWeight):
        # The rows' scales go into y, so that the same codes serve both products.
        codes, scale = quantize_rows(y, frozen.scale.view(-1))
        return transposed_product_of_codes(frozen, codes, scale, y.dtype)
    return y @ _as_numbers(frozen, y.dtype)


def transposed_product_of_codes(
    frozen: EightBitWeight, codes: Tensor, scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """y W, where y times the rows' scales is in 8 bits already."""
    turned = frozen.codes.t().contiguous() if frozen.turned is None else frozen.turned
    ones = torch.ones(1, turned.shape[0], dtype=torch.float32, device=codes.device)
    return _eight_product(codes, scale, turned, ones, dtype)


def plain_quantize_rows(x: Tensor, columns_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit codes of each row and its scale, of x times a scale for each column where one is given."""
    wide = x.float() if columns_scale is None else x.float() * columns_scale
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(FLOAT8), scale


def quantize_rows(x: Tensor, columns_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return plain_quantize_rows(x, columns_scale)
    pair: tuple[Tensor, Tensor] = fused_quantize_rows(x, columns_scale)
    return pair


@torch.library.custom_op("graftwork::quantize_rows", mutates_args=())
def fused_quantize_rows(x: Tensor, columns_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return plain_quantize_rows(x, columns_scale)


@fused_quantize_rows.register_kernel("cuda")
def _(x: Tensor, columns_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    from graftwork.train.gpu import kernels

    return kernels.quantize_rows(x, columns_scale)


def _as_numbers(frozen: WholeWeight | FourBitWeight, dtype: torch.dtype) -> Tensor:
    return frozen.weight if isinstance(frozen, WholeWeight) else dequantize_four(frozen, dtype)


def _eight_product(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """left rightᵀ with a scale for each row of both."""
    if left.device.type == "cuda":
        return torch._scaled_mm(
            left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=dtype, use_fast_accum=True
        )
    # The same numbers for machines without such products, for tests.
    return ((left.float() @ right.float().t()) * left_scale * right_scale).to(dtype)


class EightBitLinear(nn.Module):
    codes: Tensor
    scale: Tensor

    def __init__(self, shared: EightBitWeight, *, begin: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = shared
        self.out_features, self.in_features = rows, shared.codes.shape[1]
        self.dtype = dtype
        self.register_buffer("codes", shared.codes[begin : begin + rows])
        self.register_buffer("scale", shared.scale[begin : begin + rows])
        bias = None if shared.bias is None else shared.bias[begin : begin + rows]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, computed each time."""
        return (self.codes.float() * self.scale).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            # As training multiplies: prompts that it reads for its answers are then read by the same policy.
            y = product(EightBitWeight(self.codes, self.scale, None, self.bias), x.flatten(0, -2))
            return y.view(*x.shape[:-1], -1)
        # Codes are exact in 16 bits; their scale is put on what comes out.
        y = nn.functional.linear(x, self.codes.to(x.dtype)).float() * self.scale.view(-1)
        return y.to(x.dtype) if self.bias is None else y.to(x.dtype) + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=8"
