"""Frozen weights in the forms that memory allows, and the two products that training needs of them.

In: a weight [out, in]. Out: it whole, in 8 bits (a scale a row, for products in 8 bits) or in 4 bits
(NF4, dequantised once a use). `product` is x Wᵀ, `turned_product` is y W: training wants both, and
never a gradient of W. Functions of tensors only, so that they can be compiled with what surrounds them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EIGHT = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number that e4m3 holds."""

SMALLEST_SCALE = 1e-12


class Whole(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class Eight(NamedTuple):
    """Row i of the weight is `codes[i] * scale[i]`. `turned` is the same turned over, where memory allows."""

    codes: Tensor
    scale: Tensor
    turned: Tensor | None
    bias: Tensor | None


class FourPart(NamedTuple):
    """NF4 of one layer as `model/nf4.py` lays it out: two codes a byte, a scale for every 64 weights."""

    codes: Tensor
    scale_codes: Tensor
    chunk_scales: Tensor
    offset: Tensor


class Four(NamedTuple):
    """4-bit weights of layers that are used side by side."""

    parts: tuple[FourPart, ...]
    levels: Tensor
    bias: Tensor | None


Frozen = Whole | Eight | Four

BLOCK = 64
CHUNK = 256


def to_eight(weight: Tensor, bias: Tensor | None, *, turned: bool) -> Eight:
    """The nearest 8-bit weight with a scale a row."""
    scale = (weight.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp(min=SMALLEST_SCALE)
    codes = (weight.float() / scale).clamp(-LARGEST, LARGEST).to(EIGHT)
    return Eight(codes, scale, codes.t().contiguous() if turned else None, bias)


def dequantise(four: Four, dtype: torch.dtype) -> Tensor:
    """The 4-bit weight as numbers."""
    return torch.cat([_dequantise_part(part, four.levels, dtype) for part in four.parts])


def _dequantise_part(part: FourPart, levels: Tensor, dtype: torch.dtype) -> Tensor:
    rows, half = part.codes.shape
    codes = torch.stack((part.codes >> 4, part.codes & 15), dim=-1).view(rows, half * 2)
    blocks = half * 2 // BLOCK
    place = torch.arange(rows * blocks, device=codes.device) // CHUNK
    scales = part.scale_codes.reshape(-1).float() * part.chunk_scales[place] + part.offset
    values = levels[codes.int()].view(rows, blocks, BLOCK) * scales.view(rows, blocks, 1)
    return values.to(dtype).view(rows, half * 2)


def product(frozen: Frozen, x: Tensor) -> Tensor:
    """x Wᵀ + bias."""
    if isinstance(frozen, Eight):
        codes, scale = _quantise_rows(x)
        y = _eight_product(codes, scale, frozen.codes, frozen.scale.t(), x.dtype)
    else:
        y = x @ _as_numbers(frozen, x.dtype).t()
    return y if frozen.bias is None else y + frozen.bias


def turned_product(frozen: Frozen, y: Tensor) -> Tensor:
    """y W."""
    if isinstance(frozen, Eight):
        # The rows' scales go into y, so that the same codes serve both products.
        codes, scale = _quantise_rows(y, frozen.scale.view(-1))
        return turned_product_of_codes(frozen, codes, scale, y.dtype)
    return y @ _as_numbers(frozen, y.dtype)


def turned_product_of_codes(frozen: Eight, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """y W, where y times the rows' scales is in 8 bits already."""
    turned = frozen.codes.t().contiguous() if frozen.turned is None else frozen.turned
    ones = torch.ones(1, turned.shape[0], dtype=torch.float32, device=codes.device)
    return _eight_product(codes, scale, turned, ones, dtype)


def plain_quantise_rows(x: Tensor, columns_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """8-bit codes of each row and its scale, of x times a scale for each column where one is given."""
    wide = x.float() if columns_scale is None else x.float() * columns_scale
    scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scale).clamp(-LARGEST, LARGEST).to(EIGHT), scale


def _quantise_rows(x: Tensor, columns_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if torch.compiler.is_compiling():
        return plain_quantise_rows(x, columns_scale)
    return fused_quantise_rows(x, columns_scale)


@torch.library.custom_op("graftwork::quantise_rows", mutates_args=())
def fused_quantise_rows(x: Tensor, columns_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    return plain_quantise_rows(x, columns_scale)


@fused_quantise_rows.register_kernel("cuda")
def _(x: Tensor, columns_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    from graftwork.train.gpu import kernels

    return kernels.quantise_rows(x, columns_scale)


def _as_numbers(frozen: Whole | Four, dtype: torch.dtype) -> Tensor:
    return frozen.weight if isinstance(frozen, Whole) else dequantise(frozen, dtype)


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
