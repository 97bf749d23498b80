"""Weights in four bits (NF4 of the QLoRA paper), with their block scales in eight: our own, in plain torch.

Input: a frozen weight. Output: its codes, and the weight again, dequantized for one use and then forgotten.
Layout, which kernels build on: `codes` uint8 [out, in / 2], two columns a byte, the even one in the high
nibble; blocks of 64 columns of a row share a scale, the largest magnitude in the block. The scales are
quantized too: over all scales of the weight, row by row, in chunks of 256, scale = offset +
chunk_scales[chunk] · scale_codes, with one offset a weight. Knows no adapters.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 64
CHUNK = 256
ROWS_AT_ONCE = 2**24
"""Elements that are quantized at a time, which bounds the memory needed besides the weight."""

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to -1 … 1, with an exact zero."""


class Nf4Weight(NamedTuple):
    """A weight of `codes.shape[0]` outputs and `2 · codes.shape[1]` inputs."""

    codes: Tensor
    scale_codes: Tensor
    chunk_scales: Tensor
    offset: Tensor


def can_quantize(weight: Tensor) -> bool:
    """Rows must be whole blocks."""
    return weight.dim() == 2 and weight.shape[1] % BLOCK == 0


@torch.no_grad()
def quantize(weight: Tensor) -> Nf4Weight:
    """Return the nearest level for each element, relative to its block's maximum."""
    if not can_quantize(weight):
        raise ValueError(f"a weight of {tuple(weight.shape)} has no whole blocks of {BLOCK}")
    outputs, inputs = weight.shape
    levels = torch.tensor(LEVELS, device=weight.device)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(outputs, inputs // BLOCK, device=weight.device)
    rows = max(1, ROWS_AT_ONCE // inputs)
    for row in range(0, outputs, rows):
        blocks = weight[row : row + rows].float().reshape(-1, inputs // BLOCK, BLOCK)
        largest = blocks.abs().amax(dim=-1)
        scales[row : row + rows] = largest
        # A block of zeros has no scale; its elements get the level zero.
        unit = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        nearest = torch.bucketize(unit, middles, out_int32=True).to(torch.uint8).reshape(-1, inputs)
        codes[row : row + rows] = nearest[:, ::2] << 4 | nearest[:, 1::2]
    return Nf4Weight(codes, *_quantize_scales(scales))


def dequantize(weight: Nf4Weight, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in], up to quantization error."""
    outputs, half = weight.codes.shape
    if weight.codes.is_cuda:
        whole = torch.empty(outputs, 2 * half, dtype=dtype, device=weight.codes.device)
        dequantize_into(weight, _levels(weight.codes.device), whole)
        return whole
    # The two levels of each possible byte, side by side in one number: looked up in one go.
    levels = _levels(weight.codes.device)
    pairs = torch.stack([levels[:, None].expand(16, 16), levels[None].expand(16, 16)], dim=-1)
    table = pairs.contiguous().view(torch.int64).reshape(-1)
    decoded = table.index_select(0, weight.codes.reshape(-1).int())
    elements = decoded.view(torch.float32).reshape(outputs, -1, BLOCK)
    return elements.mul_(scales_of(weight)[..., None]).to(dtype).reshape(outputs, 2 * half)


def dequantize_into(weight: Nf4Weight, levels: Tensor, out: Tensor) -> None:
    """Dequantize on a GPU: the same bits in one kernel."""
    from graftwork.model import nf4_kernel

    nf4_kernel.dequantize_into(weight, levels, out, block=BLOCK, chunk=CHUNK)


def scales_of(weight: Nf4Weight) -> Tensor:
    """The scale of each block, [out, in / 64]."""
    flat = weight.scale_codes.reshape(-1).float()
    chunks = weight.chunk_scales[:, None].expand(-1, CHUNK).reshape(-1)[: flat.numel()]
    return (flat * chunks + weight.offset).reshape(weight.scale_codes.shape)


class Nf4Linear(nn.Module):
    """A frozen linear layer in four bits. Dequantized on each use; nothing of that is saved for backward."""

    codes: Tensor
    scale_codes: Tensor
    chunk_scales: Tensor
    offset: Tensor

    def __init__(self, weight: Nf4Weight, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, half = weight.codes.shape
        self.in_features = 2 * half
        for name in ("codes", "scale_codes", "chunk_scales", "offset"):
            self.register_buffer(name, getattr(weight, name))
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def quantized(self) -> Nf4Weight:
        return Nf4Weight(self.codes, self.scale_codes, self.chunk_scales, self.offset)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def forward(self, x: Tensor) -> Tensor:
        quantized = (self.codes, self.scale_codes, self.chunk_scales, self.offset)
        y: Tensor = _Nf4Product.apply(x, *quantized)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits=4"


class _Nf4Product(torch.autograd.Function):
    """x Wᵀ with W dequantized for the product, and again for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *quantized: Tensor) -> Tensor:
        ctx.save_for_backward(*quantized)
        return nn.functional.linear(x, dequantize(Nf4Weight(*quantized), x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        weight = dequantize(Nf4Weight(*ctx.saved_tensors), gradient.dtype)
        return (gradient @ weight, None, None, None, None)


def quantize_linear(layer: nn.Linear, *, device: str | torch.device | None = None) -> Nf4Linear:
    """Return the layer in four bits, on `device`: only one weight exists unquantized, and briefly."""
    weight = layer.weight.detach().to(device or layer.weight.device)
    bias = None if layer.bias is None else layer.bias.detach().to(weight.device)
    return Nf4Linear(quantize(weight), bias)


def _quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scale codes, the scale of each chunk of them, and the offset: eight bits a block."""
    offset = scales.mean()
    flat = (scales - offset).reshape(-1)
    missing = -flat.numel() % CHUNK
    chunks = nn.functional.pad(flat, (0, missing)).reshape(-1, CHUNK)
    step = chunks.abs().amax(dim=1) / 127
    tiny = torch.finfo(torch.float32).tiny
    codes = (chunks / step.clamp(min=tiny)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return codes.reshape(-1)[: flat.numel()].reshape(scales.shape).contiguous(), step, offset


@lru_cache
def _levels(device: torch.device) -> Tensor:
    return torch.tensor(LEVELS, device=device)
