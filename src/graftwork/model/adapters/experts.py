"""Adapters of experts: the stacked weights of a mixture-of-experts layer with a low-rank change each.

In: the module that holds the stacks, of [experts, outputs, inputs] each. Out: the same module, its stacks
changed by one adapter or none while it runs. Tensors have the names and the layout that PEFT gives them
(`target_parameters`): A is [experts · rank, inputs], B [outputs, rank · experts].
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.parts import decoder_parts
from graftwork.records.errors import UserMistake

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
        for parts, at in ((self.lora_A, 0), (self.lora_B, 1)):
            parts[name] = nn.ParameterDict(
                {
                    stack: nn.Parameter(pair[at].detach().to(self.device, torch.float32, copy=True))
                    for stack, pair in tensors.items()
                }
            )
        self.scales[name] = scale

    @property
    def device(self) -> torch.device:
        return next(iter(self.stacks.values())).device

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if self.active is None or self.active not in self.scales:
            return self.base_layer(*arguments, **named)
        changed = {}
        for stack in self.adapted(self.active):
            weight = self.stacks[stack]
            a, b = (tensor.to(weight.dtype) for tensor in self.pair(self.active, stack))
            experts = weight.shape[0]
            low = a.view(experts, -1, a.shape[1])
            high = b.view(b.shape[0], -1, experts).permute(2, 0, 1)
            changed[stack] = torch.baddbmm(weight, high, low, alpha=self.scales[self.active])
        return functional_call(self.base_layer, changed, arguments, named)

    def adapted(self, name: str) -> tuple[str, ...]:
        """The stacks that an adapter changes, in the order of the module."""
        held: Any = self.lora_A[name]
        return tuple(stack for stack in self.stacks if stack in held)

    def pair(self, name: str, stack: str) -> tuple[nn.Parameter, nn.Parameter]:
        a: Any = self.lora_A[name]
        b: Any = self.lora_B[name]
        return a[stack], b[stack]

    def named_pairs(self, name: str) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """(what PEFT puts behind the module's path, A, B): it wraps a module once for each stack, the last
        one outermost."""
        stacks = self.adapted(name)
        for at, stack in enumerate(stacks):
            yield ".base_layer" * (len(stacks) - 1 - at), *self.pair(name, stack)


def expert_stacks(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that hold all experts of a layer."""
    return {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == STACKED_DIMENSIONS
    }


def expert_modules(model: Any) -> Iterator[tuple[int, str, nn.Module]]:
    """(block, path, module) of each module that holds stacks, or of what wraps it."""
    parts = decoder_parts(model)
    for number, block in enumerate(parts.blocks):
        for path, module in block.named_modules():
            wrapped = isinstance(module, LoraExperts)
            if wrapped or (expert_stacks(module) and not path.endswith("base_layer")):
                yield number, f"{parts.blocks_path}.{number}.{path}", module


def wrap_experts(model: Any, shape: AdapterShape) -> Iterator[tuple[str, LoraExperts]]:
    """The expert layers that an adapter of this shape changes, wrapped where they are not yet."""
    if not shape.experts:
        return
    found = list(expert_modules(model))
    if not found:
        raise UserMistake(
            "the model has no experts that could be adapted",
            why="no block holds the weights of several experts in one tensor",
            fix="set `train.experts: false`",
            where="train.experts",
        )
    for block, path, module in found:
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
    """What adapter_config.json names: ends of paths, or whole ones where not all blocks are adapted, which
    PEFT does not choose by `layers_to_transform`."""
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
