"""Weights in host memory, in the groups that travel together, and what travels between host and device.

Input: a model in host memory. Output: units whose float32 weights, working copies, gradients and moments are
flat buffers; the model's parameters become views of them, so that checkpoints and digests see what is
trained. Weights and gradients have two slots each on the device: one is computed with while the other is
copied.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts
from graftwork.records.errors import UserError
from graftwork.train.host_memory import CopyLane, DeviceMemory, Mark, aligned, host_buffer


@dataclass
class HostUnit:
    """Weights that are transferred together. `gradient` and `moments` are None if the weights are frozen."""

    name: str
    begins: dict[str, int]
    """Offset of each parameter in a flat buffer."""
    parameters: dict[str, nn.Parameter]
    """By the name within the module that uses them."""
    master: Tensor
    working: Tensor
    """The weights as used by the device; the master itself if it has the same type."""
    gradient: Tensor | None = None
    moments: tuple[Tensor, Tensor] | None = None
    updates: int = 0
    """Number of updates included in the moments."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The norm of the last gradient of each parameter."""

    @property
    def trained(self) -> bool:
        return self.gradient is not None

    @property
    def elements(self) -> int:
        return self.master.numel()

    def view(self, name: str, flat: Tensor) -> Tensor:
        """The part of a flat buffer that is a parameter's."""
        start, parameter = self.begins[name], self.parameters[name]
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: self.view(name, flat) for name in self.parameters}

    def refresh(self) -> None:
        """Update the working copy from the master."""
        if self.working is not self.master:
            self.working.copy_(self.master)


@dataclass
class ModelUnits:
    """A model split into units. `head` is None if the head shares the embedding."""

    table: HostUnit
    outer: HostUnit
    blocks: list[HostUnit]
    head: HostUnit | None

    def in_order(self) -> list[HostUnit]:
        """In the order of a forward pass."""
        return [self.table, self.outer, *self.blocks, *([self.head] if self.head is not None else [])]

    def owner(self, parameter: nn.Parameter) -> tuple[HostUnit, str]:
        return self._owners[id(parameter)]

    def __post_init__(self) -> None:
        self._owners = {
            id(parameter): (unit, name)
            for unit in self.in_order()
            for name, parameter in unit.parameters.items()
        }


def cut_up(
    model: Any, dtype: torch.dtype, *, pinned: bool = False, pinned_states: bool = False
) -> ModelUnits:
    """Move the weights of a model in host memory into units, one after the other. `dtype` is that of the
    working copies. Buffers for transfers are pinned, with `pinned_states` also masters and moments.
    """
    parts = decoder_parts(model)
    embedding = model.get_input_embeddings()
    within = {id(parameter) for block in parts.blocks for parameter in block.parameters()}
    in_table = {id(parameter) for parameter in embedding.parameters()}
    head = {
        name: parameter for name, parameter in parts.head.named_parameters() if id(parameter) not in in_table
    }
    apart = within | in_table | {id(parameter) for parameter in head.values()}
    outer = {
        name: parameter for name, parameter in parts.decoder.named_parameters() if id(parameter) not in apart
    }
    tied = any(id(parameter) in in_table for parameter in parts.head.parameters())
    assigned = apart | {id(parameter) for parameter in outer.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in assigned:
            raise _cannot(f"{name} belongs neither to its decoder nor to its head")
    if len(in_table) > 1 or (tied and head):
        raise _cannot("its embedding or its head has more than one weight")

    def unit(name: str, parameters: dict[str, nn.Parameter]) -> HostUnit:
        begins, end = {}, 0
        for key, parameter in parameters.items():
            begins[key] = end
            end += aligned(parameter.numel())
        is_float32 = dtype == torch.float32
        master = host_buffer(end, torch.float32, pinned=pinned_states or (pinned and is_float32))
        working = master if is_float32 else host_buffer(end, dtype, pinned=pinned)
        host_unit = HostUnit(name, begins, parameters, master, working)
        for key, parameter in parameters.items():
            view = host_unit.view(key, master)
            view.copy_(parameter.detach())
            parameter.data = view
        host_unit.refresh()
        if any(parameter.requires_grad for parameter in parameters.values()):
            # Rows of the table are added up on the host, in float32.
            kind = torch.float32 if name == "embedding" else dtype
            host_unit.gradient = host_buffer(end, kind, pinned=pinned)
            first, second = (host_buffer(end, torch.float32, pinned=pinned_states) for _ in range(2))
            host_unit.moments = (first, second)
        return host_unit

    return ModelUnits(
        table=unit("embedding", dict(embedding.named_parameters())),
        outer=unit("outer", outer),
        blocks=[
            unit(f"block {index}", dict(block.named_parameters())) for index, block in enumerate(parts.blocks)
        ],
        head=unit("head", head) if not tied else None,
    )


def _cannot(why: str) -> UserError:
    return UserError(
        "this model cannot be streamed from host memory",
        why=why,
        fix="set `train.strategy: fsdp`, or remove `train.offload`",
    )


def add_rows(table: HostUnit, tokens: Tensor, gradient: Tensor, *, padding: int | None) -> None:
    """Add the gradient of looked-up rows to that of the table; the row of `padding` is not trained. Rows of
    the same token are summed on the device in order, for bit-identical results.
    """
    assert table.gradient is not None
    (name,) = table.parameters
    flat = tokens.reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows, counts = torch.unique_consecutive(flat[order], return_counts=True)
    sorted_rows = gradient.reshape(len(flat), -1)[order].float()
    summed = torch.segment_reduce(sorted_rows, "sum", lengths=counts, axis=0)
    if padding is not None:
        summed[rows == padding] = 0
    table.view(name, table.gradient).index_add_(0, rows.cpu(), summed.cpu())


def gradient_norm(units: ModelUnits, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The norm of the whole gradient, on the host."""
    norms = []
    for parameter in parameters:
        unit, name = units.owner(parameter)
        norms.append(unit.norms[name].to("cpu"))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def measure_norms(unit: HostUnit, flat: Tensor) -> None:
    """Record the norm of each gradient in `flat`, on any device."""
    unit.norms = {
        name: torch.linalg.vector_norm(view, dtype=torch.float32) for name, view in unit.views(flat).items()
    }


SLOTS = 2
LEAVING = 2
"""Inputs in transfer to the host at the same time: the host waits before it launches more, to bound
memory.
"""


class WeightSlots:
    """Weights of blocks on the device. `use` returns those of a block, `prefetch` begins to fetch another."""

    def __init__(
        self, units: list[HostUnit], memory: DeviceMemory, *, ready: Callable[[HostUnit], None]
    ) -> None:
        most = max(unit.elements for unit in units)
        self._units = units
        self._ready = ready
        self._lane = CopyLane(memory.device)
        self._slots = [memory.buffer(most, memory.dtype, "weights") for _ in range(SLOTS)]
        self._marks = [Mark() for _ in range(SLOTS)]
        self._holds: list[int | None] = [None] * SLOTS
        self._used = 0
        """The slot in use."""

    def use(self, index: int) -> dict[str, Tensor]:
        """The weights of a block, for all later computation."""
        self.prefetch(index)
        self._used = self._holds.index(index)
        self._marks[self._used].wait()
        unit = self._units[index]
        return unit.views(self._slots[self._used][: unit.elements])

    def prefetch(self, index: int) -> None:
        """Begin to fetch a block into the free slot, after the computation so far."""
        if not 0 <= index < len(self._units) or index in self._holds:
            return
        slot = 1 - self._used
        unit = self._units[index]
        self._ready(unit)
        self._holds[slot] = index
        self._marks[slot] = self._lane.copy(self._slots[slot][: unit.elements], unit.working)

    def forget(self) -> None:
        """Call after the weights on the host have changed."""
        self._holds = [None] * SLOTS


class GradientSlots:
    """Gradients in transfer to the host: accumulated over the passes of a step, measured, copied."""

    def __init__(self, units: list[HostUnit], memory: DeviceMemory) -> None:
        self._memory = memory
        self._most = max((unit.elements for unit in units if unit.trained), default=0)
        self._lane = CopyLane(memory.device)
        self._slots = [memory.buffer(self._most, memory.dtype, "gradients") for _ in range(SLOTS)]
        self._marks = [Mark() for _ in range(SLOTS)]
        self._turn = 0
        self._sums: Tensor | None = None

    def begin(self, unit: HostUnit, *, passes: int) -> "GradientSum":
        """Return the accumulator of a unit's gradients."""
        self._turn = (self._turn + 1) % SLOTS
        self._marks[self._turn].wait()
        slot = self._slots[self._turn][: unit.elements]
        if passes == 1 or slot.dtype == torch.float32:
            return GradientSum(unit, slot)
        if self._sums is None:
            # Several passes are added up in float32, whatever they are computed in.
            self._sums = self._memory.buffer(self._most, torch.float32, "gradients")
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
        """Weights that no pass has used get a gradient of zero."""
        for name in self._views.keys() - self._begun:
            self._views[name].zero_()


class BlockInputs:
    """The inputs of blocks until their backward pass: on the device, or on the host."""

    def __init__(self, memory: DeviceMemory, *, on_host: int) -> None:
        self._memory = memory
        self._on_host = on_host
        """Blocks, from the bottom, whose inputs are offloaded to the host."""
        self._there: dict[tuple[int, int], Tensor] = {}
        self._away: dict[tuple[int, int], tuple[Tensor, torch.Size]] = {}
        self._coming: dict[tuple[int, int], tuple[Tensor, Mark]] = {}
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._leaving: deque[tuple[Mark, Tensor]] = deque()
        self._down, self._up = CopyLane(memory.device), CopyLane(memory.device)

    def put(self, block: int, portion: int, hidden: Tensor) -> None:
        key = (block, portion)
        if block >= self._on_host:
            self._arrive()
            self._memory.take("inputs", hidden.nbytes)
            self._there[key] = hidden
            return
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < hidden.numel():
            buffer = host_buffer(hidden.numel(), hidden.dtype, pinned=self._memory.device.type == "cuda")
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
        hidden = torch.empty(shape, dtype=flat.dtype, device=self._memory.device)
        self._memory.take("inputs", hidden.nbytes)
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
        self._memory.give_back("inputs", hidden.nbytes)
        return hidden

    def drop(self) -> None:
        """Forget everything: the step was abandoned."""
        self._arrive()
        self._up.synchronize()
        for states in (self._there, self._away, self._coming):
            states.clear()
