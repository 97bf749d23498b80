"""Host memory of a GPU: pinned buffers and copies, lanes that copy next to the computation, a count of bytes.

Input: sizes, tensors, a device. Output: buffers that a GPU reads and writes directly, copies that later steps
do not change, the peak of device bytes by what it is for. On a CPU a lane copies at once, so that the
streaming engine runs without a GPU.
"""

import mmap
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor


def host_buffer(elements: int, dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A flat tensor of zeros. Its pages are allocated when first written. Not from torch's pinned allocator,
    which rounds sizes up to powers of two.
    """
    size = max(elements, 1) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    with suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(pages, dtype=dtype)[:elements]
    if pinned and elements:
        pin(buffer)
    return buffer


def pin(buffer: Tensor) -> bool:
    """Pin the pages of a buffer permanently. If that fails, copies still work, but wait for each other."""
    # All threads fetch the pages, which locking would do with one.
    buffer.zero_()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if code:
        # The error would be reported by the next kernel.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda").add_(1)
    return code == 0


ALIGNED_ELEMENTS = 64
"""Tensors in a flat buffer are aligned to multiples of this: Adam's kernel then treats all elements alike."""


def aligned(elements: int) -> int:
    return -(-elements // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS


class DeviceMemory:
    """The engine's own count of device memory: tensors that outlive the pass of a block. `dtype` is that of
    weights and activations.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.held: dict[str, int] = defaultdict(int)
        self.peak = 0
        self.parts: dict[str, int] = {}
        """Memory by purpose at the peak."""

    def buffer(self, elements: int, dtype: torch.dtype, part: str) -> Tensor:
        buffer = torch.empty(elements, dtype=dtype, device=self.device)
        self.take(part, buffer.nbytes)
        return buffer

    def take(self, part: str, size: int) -> None:
        self.held[part] += size
        total = sum(self.held.values())
        if total > self.peak:
            self.peak, self.parts = (
                total,
                {name: size_held for name, size_held in self.held.items() if size_held},
            )

    def give_back(self, part: str, size: int) -> None:
        self.held[part] -= size

    def drop(self, *parts: str) -> None:
        """Mark these as freed."""
        for part in parts:
            self.held[part] = 0


class Mark:
    """The end of a copy."""

    def __init__(self, event: "torch.cuda.Event | None" = None) -> None:
        self._event = event

    def wait(self) -> None:
        """Later computation waits for it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """The host waits for it."""
        if self._event is not None:
            self._event.synchronize()


class CopyLane:
    """Copies in order, parallel to the computation; each begins after what was computed before it. The caller
    keeps the device's tensor until the computation has waited for the mark. A tensor that is freed earlier
    would have to be recorded with the allocator, which reuses its memory only after it has seen the end of
    the copy: the reserved memory would depend on timing.
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


BUFFER_ALIGNMENT = 64
BUFFERS = 2


class HostCopies:
    """Copies of tensors on the host, in pinned memory for those of a GPU.

    Pinned memory is fast to copy to but slow to allocate, so two buffers take turns: one is written to disk
    while the other is filled. The caller must be done with the copies of the call before last.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._turn = 0

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of all tensors, complete when this returns."""
        on_gpu = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device.type == "cuda"}
        copies = dict(zip(on_gpu, self._allocate(list(on_gpu.values())), strict=True))
        for name, tensor in on_gpu.items():
            copies[name].copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return {
            name: copies[name] if name in copies else tensor.detach().to("cpu", copy=True)
            for name, tensor in tensors.items()
        }

    def _allocate(self, tensors: list[Tensor]) -> list[Tensor]:
        """Space for each tensor in the next buffer."""
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        buffer = self._buffers[self._turn]
        if end and (buffer is None or buffer.numel() < end):
            buffer = self._buffers[self._turn] = pinned_buffer(end)
        self._turn = (self._turn + 1) % BUFFERS
        return [
            buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(begins, tensors, strict=True)
            if buffer is not None
        ]


def pinned_buffer(size: int) -> Tensor:
    """Host memory that a GPU can write to directly."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
