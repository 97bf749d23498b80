"""The adapters of one product: several linear layers that read the same input, done at once.

In: the A and B of each (q, k, v or gate, up or a single one). Out: one stacked A and one B with the
layers' blocks on its diagonal, scales folded in, so that all of them cost one thin product each way.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from graftwork.train.gpu.frozen import FrozenWeight, product, transposed_product


class LoraGroup(NamedTuple):
    """Adapters beside one frozen product. Empty tuples where nothing is adapted."""

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    scales: tuple[float, ...]
    outs: tuple[int, ...]
    """Output widths of the layers side by side, also of those without an adapter (their b is absent)."""
    places: tuple[int, ...]
    """Which of the layers each adapter belongs to."""


class LoraGradient(NamedTuple):
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]


def stacked_a(graft: LoraGroup, dtype: torch.dtype) -> Tensor:
    return torch.cat([a.to(dtype) for a in graft.a])


def stacked_b(graft: LoraGroup, dtype: torch.dtype) -> Tensor:
    """[all outputs, all ranks], zero where an output does not belong to the rank's layer."""
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


def lora_product(frozen: FrozenWeight, graft: LoraGroup, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x Wᵀ + s (x Aᵀ) Bᵀ, and x Aᵀ, which the backward pass wants again."""
    y = product(frozen, x)
    if not graft.a:
        return y, None
    low = x @ stacked_a(graft, x.dtype).t()
    add_thin(y, low, stacked_b(graft, x.dtype).t())
    return y, low


def input_gradient(
    frozen: FrozenWeight, graft: LoraGroup, dy: Tensor, base: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input, and of x Aᵀ. `base` is dy W where somebody has computed it already."""
    dx = transposed_product(frozen, dy) if base is None else base
    if not graft.a:
        return dx, None
    dlow = dy @ stacked_b(graft, dy.dtype)
    add_thin(dx, dlow, stacked_a(graft, dy.dtype))
    return dx, dlow


def thin_gradient(graft: LoraGroup, dy: Tensor) -> Tensor | None:
    """The gradient of x Aᵀ alone, for a block below which nobody asks."""
    return dy @ stacked_b(graft, dy.dtype) if graft.a else None


def lora_gradient(
    graft: LoraGroup, x: Tensor, low: Tensor | None, dy: Tensor, dlow: Tensor | None
) -> LoraGradient:
    """The gradient of A and B."""
    if low is None or dlow is None:
        return LoraGradient((), ())
    return _gradient(graft, dlow.t() @ x, low.t() @ dy)


def _gradient(graft: LoraGroup, da: Tensor, db: Tensor) -> LoraGradient:
    """Cut the stacked gradients into those of each layer."""
    starts = [sum(graft.outs[:place]) for place in range(len(graft.outs))]
    ga, gb, at = [], [], 0
    for number, b in enumerate(graft.b):
        rank, begin = b.shape[1], starts[graft.places[number]]
        end = begin + graft.outs[graft.places[number]]
        ga.append(da[at : at + rank].float().contiguous())
        gb.append((db[at : at + rank, begin:end].t().float() * graft.scales[number]).contiguous())
        at += rank
    return LoraGradient(tuple(ga), tuple(gb))
