"""The adapters of one product: several linear layers that read the same input, done at once.

In: the A and B of each (q, k, v or gate, up or a single one). Out: one stacked A and one B with the
layers' blocks on its diagonal, scales folded in, so that all of them cost one thin product each way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graftwork.train.gpu.frozen import Frozen, product, turned_product


class Graft(NamedTuple):
    """Adapters beside one frozen product. Empty tuples where nothing is adapted."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]
    outs: tuple[int, ...]
    """Output widths of the layers side by side, also of those without an adapter (their b is absent)."""
    places: tuple[int, ...]
    """Which of the layers each adapter belongs to."""
    stack: "Stack | None" = None
    """The same adapters stacked in memory of their own, where nothing is compiled."""


class Stack(NamedTuple):
    """The adapters of one product in the type of the activations, and room for their gradients in float32."""

    a: Tensor
    """[all ranks, inputs]."""
    b: Tensor
    """[all outputs, all ranks], scaled; zero where an output does not belong to the rank's layer."""
    da: Tensor
    db: tuple[Tensor, ...]
    """[rank, outputs] of each adapter, unscaled."""


class GraftGradient(NamedTuple):
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


def stacked_a(graft: Graft, dtype: torch.dtype) -> Tensor:
    if graft.stack is not None:
        return graft.stack.a
    return torch.cat([a.to(dtype) for a in graft.a])


def stacked_b(graft: Graft, dtype: torch.dtype) -> Tensor:
    """[all outputs, all ranks], zero where an output does not belong to the rank's layer."""
    if graft.stack is not None:
        return graft.stack.b
    ranks = [b.shape[1] for b in graft.b]
    strips = []
    for place, out in enumerate(graft.outs):
        blocks = []
        for at, rank in enumerate(ranks):
            if graft.places[at] == place:
                blocks.append((graft.b[at] * graft.scales[at]).to(dtype))
            else:
                blocks.append(torch.zeros(out, rank, dtype=dtype, device=graft.b[at].device))
        strips.append(torch.cat(blocks, dim=1))
    return torch.cat(strips)


@torch.library.custom_op("graftwork::add_thin", mutates_args={"y"})
def add_thin(y: Tensor, left: Tensor, right: Tensor) -> None:
    """y += left right, in place: a plain `addmm` in a compiled function copies y first."""
    y.addmm_(left, right)


def grafted_product(frozen: Frozen, graft: Graft, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ + s (x Aᵀ) Bᵀ, and x Aᵀ, which the backward pass wants again."""
    y = product(frozen, x)
    if not graft.a:
        return y, None
    low = x @ stacked_a(graft, x.dtype).t()
    add_thin(y, low, stacked_b(graft, x.dtype).t())
    return y, low


def input_gradient(
    frozen: Frozen, graft: Graft, dy: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input, and of x Aᵀ. `base` is dy W where somebody has computed it already."""
    dx = turned_product(frozen, dy) if base is None else base
    if not graft.a:
        return dx, None
    dlow = dy @ stacked_b(graft, dy.dtype)
    add_thin(dx, dlow, stacked_a(graft, dy.dtype))
    return dx, dlow


def thin_gradient(graft: Graft, dy: Tensor) -> Tensor | None:
    """The gradient of x Aᵀ alone, for a block below which nobody asks."""
    return dy @ stacked_b(graft, dy.dtype) if graft.a else None


def graft_gradient(
    graft: Graft, x: Tensor, low: Tensor | None, dy: Tensor, dlow: Tensor | None
) -> GraftGradient:
    """The gradient of A and B."""
    if low is None or dlow is None:
        return GraftGradient((), ())
    if graft.stack is not None:
        _add_to_stack(graft, graft.stack, x, low, dy, dlow)
        return GraftGradient((), ())
    return _gradient(graft, dlow.t() @ x, low.t() @ dy)


def _add_to_stack(graft: Graft, stack: Stack, x: Tensor, low: Tensor, dy: Tensor, dlow: Tensor) -> None:
    _add_product(stack.da, dlow.t(), x)
    at = 0
    for number, db in enumerate(stack.db):
        begin = sum(graft.outs[: graft.places[number]])
        _add_product(db, low[:, at : at + db.shape[0]].t(), dy[:, begin : begin + db.shape[1]])
        at += db.shape[0]


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left right, summed in float32."""
    if total.is_cuda:
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)
    else:
        total += left.float() @ right.float()


class Stacks:
    """All adapters of a decoder, stacked: refreshed from the parameters before a pass, added to their gradients after it."""

    def __init__(self, grafts: Sequence[Graft], dtype: torch.dtype) -> None:
        self.grafts = [
            graft._replace(stack=self._make(graft, dtype)) if graft.a else graft for graft in grafts
        ]
        self._used = [graft for graft in self.grafts if graft.stack is not None]
        self._gradients = [t for g in self._used if g.stack for t in (g.stack.da, *g.stack.db)]
        self._refresh = self._add = None
        self._into: list[int] = []

    def _make(self, graft: Graft, dtype: torch.dtype) -> Stack:
        device, ranks = graft.a[0].device, sum(a.shape[0] for a in graft.a)
        return Stack(
            a=torch.zeros(ranks, graft.a[0].shape[1], dtype=dtype, device=device),
            b=torch.zeros(sum(graft.outs), ranks, dtype=dtype, device=device),
            da=torch.zeros(ranks, graft.a[0].shape[1], device=device),
            db=tuple(torch.zeros(b.shape[1], b.shape[0], device=device) for b in graft.b),
        )

    def refresh(self) -> None:
        """Take the adapters as they are now, and forget their stacked gradients."""
        if not self._used:
            return
        torch._foreach_zero_(self._gradients)
        if self._refresh is None:
            self._refresh = _copies(self._parts(), add=False)
        self._refresh.run()

    def add(self) -> None:
        """Add the stacked gradients to those of the parameters."""
        if not self._used:
            return
        parameters = [p for graft in self._used for p in (*graft.a, *graft.b)]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        into = [parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None]
        if self._add is None or into != self._into:
            self._add, self._into = _copies(self._gradient_parts(), add=True), into
        self._add.run()

    def _parts(self) -> list[tuple[Tensor, Tensor, float]]:
        found = []
        for graft in self._used:
            assert graft.stack is not None
            at = 0
            for number, (a, b) in enumerate(zip(graft.a, graft.b, strict=True)):
                rank, begin = b.shape[1], sum(graft.outs[: graft.places[number]])
                found.append((a.detach(), graft.stack.a[at : at + rank], 1.0))
                found.append(
                    (
                        b.detach(),
                        graft.stack.b[begin : begin + b.shape[0], at : at + rank],
                        graft.scales[number],
                    )
                )
                at += rank
        return found

    def _gradient_parts(self) -> list[tuple[Tensor, Tensor, float]]:
        found = []
        for graft in self._used:
            assert graft.stack is not None
            at = 0
            for number, (a, b) in enumerate(zip(graft.a, graft.b, strict=True)):
                assert a.grad is not None and b.grad is not None
                found.append((graft.stack.da[at : at + b.shape[1]], a.grad, 1.0))
                found.append((graft.stack.db[number].t(), b.grad, graft.scales[number]))
                at += b.shape[1]
        return found


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


def _gradient(graft: Graft, da: Tensor, db: Tensor) -> GraftGradient:
    """Cut the stacked gradients into those of each layer."""
    starts = [sum(graft.outs[:place]) for place in range(len(graft.outs))]
    ga, gb, at = [], [], 0
    for number, b in enumerate(graft.b):
        rank, begin = b.shape[1], starts[graft.places[number]]
        end = begin + graft.outs[graft.places[number]]
        ga.append(da[at : at + rank].float().contiguous())
        gb.append((db[at : at + rank, begin:end].t().float() * graft.scales[number]).contiguous())
        at += rank
    return GraftGradient(tuple(ga), tuple(gb))
