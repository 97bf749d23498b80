"""Layers with low-rank adapters: linear ones, stacked experts, and one adapter for each row of a batch.

Input: a frozen layer of any kind that multiplies by a weight, or the module that holds the stacks of its
experts, [experts, outputs, inputs] each. Output: the same layer, of which one adapter or none acts. Adapters
are kept in float32 and work in the type of what flows through. Tensors of experts have the names and the
layout that PEFT gives them (`target_parameters`): A is [experts · rank, inputs], B [outputs, rank · experts].
Knows no files. The training steps of each device write this product out: `train/cpu/linear.py`,
`train/gpu/linear.py`.

`AdapterRows` stacks the matrices of several adapters for each layer, so that all rows of a batch cost two
thin products whatever adapters they have; a mask keeps each row to its own part.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.adapters.full_weights import acting_weights, weight_set_names
from graftwork.model.nf4 import Nf4Linear, dequantize
from graftwork.model.parts import decoder_parts, is_transposed, layer_sizes
from graftwork.records.errors import UserError

RowChange = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Applies adapters to the output of a layer, given its input, its output and its bias."""


class LoraLinear(nn.Module):
    """y = W x + scale · B (A x); with magnitudes m, each output is scaled by m / |W + scale · B A|."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.in_features, self.out_features = layer_sizes(base)
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.lora_magnitude_vector = nn.ParameterDict()
        self.scales: dict[str, float] = {}
        self.active: str | None = None
        self.row_change: RowChange | None = None
        """Set while the rows of a batch have their own adapters; `active` is ignored then."""
        self._squares: Tensor | None = None
        self._lengths: dict[str, tuple[tuple[int, ...], Tensor]] = {}

    @property
    def device(self) -> torch.device:
        base = self.base_layer
        where: torch.device = base.device if isinstance(base, Nf4Linear) else base.weight.device
        return where

    def add(self, name: str, a: Tensor, b: Tensor, scale: float, *, magnitude: Tensor | None = None) -> None:
        self.lora_A[name] = self._own(a)
        self.lora_B[name] = self._own(b)
        if magnitude is not None:
            self.lora_magnitude_vector[name] = self._own(magnitude)
        self.scales[name] = scale

    def _own(self, tensor: Tensor) -> nn.Parameter:
        # The alignment of a tensor can change the last bit of a product, so all tensors are copied.
        return nn.Parameter(tensor.detach().to(self.device, torch.float32, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.row_change is not None:
            return self.row_change(x, y, self.base_layer.bias)
        return y if self.active is None or self.active not in self.scales else self.change(x, y, self.active)

    def change(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """Apply an adapter to the layer's own output `y`."""
        low = nn.functional.linear(x, self.lora_A[name].to(x.dtype))
        change = nn.functional.linear(low, self.lora_B[name].to(x.dtype)) * self.scales[name]
        if name not in self.lora_magnitude_vector:
            return y + change
        stretch = self.stretch_of(name)
        bias: Tensor | None = self.base_layer.bias
        if bias is None:
            return stretch.to(y.dtype) * (y + change)
        return stretch.to(y.dtype) * (y - bias + change) + bias

    def stretch_of(self, name: str) -> Tensor:
        """Return DoRA's factor per output: m / |W + scale · B A|. As DoRA prescribes, no gradient flows
        through the norm. It is computed in expanded form, without a second matrix of the size of W. For
        inference it is cached as long as A and B stay the same.
        """
        magnitude: Tensor = self.lora_magnitude_vector[name]
        a, b = self.lora_A[name], self.lora_B[name]
        state = (a._version, b._version, a.data_ptr(), b.data_ptr())
        if not torch.is_grad_enabled() and name in self._lengths and self._lengths[name][0] == state:
            return magnitude / self._lengths[name][1]
        with torch.no_grad():
            scale, squares = self.scales[name], self.base_lengths().square()
            crossed = (weight_matrix(self.base_layer).float() @ a.T * b).sum(dim=1)
            update_squares = (b @ (a @ a.T) * b).sum(dim=1)
            length: Tensor = (
                (squares + 2 * scale * crossed + scale * scale * update_squares).clamp(min=0).sqrt()
            )
        if not torch.is_grad_enabled():
            self._lengths[name] = (state, length)
        return magnitude / length

    @torch.no_grad()
    def base_lengths(self) -> Tensor:
        """Return the norm of each row of W: a fresh adapter's magnitudes."""
        if self._squares is None:
            self._squares = weight_matrix(self.base_layer).float().square().sum(dim=1)
        return self._squares.sqrt()


def weight_matrix(layer: Any) -> Tensor:
    """Return the layer's weight as [out, in], however it is stored."""
    if isinstance(layer, Nf4Linear):
        return dequantize(layer.quantized, torch.float32)
    weight: Tensor = layer.weight.detach()
    return weight.T if is_transposed(layer) else weight


STACKED_DIMENSIONS = 3


class LoraExperts(nn.Module):
    """Each stack W becomes W + scale · B A, expert by expert."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict()
        self.lora_B = nn.ModuleDict()
        self.scales: dict[str, float] = {}
        self.active: str | None = None

    @property
    def stacks(self) -> dict[str, nn.Parameter]:
        return expert_stacks(self.base_layer)

    def add(self, name: str, tensors: dict[str, tuple[Tensor, Tensor]], scale: float) -> None:
        """`tensors` are A and B by the name of the stack."""
        for parts, index in ((self.lora_A, 0), (self.lora_B, 1)):
            parts[name] = nn.ParameterDict(
                {
                    stack: nn.Parameter(pair[index].detach().to(self.device, torch.float32, copy=True))
                    for stack, pair in tensors.items()
                }
            )
        self.scales[name] = scale

    @property
    def device(self) -> torch.device:
        return next(iter(self.stacks.values())).device

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        if self.active is None or self.active not in self.scales:
            return self.base_layer(*arguments, **keywords)
        changed = {}
        for stack in self.adapted(self.active):
            weight = self.stacks[stack]
            a, b = (tensor.to(weight.dtype) for tensor in self.pair(self.active, stack))
            experts = weight.shape[0]
            low = a.view(experts, -1, a.shape[1])
            high = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
            changed[stack] = torch.baddbmm(weight, high, low, alpha=self.scales[self.active])
        return functional_call(self.base_layer, changed, arguments, keywords)

    def adapted(self, name: str) -> tuple[str, ...]:
        """The stacks that an adapter changes, in the order of the module."""
        parameters: Any = self.lora_A[name]
        return tuple(stack for stack in self.stacks if stack in parameters)

    def pair(self, name: str, stack: str) -> tuple[nn.Parameter, nn.Parameter]:
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        return a[stack], b[stack]

    def named_pairs(self, name: str) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(what PEFT puts after the module's path, A, B): PEFT wraps a module once for each stack, the last
        one outermost.
        """
        stacks = self.adapted(name)
        for index, stack in enumerate(stacks):
            yield ".base_layer" * (len(stacks) - 1 - index), *self.pair(name, stack)


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that hold all experts of a layer."""
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == STACKED_DIMENSIONS
    }


def expert_modules(model: Any) -> Iterator[tuple[int, str, nn.Module]]:
    """(block, path, module) of each module that holds stacks, or of its wrapper."""
    parts = decoder_parts(model)
    for number, block in enumerate(parts.blocks):
        for path, module in block.named_modules():
            wrapped = isinstance(module, LoraExperts)
            if wrapped or (expert_stacks(module) and not path.endswith("base_layer")):
                yield number, f"{parts.blocks_path}.{number}.{path}", module


def wrap_experts(model: Any, shape: AdapterShape) -> Iterator[tuple[str, LoraExperts]]:
    """The expert layers that an adapter of this shape changes, wrapped if necessary."""
    if not shape.experts:
        return
    modules = list(expert_modules(model))
    if not modules:
        raise UserError(
            "the model has no experts that could be adapted",
            why="no block holds the weights of several experts in one tensor",
            fix="set `train.experts: false`",
            where="train.experts",
        )
    for block, path, module in modules:
        if block not in shape.layers:
            continue
        wrapped = module if isinstance(module, LoraExperts) else LoraExperts(module)
        if wrapped is not module:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, wrapped)
        yield path, wrapped


def fresh_pairs(
    layer: LoraExperts, rank: int, generator: torch.Generator
) -> dict[str, tuple[Tensor, Tensor]]:
    """A random, B zero."""
    pairs = {}
    for name, stack in layer.stacks.items():
        experts, outputs, inputs = stack.shape
        bound = 1 / math.sqrt(inputs)
        a = torch.empty(experts * rank, inputs).uniform_(-bound, bound, generator=generator)
        pairs[name] = (a, torch.zeros(outputs, rank * experts))
    return pairs


def target_parameters(model: Any, shape: AdapterShape) -> list[str]:
    """Names for adapter_config.json: suffixes of paths, or whole paths if not all blocks are adapted, which
    PEFT does not choose by `layers_to_transform`.
    """
    if not shape.experts:
        return []
    parts = decoder_parts(model)
    names = []
    for block, path, module in expert_modules(model):
        stacks = module.stacks if isinstance(module, LoraExperts) else expert_stacks(module)
        whole = len(shape.layers) < len(parts.blocks)
        end = path if whole else path.removeprefix(f"{parts.blocks_path}.{block}.")
        names += [f"{end}.{stack}" for stack in stacks] if block in shape.layers else []
    return list(dict.fromkeys(names))


def acts_on_experts(model: Any, name: str | None) -> bool:
    return name is not None and any(
        name in module.scales for module in model.modules() if isinstance(module, LoraExperts)
    )


class _Stack(NamedTuple):
    """The adapters of one layer."""

    a: Tensor
    """[all ranks, inputs]."""
    b: Tensor
    """[outputs, all ranks], scaled."""
    layout: tuple[int, ...]
    """The adapter that each rank belongs to, counted from 1."""
    stretch: Tensor | None
    """[1 + adapters, outputs]: DoRA's factors; 1 if an adapter has no magnitudes."""


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
        """Read the adapters again into the same tensors."""
        for layer, current in zip(self._layers, self._stacks, strict=True):
            now = _stack(layer, self._numbers, self._dtype)
            if current is None or now is None:
                continue
            current.a.copy_(now.a)
            current.b.copy_(now.b)
            if current.stretch is not None and now.stretch is not None:
                current.stretch.copy_(now.stretch)

    def number_of(self, name: str | None) -> int:
        """0 for the base, and for weights that act as a whole."""
        return self._numbers.get(name, 0) if name is not None else 0

    def choose(self, numbers: Tensor) -> None:
        """Choose the adapter of each row of the next pass."""
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
    """Return the set of full weights, or the adapter of experts, that a name means: requests with different
    ones cannot share a pass.
    """
    return name if name in weight_set_names(model) or acts_on_experts(model, name) else None
