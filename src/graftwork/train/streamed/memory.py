"""Memory of the streaming engine: asynchronous copies, and a count of device bytes.

In: sizes and a device. Out: lanes that copy next to the computation, the peak by what it is for. On a
processor a lane copies at once, so that all of the engine runs without a card.
"""

from collections import defaultdict

import torch
from torch import Tensor

ALIGNED_ELEMENTS = 64
"""Tensors in a flat buffer begin at multiples of this: Adam's kernel then treats all elements alike."""


def aligned(elements: int) -> int:
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


class DeviceBytes:
    """What the engine holds on the device by its own count: tensors that outlive the pass of a block."""

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.peak = 0
        self.parts: dict[str, int] = {}
        """What was held at the peak."""

    def take(self, part: str, size: int) -> None:
        self.held[part] += size
        total = sum(self.held.values())
        if total > self.peak:
            self.peak, self.parts = total, {name: held for name, held in self.held.items() if held}

    def give_back(self, part: str, size: int) -> None:
        self.held[part] -= size

    def drop(self, *parts: str) -> None:
        """Whatever is held of these is gone."""
        for part in parts:
            self.held[part] = 0


class Mark:
    """The end of a copy."""

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self._event = event

    def wait(self) -> None:
        """What is computed from now on comes after it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """The host goes on after it."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """Copies in their order, next to the computation; each begins after what was computed before it.

    The caller holds the device's tensor until the computation has waited for the mark. A tensor that is freed
    earlier would have to be recorded with the allocator, which reuses its memory only after it has seen the
    end of the copy: what is reserved would depend on timing.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def copy(self, target: Tensor, source: Tensor) -> Mark:
        if self._stream is None:
            target.copy_(source)
            return Mark()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Mark(event)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
