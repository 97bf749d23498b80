"""Adam over units in host memory: on the host in slices, or on the card with slices streamed through it.

In: units with gradients, the factor that clips them, a learning rate. Out: updated weights, moments and
working copies. A thread updates the units in the order in which the next forward pass asks for them; `wait`
blocks until one of them is done.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from graftwork.train.streamed.units import HostUnit

SLICE_ELEMENTS = 1 << 22
"""Elements that are updated at once: few enough for a slice of the gradient to stay in the cache."""


class AdamSettings(NamedTuple):
    """As torch.optim.AdamW has them."""

    weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


class StreamedAdam:
    def __init__(
        self,
        units: Sequence[HostUnit],
        settings: AdamSettings,
        *,
        on: Literal["host", "card"] = "host",
        device: torch.device,
        overlapped: bool = True,
        slice_elements: int = SLICE_ELEMENTS,
    ) -> None:
        self._units = [unit for unit in units if unit.trained]
        self._settings = settings
        self._slice = slice_elements
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="update") if overlapped and self._units else None
        )
        self._pending: dict[int, Future[None]] = {}
        self._on, self._device = on, device
        self._buffers: list[_SliceBuffers] = []

    def begin(self, scale: float, rate: float) -> None:
        """Update all units with their gradients times `scale`."""
        self.finish()
        for unit in self._units:
            unit.updates += 1
            if self._threads is None:
                self._update(unit, scale, rate)
            else:
                self._pending[id(unit)] = self._threads.submit(self._update, unit, scale, rate)

    def wait(self, unit: HostUnit) -> None:
        """Until this unit is updated."""
        pending = self._pending.pop(id(unit), None)
        if pending is not None:
            pending.result()

    def finish(self) -> None:
        """Until all units are updated."""
        for unit in self._units:
            self.wait(unit)

    @torch.no_grad()
    def _update(self, unit: HostUnit, scale: float, rate: float) -> None:
        assert unit.gradient is not None
        assert unit.moments is not None
        if self._on == "card":
            self._update_on_card(unit, scale, rate)
            return
        gradient = torch.empty(min(self._slice, unit.elements), dtype=torch.float32)
        for part in self._slices(unit.elements):
            some = gradient[: part.stop - part.start]
            some.copy_(unit.gradient[part]).mul_(scale)
            tensors = (unit.master[part], some, unit.moments[0][part], unit.moments[1][part])
            self._step(tensors, unit.updates, rate)
            if unit.working is not unit.master:
                unit.working[part].copy_(unit.master[part])

    def _update_on_card(self, unit: HostUnit, scale: float, rate: float) -> None:
        """Two slices at a time on the card: one is fetched while the other is stepped and sent back."""
        assert unit.gradient is not None
        assert unit.moments is not None
        if not self._buffers:
            self._buffers = [_SliceBuffers(self._slice, self._device) for _ in range(2)]
        for number, part in enumerate(self._slices(unit.elements)):
            buffers, size = self._buffers[number % 2], part.stop - part.start
            with buffers.apart():
                master, first, second, gradient = (buffer[:size] for buffer in buffers.tensors)
                held = (unit.master[part], unit.moments[0][part], unit.moments[1][part])
                for target, source in zip((master, first, second), held, strict=True):
                    target.copy_(source, non_blocking=True)
                sent = buffers.sent(size, unit.gradient.dtype)
                sent.copy_(unit.gradient[part], non_blocking=True)
                gradient.copy_(sent).mul_(scale)
                self._step((master, gradient, first, second), unit.updates, rate)
                for target, source in zip(held, (master, first, second), strict=True):
                    target.copy_(source, non_blocking=True)
                if unit.working is not unit.master:
                    sent = buffers.sent(size, unit.working.dtype)
                    sent.copy_(master)
                    unit.working[part].copy_(sent, non_blocking=True)
        for buffers in self._buffers:
            buffers.synchronize()

    def _slices(self, elements: int) -> list[slice]:
        return [slice(begin, min(begin + self._slice, elements)) for begin in range(0, elements, self._slice)]

    def _step(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], updates: int, rate: float) -> None:
        weights, gradient, first, second = tensors
        settings = self._settings
        adamw(
            [weights],
            [gradient],
            [first],
            [second],
            [],
            # The count before this update: the kernel adds one to it, for each slice to its own.
            [torch.full((), float(updates - 1), device=weights.device)],
            fused=True,
            amsgrad=False,
            beta1=settings.beta1,
            beta2=settings.beta2,
            lr=rate,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
            maximize=False,
        )


class _SliceBuffers:
    """A slice on the card: weights, both moments and the gradient in float32, and what travels in 16 bits."""

    def __init__(self, elements: int, device: torch.device) -> None:
        card = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if card else None  # type: ignore[no-untyped-call]
        self.tensors = tuple(torch.empty(elements, device=device) for _ in range(4))
        self._sent = torch.empty(4 * elements, dtype=torch.uint8, device=device)
        if self._stream is not None:
            # What had this memory before may still be computed with.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def apart(self) -> AbstractContextManager[Any]:
        """What is launched within goes on next to the computation."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def sent(self, size: int, dtype: torch.dtype) -> Tensor:
        """Room for `size` numbers on their way."""
        return self._sent.view(dtype)[:size]
