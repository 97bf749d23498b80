"""Copies of a card's tensors on the host, for a checkpoint that is written while training goes on.

In: named tensors. Out: the same names on the host, unchanged by later steps. Pages that cannot be
swapped take what a card sends ten times as fast, and nobody need wait for it; but they are slow to get.
So they are got once, in two lots that take turns: one is written while the other is filled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ALIGNED = 64
BUFFERS = 2


class HostCopies:
    """Whoever takes copies must be done with those of the last time but one."""

    def __init__(self) -> None:
        self._lots: list[Tensor | None] = [None] * BUFFERS
        self._turn = 0

    def take(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Copies of all of them, complete when this returns."""
        import torch

        on_card = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device.type == "cuda"}
        copies = dict(zip(on_card, self._room(list(on_card.values())), strict=True))
        for name, tensor in on_card.items():
            copies[name].copy_(tensor, non_blocking=True)
        if on_card:
            torch.cuda.synchronize()
        return {
            name: copies[name] if name in copies else tensor.detach().to("cpu", copy=True)
            for name, tensor in tensors.items()
        }

    def _room(self, tensors: "list[Tensor]") -> "list[Tensor]":
        """A place for each in the lot whose turn it is."""
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        lot = self._lots[self._turn]
        if end and (lot is None or lot.numel() < end):
            lot = self._lots[self._turn] = pinned_buffer(end)
        self._turn = (self._turn + 1) % BUFFERS
        return [
            lot[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(begins, tensors, strict=True)
            if lot is not None
        ]


def pinned_buffer(size: int) -> "Tensor":
    """Bytes that a card can write to directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
