"""The few kernels that a compiler does not write well by itself.

In: tensors on a card. Out: the same numbers as the plain functions beside which they are used. Only
imported where there is a card; the plain functions are the reference in the tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from graftwork.train.gpu.quantized import FLOAT8

COLUMNS = 2048


# Annotations of a kernel are read by its compiler: only what it knows may stand there.
@triton.jit  # type: ignore[untyped-decorator]
def _gate_backward(gate_up, d_lifted, weight_scale, lifted, d_gate_up, codes, row_scale, width, columns: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, E501  # fmt: skip
    """One row: the gate's backward pass, then its two halves in 8 bits under one scale."""
    row = tl.program_id(0).to(tl.int64)
    wide, narrow = row * 2 * width, row * width
    largest = tl.zeros([columns], dtype=tl.float32)
    for start in range(0, width, columns):
        at = start + tl.arange(0, columns)
        inside = at < width
        gate = tl.load(gate_up + wide + at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + wide + width + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_lifted + narrow + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        lit = (gate * sigmoid).to(tl.bfloat16).to(tl.float32)
        tl.store(lifted + narrow + at, (lit * up).to(tl.bfloat16), mask=inside)
        d_gate = (d * up * sigmoid * (1 + gate * (1 - sigmoid))).to(tl.bfloat16)
        d_up = (d * lit).to(tl.bfloat16)
        tl.store(d_gate_up + wide + at, d_gate, mask=inside)
        tl.store(d_gate_up + wide + width + at, d_up, mask=inside)
        scale_gate = tl.load(weight_scale + at, mask=inside, other=0.0)
        scale_up = tl.load(weight_scale + width + at, mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(d_gate.to(tl.float32) * scale_gate))
        largest = tl.maximum(largest, tl.abs(d_up.to(tl.float32) * scale_up))
    scale = tl.maximum(tl.max(largest, axis=0) / 448.0, 1e-12)
    tl.store(row_scale + row, scale)
    # Every thread must see what the others wrote before the row is read again.
    tl.debug_barrier()
    for start in range(0, 2 * width, columns):
        at = start + tl.arange(0, columns)
        inside = at < 2 * width
        d = tl.load(d_gate_up + wide + at, mask=inside, other=0.0).to(tl.float32)
        d = d * tl.load(weight_scale + at, mask=inside, other=0.0) / scale
        d = tl.minimum(tl.maximum(d, -448.0), 448.0)
        tl.store(codes + wide + at, d.to(tl.float8e4nv), mask=inside)


@torch.library.triton_op("graftwork::gate_backward_eight", mutates_args={})
def gate_backward_eight(
    gate_up: Tensor, d_lifted: Tensor, weight_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The lifted values again, the gradient of gate and up, and that gradient in 8 bits with its scales."""
    rows, width = d_lifted.shape
    lifted, d_gate_up = torch.empty_like(d_lifted), torch.empty_like(gate_up)
    codes = torch.empty(rows, 2 * width, dtype=FLOAT8, device=gate_up.device)
    row_scale = torch.empty(rows, 1, dtype=torch.float32, device=gate_up.device)
    torch.library.wrap_triton(_gate_backward)[(rows,)](
        gate_up, d_lifted, weight_scale, lifted, d_gate_up, codes, row_scale, width, COLUMNS, num_warps=8
    )
    return lifted, d_gate_up, codes, row_scale
