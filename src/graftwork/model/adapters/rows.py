"""Several adapters in one batch: each row of a batch has its own, or none.

In: a model with adapters, the names of those that take part. Out: their matrices stacked for each layer, so
that all rows cost two thin products whatever adapters they have; a mask keeps each row to its own part.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from graftwork.model.adapters.experts import acts_on_experts
from graftwork.model.adapters.full_weights import acting_weights, weight_set_names
from graftwork.model.adapters.lora import LoraLinear, RowChange


class _Stack(NamedTuple):
    """The adapters of one layer."""

    a: Tensor
    """[all ranks, inputs]."""
    b: Tensor
    """[outputs, all ranks], scaled."""
    layout: tuple[int, ...]
    """The adapter that each rank belongs to, counted from 1."""
    stretch: Tensor | None
    """[1 + adapters, outputs]: what DoRA multiplies with; 1 where an adapter has no magnitudes."""


class AdapterRows:
    """Call `choose` before each pass, and `act` around the passes in which rows differ."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
        names = dict.fromkeys(name for layer in self._layers for name in layer.scales)
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._dtype = dtype
        self._masks: dict[tuple[int, ...], Tensor] = {}
        self._choice = torch.zeros(0, dtype=torch.long)
        self._stacks = stacks = [_stack(layer, self._numbers, dtype) for layer in self._layers]
        self._changes = [None if stack is None else _change(self, stack) for stack in stacks]
        device = self._layers[0].device if self._layers else torch.device("cpu")
        self._owners = {
            stack.layout: torch.tensor(stack.layout, device=device) for stack in stacks if stack is not None
        }

    def update(self) -> None:
        """Read the adapters again, into the same tensors."""
        for layer, held in zip(self._layers, self._stacks, strict=True):
            now = _stack(layer, self._numbers, self._dtype)
            if held is None or now is None:
                continue
            held.a.copy_(now.a)
            held.b.copy_(now.b)
            if held.stretch is not None and now.stretch is not None:
                held.stretch.copy_(now.stretch)

    def number_of(self, name: str | None) -> int:
        """0 for the base, and for weights that act as a whole."""
        return self._numbers.get(name, 0) if name is not None else 0

    def choose(self, numbers: Tensor) -> None:
        """The adapter of each row of the next pass."""
        self._choice = numbers
        self._masks = {
            layout: (owner[None, :] == numbers[:, None]).to(self._dtype)
            for layout, owner in self._owners.items()
        }

    def act(self, acting: bool) -> None:
        for layer, change in zip(self._layers, self._changes, strict=True):
            layer.row_change = change if acting else None

    def mask(self, layout: tuple[int, ...]) -> Tensor:
        return self._masks[layout]

    @property
    def choice(self) -> Tensor:
        return self._choice


def _change(rows: AdapterRows, stack: _Stack) -> RowChange:
    def change(x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        mask = rows.mask(stack.layout)
        low = torch.nn.functional.linear(x, stack.a).view(len(mask), -1, mask.shape[1]) * mask[:, None]
        changed = torch.addmm(y.reshape(-1, y.shape[-1]), low.flatten(0, 1), stack.b.t())
        if stack.stretch is None:
            return changed.view(y.shape)
        stretch = stack.stretch[rows.choice][:, None]
        changed = changed.view(len(mask), -1, y.shape[-1])
        changed = stretch * changed if bias is None else stretch * (changed - bias) + bias
        return changed.view(y.shape)

    return change


def _stack(layer: LoraLinear, numbers: dict[str, int], dtype: torch.dtype) -> _Stack | None:
    names = [name for name in numbers if name in layer.scales]
    if not names:
        return None
    parts = [(layer.lora_A[name], layer.lora_B[name] * layer.scales[name]) for name in names]
    layout = tuple(numbers[name] for name in names for _ in range(layer.lora_A[name].shape[0]))
    stretch = None
    if stretched := [name for name in names if name in layer.lora_magnitude_vector]:
        stretch = torch.ones(len(numbers) + 1, layer.out_features, dtype=dtype, device=layer.device)
        for name in stretched:
            stretch[numbers[name]] = layer.stretch_of(name).detach().to(dtype)
    return _Stack(
        a=torch.cat([a for a, _ in parts]).detach().to(dtype),
        b=torch.cat([b for _, b in parts], dim=1).detach().to(dtype).contiguous(),
        layout=layout,
        stretch=stretch,
    )


def active_adapter(model: Any) -> str | None:
    """The adapter or the set of weights that acts in all rows."""
    if (acting := acting_weights(model)) is not None:
        return acting
    for module in model.modules():
        if isinstance(module, LoraLinear):
            return module.active
    return None


def weights_of_adapter(model: Any, name: str | None) -> str | None:
    """The set of whole weights, or the adapter of experts, that a name means: requests with different ones
    cannot share a pass."""
    return name if name in weight_set_names(model) or acts_on_experts(model, name) else None
