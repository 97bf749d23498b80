"""NF4 weights opened on a GPU in one kernel, to the same bits. Only imported where there is a GPU."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


# Annotations of a kernel are read by its compiler: only names that it knows are allowed.
@triton.jit  # type: ignore[untyped-decorator]
def _dequantize_nf4(packed, scale_codes, chunk_scales, offset, levels, out, count, block: tl.constexpr, chunk: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """Some words of eight codes each, so that a thread reads four bytes and writes sixteen."""
    word = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = word < count
    codes = tl.load(packed + word, mask=inside, other=0)
    block_index = word * 8 // block
    scale = tl.load(scale_codes + block_index, mask=inside, other=0).to(tl.float32)
    scale *= tl.load(chunk_scales + block_index // chunk, mask=inside, other=0.0)
    scale += tl.load(offset)
    column = tl.arange(0, 8)[None]
    # Two codes a byte, the even column in the high nibble.
    nibble = (codes[:, None] >> (column // 2 * 8 + 4 - column % 2 * 4)) & 15
    value = tl.load(levels + nibble) * scale[:, None]
    tl.store(out + word[:, None] * 8 + column, value.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize_into(parts: Sequence[Tensor], levels: Tensor, out: Tensor, *, block: int, chunk: int) -> None:
    """`parts`: codes, codes of scales, scales of chunks, offset. `out` lies row after row."""
    codes, scale_codes, chunk_scales, offset = parts
    packed = codes.view(torch.int32)
    count, tile = packed.numel(), 1024
    _dequantize_nf4[(triton.cdiv(count, tile),)](
        packed, scale_codes, chunk_scales, offset, levels, out, count, block, chunk, tile,
        # To the last bit as operation by operation, which is how the model's own layers open.
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
