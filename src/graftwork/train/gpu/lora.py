"""The adapters of one product: several linear layers that read the same input, done at once.

In: the A and B of each (q, k, v or gate, up or a single one). Out: one stacked A and one B with the
layers' blocks on its diagonal, scales folded in, so that all of them cost one thin product each way.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graftwork.train.gpu.quantized import FrozenWeight, product, transposed_product


class LoraGroup(NamedTuple):
    """Adapters of one frozen product. Empty tuples where nothing is adapted."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]
    outs: tuple[int, ...]
    """Output widths of the layers side by side, also of those without an adapter (their b is absent)."""
    places: tuple[int, ...]
    """Which of the layers each adapter belongs to."""
    stack: "LoraStack | None" = None
    """The same adapters stacked in memory of their own, where nothing is compiled."""


class LoraStack(NamedTuple):
    """The adapters of one product in the type of the activations, and room for their gradients in float32."""

    a: Tensor
    """[all ranks, inputs]."""
    b: Tensor
    """[all outputs, all ranks], scaled; zero where an output does not belong to the rank's layer."""
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
    """[all outputs, all ranks], zero where an output does not belong to the rank's layer."""
    if group.stack is not None:
        return group.stack.b
    ranks = [b.shape[1] for b in group.b]
    strips = []
    for place, out in enumerate(group.outs):
        blocks = []
        for at, rank in enumerate(ranks):
            if group.places[at] == place:
                blocks.append((group.b[at] * group.scales[at]).to(dtype))
            else:
                blocks.append(torch.zeros(out, rank, dtype=dtype, device=group.b[at].device))
        strips.append(torch.cat(blocks, dim=1))
    return torch.cat(strips)


@torch.library.custom_op("graftwork::add_thin", mutates_args={"y"})
def add_thin(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left right, in place: a plain `addmm` in a compiled function copies y first."""
    y.addmm_(left, right)


def lora_product(frozen: FrozenWeight, group: LoraGroup, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ + s (x Aᵀ) Bᵀ, and x Aᵀ, which the backward pass wants again."""
    y = product(frozen, x)
    if not group.a:
        return y, None
    low = x @ stacked_a(group, x.dtype).t()
    add_thin(y, low, stacked_b(group, x.dtype).t())
    return y, low


def input_gradient(
    frozen: FrozenWeight, group: LoraGroup, dy: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input, and of x Aᵀ. `base` is dy W where it is computed already."""
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
        at = 0
        for number, db in enumerate(group.stack.db):
            begin = sum(group.outs[: group.places[number]])
            _add_product(db, low[:, at : at + db.shape[0]].t(), dy[:, begin : begin + db.shape[1]])
            at += db.shape[0]
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
        """Take the adapters as they are now, and forget their stacked gradients."""
        if not self._used:
            return
        torch._foreach_zero_(self._gradients)
        if self._refresh is None:
            parts = []
            for group, stack, number, ranks in self._adapters():
                a, b, begin = group.a[number], group.b[number], sum(group.outs[: group.places[number]])
                parts.append((a.detach(), stack.a[ranks], 1.0))
                rows = slice(begin, begin + b.shape[0])
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
        """Each adapter: its group, the stack, its number in the group, its ranks in the stack."""
        for group in self._used:
            assert group.stack is not None
            at = 0
            for number, b in enumerate(group.b):
                yield group, group.stack, number, slice(at, at + b.shape[1])
                at += b.shape[1]


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
    """Cut the stacked gradients into those of each layer."""
    starts = [sum(group.outs[:place]) for place in range(len(group.outs))]
    ga, gb, at = [], [], 0
    for number, b in enumerate(group.b):
        rank, begin = b.shape[1], starts[group.places[number]]
        end = begin + group.outs[group.places[number]]
        ga.append(da[at : at + rank].float().contiguous())
        gb.append((db[at : at + rank, begin:end].t().float() * group.scales[number]).contiguous())
        at += rank
    return LoraGradient(tuple(ga), tuple(gb))
