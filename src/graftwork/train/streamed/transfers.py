"""What travels between host and device: weights of blocks, their gradients, the inputs of blocks.

Each kind has a lane of its own. Weights have two slots on the device: one is computed with while the other
is filled. Gradients have two: one is added to while the other is copied back.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graftwork.train.pinned_memory import host_buffer
from graftwork.train.streamed.memory import CopyLane, DeviceBytes, Mark
from graftwork.train.streamed.units import HostUnit, measure_norms

SLOTS = 2
LEAVING = 2
"""Inputs on their way to the host at once: the host waits before it launches more, or all would be there."""


@dataclass(frozen=True)
class Placement:
    """Where the device's side of everything is, and who counts it."""

    device: torch.device
    dtype: torch.dtype
    """Of weights and activations."""
    bytes: DeviceBytes

    @property
    def pinned(self) -> bool:
        return self.device.type == "cuda"

    def buffer(self, elements: int, dtype: torch.dtype, part: str) -> Tensor:
        made = torch.empty(elements, dtype=dtype, device=self.device)
        self.bytes.take(part, made.nbytes)
        return made


class WeightSlots:
    """Weights of blocks on the device. `use` gives those of a block, `prefetch` begins to fetch another."""

    def __init__(
        self, units: list[HostUnit], placement: Placement, *, ready: Callable[[HostUnit], None]
    ) -> None:
        most = max(unit.elements for unit in units)
        self._units = units
        self._ready = ready
        self._lane = CopyLane(placement.device)
        self._slots = [placement.buffer(most, placement.dtype, "weights") for _ in range(SLOTS)]
        self._marks = [Mark() for _ in range(SLOTS)]
        self._holds: list[int | None] = [None] * SLOTS
        self._used = 0
        """The slot that is computed with."""

    def use(self, at: int) -> dict[str, Tensor]:
        """The weights of a block, for everything that is computed from now on."""
        self.prefetch(at)
        self._used = self._holds.index(at)
        self._marks[self._used].wait()
        unit = self._units[at]
        return unit.views(self._slots[self._used][: unit.elements])

    def prefetch(self, at: int) -> None:
        """Begin to fetch a block into the slot that is not in use, after what is computed until now."""
        if not 0 <= at < len(self._units) or at in self._holds:
            return
        slot = 1 - self._used
        unit = self._units[at]
        self._ready(unit)
        self._holds[slot] = at
        self._marks[slot] = self._lane.copy(self._slots[slot][: unit.elements], unit.working)

    def forget(self) -> None:
        """The weights on the host have changed."""
        self._holds = [None] * SLOTS


class GradientSlots:
    """Gradients on their way to the host: added up over the passes of a step, measured, copied."""

    def __init__(self, units: list[HostUnit], placement: Placement) -> None:
        self._placement = placement
        self._most = max((unit.elements for unit in units if unit.trained), default=0)
        self._lane = CopyLane(placement.device)
        self._slots = [placement.buffer(self._most, placement.dtype, "gradients") for _ in range(SLOTS)]
        self._marks = [Mark() for _ in range(SLOTS)]
        self._turn = 0
        self._sums: Tensor | None = None

    def begin(self, unit: HostUnit, *, passes: int) -> "GradientSum":
        """Where the gradients of a unit are added up."""
        self._turn = (self._turn + 1) % SLOTS
        self._marks[self._turn].wait()
        slot = self._slots[self._turn][: unit.elements]
        if passes == 1 or slot.dtype == torch.float32:
            return GradientSum(unit, slot)
        if self._sums is None:
            # Several passes are added up in float32, whatever they are computed in.
            self._sums = self._placement.buffer(self._most, torch.float32, "gradients")
        return GradientSum(unit, self._sums[: unit.elements])

    def send(self, summed: "GradientSum") -> None:
        """Begin to copy it to the host."""
        unit, slot = summed.unit, self._slots[self._turn][: summed.unit.elements]
        if summed.flat.data_ptr() != slot.data_ptr():
            slot.copy_(summed.flat)
        assert unit.gradient is not None
        measure_norms(unit, slot)
        self._marks[self._turn] = self._lane.copy(unit.gradient, slot)

    def synchronize(self) -> None:
        self._lane.synchronize()


class GradientSum:
    """Gradients of a unit's weights, in one flat buffer of the device."""

    def __init__(self, unit: HostUnit, flat: Tensor) -> None:
        self.unit, self.flat = unit, flat
        self._views = unit.views(flat)
        self._begun: set[str] = set()
        if unit.elements != sum(view.numel() for view in self._views.values()):
            flat.zero_()

    def add(self, gradients: Mapping[str, Tensor | None]) -> None:
        """A weight that a pass does not use has no gradient there."""
        for name, gradient in gradients.items():
            if gradient is None:
                continue
            if name in self._begun:
                self._views[name].add_(gradient)
            else:
                self._views[name].copy_(gradient)
                self._begun.add(name)

    def finish(self) -> None:
        """What no pass has used has a gradient of zero."""
        for name in self._views.keys() - self._begun:
            self._views[name].zero_()


class BlockInputs:
    """The hidden states that blocks start from, until their backward pass: on the device, or on the host."""

    def __init__(self, placement: Placement, *, on_host: int) -> None:
        self._placement = placement
        self._on_host = on_host
        """Blocks, from the bottom, whose inputs wait on the host."""
        self._there: dict[tuple[int, int], Tensor] = {}
        self._away: dict[tuple[int, int], tuple[Tensor, torch.Size]] = {}
        self._coming: dict[tuple[int, int], tuple[Tensor, Mark]] = {}
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._leaving: deque[tuple[Mark, Tensor]] = deque()
        self._down, self._up = CopyLane(placement.device), CopyLane(placement.device)

    def put(self, block: int, portion: int, hidden: Tensor) -> None:
        key = (block, portion)
        if block >= self._on_host:
            self._arrive()
            self._placement.bytes.take("inputs", hidden.nbytes)
            self._there[key] = hidden
            return
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < hidden.numel():
            buffer = host_buffer(hidden.numel(), hidden.dtype, pinned=self._placement.pinned)
            self._buffers[key] = buffer
        target = buffer[: hidden.numel()]
        flat = hidden.reshape(-1)
        self._leaving.append((self._down.copy(target, flat), flat))
        self._away[key] = (target, hidden.shape)
        self._arrive(but=LEAVING)

    def _arrive(self, *, but: int = 0) -> None:
        """Wait until all but a few are on the host."""
        while len(self._leaving) > but:
            self._leaving[0][0].synchronize()
            self._leaving.popleft()

    def prefetch(self, block: int, portion: int) -> None:
        key = (block, portion)
        if key not in self._away or key in self._coming:
            return
        flat, shape = self._away.pop(key)
        # What went down last must be there before it comes back.
        self._arrive()
        hidden = torch.empty(shape, dtype=flat.dtype, device=self._placement.device)
        self._placement.bytes.take("inputs", hidden.nbytes)
        self._coming[key] = (hidden, self._up.copy(hidden.view(-1), flat))

    def take(self, block: int, portion: int) -> Tensor:
        """Hidden states without other references."""
        key = (block, portion)
        self.prefetch(block, portion)
        if key in self._coming:
            hidden, mark = self._coming.pop(key)
            mark.wait()
        else:
            hidden = self._there.pop(key)
        self._placement.bytes.give_back("inputs", hidden.nbytes)
        return hidden

    def drop(self) -> None:
        """Forget everything: the step was abandoned."""
        self._arrive()
        self._up.synchronize()
        for kept in (self._there, self._away, self._coming):
            kept.clear()
