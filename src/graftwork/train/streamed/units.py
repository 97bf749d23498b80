"""The groups of weights that travel together: each block, the head, and what is outside of them.

In: a model in host memory. Out: units whose float32 weights, working copies, gradients and moments are flat
buffers of the host. The model's parameters become views of the float32 weights, so that whatever reads the
model (checkpoints, digests, the saved folder) sees what is trained.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts
from graftwork.records.errors import UserMistake
from graftwork.train.pinned_memory import host_buffer
from graftwork.train.streamed.memory import aligned


class ViewSpec(NamedTuple):
    """Where a parameter is in a flat buffer."""

    begin: int
    shape: torch.Size

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.begin : self.begin + self.shape.numel()].view(self.shape)


@dataclass
class HostUnit:
    """Weights that travel together. `gradient` and `moments` are None where the weights are frozen."""

    name: str
    specs: dict[str, ViewSpec]
    """By the name within the module that computes with them."""
    parameters: dict[str, nn.Parameter]
    master: Tensor
    working: Tensor
    """The weights as the device computes with them; the master itself if it is in the same type."""
    gradient: Tensor | None = None
    moments: tuple[Tensor, Tensor] | None = None
    updates: int = 0
    """Updates that the moments have seen."""
    norms: dict[str, Tensor] = field(default_factory=dict)
    """The length of the last gradient of each parameter."""

    @property
    def trained(self) -> bool:
        return self.gradient is not None

    @property
    def elements(self) -> int:
        return self.master.numel()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: spec.of(flat) for name, spec in self.specs.items()}

    def refresh(self) -> None:
        """The working copy follows the master."""
        if self.working is not self.master:
            self.working.copy_(self.master)


@dataclass
class ModelUnits:
    """A model, cut up. `head` is None if the head shares the table of the embedding."""

    table: HostUnit
    outer: HostUnit
    blocks: list[HostUnit]
    head: HostUnit | None

    def in_order(self) -> list[HostUnit]:
        """As a forward pass asks for them."""
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
    """Move the weights of a model in host memory into units, one after the other.

    `dtype` is that of the working copies. What the device copies from and to is pinned, with `pinned_states`
    also masters and moments.
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
    known = apart | {id(parameter) for parameter in outer.values()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise _cannot(f"{name} belongs neither to its decoder nor to its head")
    if len(in_table) > 1 or (tied and head):
        raise _cannot("its embedding or its head has more than one weight")

    def unit(name: str, parameters: dict[str, nn.Parameter]) -> HostUnit:
        specs, end = {}, 0
        for key, parameter in parameters.items():
            specs[key] = ViewSpec(end, parameter.shape)
            end += aligned(parameter.numel())
        own = dtype == torch.float32
        master = host_buffer(end, torch.float32, pinned=pinned_states or (pinned and own))
        for key, parameter in parameters.items():
            view = specs[key].of(master)
            view.copy_(parameter.detach())
            parameter.data = view
        working = master if own else host_buffer(end, dtype, pinned=pinned)
        made = HostUnit(name, specs, parameters, master, working)
        made.refresh()
        if any(parameter.requires_grad for parameter in parameters.values()):
            # Rows of the table are added up on the host, in float32.
            kind = torch.float32 if name == "embedding" else dtype
            made.gradient = host_buffer(end, kind, pinned=pinned)
            first, second = (host_buffer(end, torch.float32, pinned=pinned_states) for _ in range(2))
            made.moments = (first, second)
        return made

    return ModelUnits(
        table=unit("embedding", dict(embedding.named_parameters())),
        outer=unit("outer", outer),
        blocks=[unit(f"block {at}", dict(block.named_parameters())) for at, block in enumerate(parts.blocks)],
        head=unit("head", head) if not tied else None,
    )


def _cannot(why: str) -> UserMistake:
    return UserMistake(
        "this model cannot be streamed from host memory",
        why=why,
        fix="set `train.strategy: fsdp`, or remove `train.offload`",
    )


def add_rows(table: HostUnit, tokens: Tensor, gradient: Tensor, *, padding: int | None) -> None:
    """Add the gradient of looked-up rows to that of the table; the row of `padding` is not trained.

    Rows of the same token are summed on the device, in their order: the same bits every time.
    """
    assert table.gradient is not None
    (spec,) = table.specs.values()
    flat = tokens.reshape(-1)
    order = torch.argsort(flat, stable=True)
    rows, counts = torch.unique_consecutive(flat[order], return_counts=True)
    sorted_rows = gradient.reshape(len(flat), -1)[order].float()
    summed = torch.segment_reduce(sorted_rows, "sum", lengths=counts, axis=0)
    if padding is not None:
        summed[rows == padding] = 0
    spec.of(table.gradient).index_add_(0, rows.cpu(), summed.cpu())


def gradient_norm(units: ModelUnits, parameters: Sequence[nn.Parameter]) -> Tensor:
    """The length of the whole gradient, on the host."""
    norms = []
    for parameter in parameters:
        unit, name = units.owner(parameter)
        norms.append(unit.norms[name].to("cpu"))
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def measure_norms(unit: HostUnit, flat: Tensor) -> None:
    """Remember the length of each gradient in `flat`, wherever that is."""
    unit.norms = {
        name: torch.linalg.vector_norm(view, dtype=torch.float32) for name, view in unit.views(flat).items()
    }
