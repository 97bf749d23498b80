"""The products of a written-out step: frozen weights in the forms that memory allows, and their adapters.

Input: weights [out, in] whole, in 8 bits (a scale per row) or in 4 bits (NF4, dequantized once per use), and
the A and B of each adapter. Output: x Wᵀ and y W, never a gradient of W; and for layers that read the same
input (q, k, v) one stacked A and one B with their blocks on its diagonal, so that all cost one thin product
each way.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
    """Row i of the weight is `codes[i] * scale[i]`. `turned` is the transposed copy, if memory allows."""

    codes: Tensor
    scale: Tensor
    turned: Tensor | None
    bias: Tensor | None


class FourBitWeight(NamedTuple):
    """4-bit weights of layers that are used together."""

    parts: tuple[Nf4Weight, ...]
    levels: Tensor
    bias: Tensor | None


FrozenWeight = WholeWeight | EightBitWeight | FourBitWeight


def quantize_eight(
    weights: Sequence[Tensor], bias: Tensor | None, *, turned: bool, device: str | torch.device
) -> EightBitWeight:
    """Quantize the concatenated weights of layers to 8 bits, with a scale per row; some rows at a time."""
    rows, inputs = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    codes = torch.empty(rows, inputs, dtype=FLOAT8, device=device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    start = 0
    for weight in weights:
        for chunk in torch.split(weight.detach(), max(1, ROWS_AT_ONCE // inputs)):
            wide = chunk.to(device).float()
            row_scale = (wide.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_(min=SMALLEST_SCALE)
            end = start + chunk.shape[0]
            scale[start:end] = row_scale
            codes[start:end] = wide.div_(row_scale).clamp_(-LARGEST, LARGEST)
            start = end
    return EightBitWeight(codes, scale, codes.t().contiguous() if turned else None, bias)


def dequantize_four(four: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Dequantize the 4-bit weight, with its layers concatenated."""
    tensors = [tensor for part in four.parts for tensor in part]
    whole: Tensor = dequantize_nf4(tensors, four.levels, dtype)
    return whole


@torch.library.custom_op("graftwork::dequantize_nf4", mutates_args=())
def dequantize_nf4(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize the tensors of layers, one Nf4Weight after the other. One kernel per layer on a GPU:
    operation by operation, a weight costs 22 bytes of traffic per number.
    """
    return torch.cat([dequantize(part, dtype) for part in _weights_of(tensors)])


@dequantize_nf4.register_kernel("cuda")
def _(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    whole, start = _room_for(tensors, dtype), 0
    for part in _weights_of(tensors):
        rows = part.codes.shape[0]
        dequantize_into(part, levels, whole[start : start + rows])
        start += rows
    return whole


@dequantize_nf4.register_fake
def _(tensors: list[Tensor], levels: Tensor, dtype: torch.dtype) -> Tensor:
    return _room_for(tensors, dtype)


def _weights_of(tensors: list[Tensor]) -> list[Nf4Weight]:
    size = len(Nf4Weight._fields)
    return [Nf4Weight(*tensors[start : start + size]) for start in range(0, len(tensors), size)]


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
    """8-bit codes and scale of each row of x, times a scale for each column if given."""
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

    def __init__(self, shared: EightBitWeight, *, start: int, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shared = shared
        self.out_features, self.in_features = rows, shared.codes.shape[1]
        self.dtype = dtype
        self.register_buffer("codes", shared.codes[start : start + rows])
        self.register_buffer("scale", shared.scale[start : start + rows])
        bias = None if shared.bias is None else shared.bias[start : start + rows]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, recomputed each time."""
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


class LoraGroup(NamedTuple):
    """Adapters of one frozen product. Empty tuples if nothing is adapted."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]
    outs: tuple[int, ...]
    """Output widths of the concatenated layers, including those without an adapter (their b is None)."""
    places: tuple[int, ...]
    """Index of the layer that each adapter belongs to."""
    stack: "LoraStack | None" = None
    """The same adapters stacked in separate memory, if nothing is compiled."""


class LoraStack(NamedTuple):
    """The adapters of one product in the type of the activations, and buffers for their gradients in
    float32.
    """

    a: Tensor
    """[all ranks, inputs]."""
    b: Tensor
    """[all outputs, all ranks], scaled; zero for outputs outside the rank's layer."""
    da: Tensor
    db: tuple[Tensor, ...]
    """[rank, outputs] of each adapter, unscaled."""


class LoraGradient(NamedTuple):
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


def stacked_a(group: LoraGroup, dtype: torch.dtype) -> Tensor:
    if group.stack is not None:
        return group.stack.a
    return torch.cat([a.to(dtype) for a in group.a])


def stacked_b(group: LoraGroup, dtype: torch.dtype) -> Tensor:
    """[all outputs, all ranks], zero for outputs outside the rank's layer."""
    if group.stack is not None:
        return group.stack.b
    ranks = [b.shape[1] for b in group.b]
    strips = []
    for layer, out in enumerate(group.outs):
        blocks = []
        for number, rank in enumerate(ranks):
            if group.places[number] == layer:
                blocks.append((group.b[number] * group.scales[number]).to(dtype))
            else:
                blocks.append(torch.zeros(out, rank, dtype=dtype, device=group.b[number].device))
        strips.append(torch.cat(blocks, dim=1))
    return torch.cat(strips)


@torch.library.custom_op("graftwork::add_thin", mutates_args={"y"})
def add_thin(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left right, in place: a plain `addmm` in a compiled function copies y first."""
    y.addmm_(left, right)


def lora_product(frozen: FrozenWeight, group: LoraGroup, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ + s (x Aᵀ) Bᵀ, and x Aᵀ for the backward pass."""
    y = product(frozen, x)
    if not group.a:
        return y, None
    low = x @ stacked_a(group, x.dtype).t()
    add_thin(y, low, stacked_b(group, x.dtype).t())
    return y, low


def input_gradient(
    frozen: FrozenWeight, group: LoraGroup, dy: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input, and of x Aᵀ. `base` is dy W if it is already computed."""
    dx = transposed_product(frozen, dy) if base is None else base
    if not group.a:
        return dx, None
    dlow = dy @ stacked_b(group, dy.dtype)
    add_thin(dx, dlow, stacked_a(group, dy.dtype))
    return dx, dlow


def lora_gradient(
    group: LoraGroup, x: Tensor, low: Tensor | None, dy: Tensor, dlow: Tensor | None
) -> LoraGradient:
    """The gradient of A and B."""
    if low is None or dlow is None:
        return LoraGradient((), ())
    if group.stack is not None:
        _add_product(group.stack.da, dlow.t(), x)
        rank_start = 0
        for number, db in enumerate(group.stack.db):
            output_start = sum(group.outs[: group.places[number]])
            _add_product(
                db,
                low[:, rank_start : rank_start + db.shape[0]].t(),
                dy[:, output_start : output_start + db.shape[1]],
            )
            rank_start += db.shape[0]
        return LoraGradient((), ())
    return _gradient(group, dlow.t() @ x, low.t() @ dy)


@torch.library.custom_op("graftwork::add_product", mutates_args={"total"})
def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, summed in float32."""
    if total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left.float() @ right.float()


class LoraStacks:
    """A decoder's adapters, stacked: copied before a pass, their gradients added back after it."""

    def __init__(self, groups: Sequence[LoraGroup], dtype: torch.dtype) -> None:
        self.groups: list[LoraGroup] = []
        for group in groups:
            if group.a:
                device, ranks = group.a[0].device, sum(a.shape[0] for a in group.a)
                stack = LoraStack(
                    a=torch.zeros(ranks, group.a[0].shape[1], dtype=dtype, device=device),
                    b=torch.zeros(sum(group.outs), ranks, dtype=dtype, device=device),
                    da=torch.zeros(ranks, group.a[0].shape[1], device=device),
                    db=tuple(torch.zeros(b.shape[1], b.shape[0], device=device) for b in group.b),
                )
                group = group._replace(stack=stack)  # noqa: PLW2901
            self.groups.append(group)
        self._used = [group for group in self.groups if group.stack is not None]
        self._gradients = [t for g in self._used if g.stack for t in (g.stack.da, *g.stack.db)]
        self._refresh: Any = None
        self._add: Any = None
        self._into: list[int] = []

    def refresh(self) -> None:
        """Copy the current adapters, and clear their stacked gradients."""
        if not self._used:
            return
        torch._foreach_zero_(self._gradients)
        if self._refresh is None:
            parts = []
            for group, stack, number, ranks in self._adapters():
                a, b, start = group.a[number], group.b[number], sum(group.outs[: group.places[number]])
                parts.append((a.detach(), stack.a[ranks], 1.0))
                rows = slice(start, start + b.shape[0])
                parts.append((b.detach(), stack.b[rows, ranks], group.scales[number]))
            self._refresh = _copies(parts, add=False)
        self._refresh.run()

    def add(self) -> None:
        """Add the stacked gradients to those of the parameters."""
        if not self._used:
            return
        parameters = [p for group in self._used for p in (*group.a, *group.b)]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        into = [parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None]
        if self._add is None or into != self._into:
            parts = []
            for group, stack, number, ranks in self._adapters():
                a_grad, b_grad = group.a[number].grad, group.b[number].grad
                assert a_grad is not None
                assert b_grad is not None
                parts.append((stack.da[ranks], a_grad, 1.0))
                parts.append((stack.db[number].t(), b_grad, group.scales[number]))
            self._add, self._into = _copies(parts, add=True), into
        self._add.run()

    def _adapters(self) -> Iterator[tuple[LoraGroup, LoraStack, int, slice]]:
        """Each adapter: its group, the stack, its index in the group, its ranks in the stack."""
        for group in self._used:
            assert group.stack is not None
            rank_start = 0
            for number, b in enumerate(group.b):
                yield group, group.stack, number, slice(rank_start, rank_start + b.shape[1])
                rank_start += b.shape[1]


class _PlainCopies:
    def __init__(self, copies: Sequence[tuple[Tensor, Tensor, float]], *, add: bool) -> None:
        self._copies, self._add = copies, add

    def run(self) -> None:
        for source, target, scale in self._copies:
            target.copy_(target + source * scale if self._add else source * scale)


def _copies(copies: Sequence[tuple[Tensor, Tensor, float]], *, add: bool) -> Any:
    if not copies[0][0].is_cuda:
        return _PlainCopies(copies, add=add)
    from graftwork.train.gpu.kernels import StridedCopies

    return StridedCopies(copies, add=add)


def _gradient(group: LoraGroup, da: Tensor, db: Tensor) -> LoraGradient:
    """Split the stacked gradients into those of each layer."""
    starts = [sum(group.outs[:layer]) for layer in range(len(group.outs))]
    ga, gb, rank_start = [], [], 0
    for number, b in enumerate(group.b):
        rank, output_start = b.shape[1], starts[group.places[number]]
        end = output_start + group.outs[group.places[number]]
        ga.append(da[rank_start : rank_start + rank].float().contiguous())
        gb.append(
            (
                db[rank_start : rank_start + rank, output_start:end].t().float() * group.scales[number]
            ).contiguous()
        )
        rank_start += rank
    return LoraGradient(tuple(ga), tuple(gb))
