"""Whether the processor's own step can be used for a model, and how much it may spend on speed.

In: a model with its adapters, the rows of the run, the machine's memory and the run's folder. Out: the
way and a word about it, or None: then the plain way trains it to the same loss.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graftwork.model.lora import LoraLinear
from graftwork.model.parts import PLAIN, parts_of
from graftwork.process.memory import machine_memory
from graftwork.records.dataset import Row
from graftwork.records.units import GIB
from graftwork.train.cpu.block import KNOWN
from graftwork.train.cpu.store import Budget, InFile, InMemory, Nowhere, States, Trunkload, choose_place
from graftwork.train.cpu.trunk import beginning_of, number_rows
from graftwork.train.cpu.way import ProcessorWay
from graftwork.train.order import plan_steps
from graftwork.train.settings import TrainSettings

MEMORY_SHARE = 1 / 8
"""Of the machine's memory, for packed weights, and as much again for hidden states."""
DISK_SHARE = 1 / 4
"""Of the free disk, for hidden states that memory has no room for."""
OPERATIONS_A_SECOND = 6e10
"""Of one thread; only says when a slow disk is slower than computing."""
ROTARY = ("default", "llama3", "linear", "yarn")
"""Rotary positions that do not depend on how long a batch is."""


def processor_way(
    model: Any, rows: Sequence[Row], *, settings: TrainSettings, folder: Path
) -> tuple[ProcessorWay, str] | None:
    first = first_learning(model)
    if first is None or not is_known(model, longest=max(len(row.tokens) for row in rows)):
        return None
    memory = machine_memory().get("limit", 0.0) * GIB
    packed = packed_bytes(model, first) <= memory * MEMORY_SHARE
    load = weigh_trunk(model, first, rows, settings=settings)
    budget = Budget(
        memory_bytes=memory * MEMORY_SHARE,
        disk_bytes=shutil.disk_usage(folder).free * DISK_SHARE,
        operations_a_second=torch.get_num_threads() * OPERATIONS_A_SECOND,
    )
    choice = choose_place(load, budget)
    states: States = InMemory() if choice.place == "memory" else Nowhere()
    if choice.place == "file":
        skipped = len(beginning_of(rows)) + 1
        lengths = tuple(len(tokens) - skipped for tokens in number_rows(rows))
        states = InFile(folder, lengths=lengths, width=model.config.hidden_size, dtype=model.dtype)
    word = f"the frozen trunk's output is kept {_where(choice.place)}: {choice.why}"
    return ProcessorWay(model, first, rows, states=states, packed=packed), word


def is_known(model: Any, *, longest: int) -> bool:
    """Blocks as ours do them, on a processor, in float32, and nothing learns but adapters."""
    config, parts = model.config, parts_of(model)
    if any(p.device.type != "cpu" for p in model.parameters()) or model.dtype != torch.float32:
        return False
    if any(type(block).__name__ not in KNOWN for block in parts.blocks) or config.model_type not in PLAIN:
        return False
    window = getattr(config, "sliding_window", None)
    if window is not None and window < longest and getattr(config, "use_sliding_window", True):
        return False
    attentions: list[Any] = [block.self_attn for block in parts.blocks]
    scaled = [attention.scaling != attention.head_dim**-0.5 for attention in attentions]
    rotary = getattr(parts.decoder.rotary_emb, "rope_type", "default")
    return rotary in ROTARY and not any(scaled) and not model.training and _only_adapters_learn(model)


def first_learning(model: Any) -> int | None:
    """The lowest block with something to learn."""
    blocks = enumerate(parts_of(model).blocks)
    return next((at for at, block in blocks if any(p.requires_grad for p in block.parameters())), None)


def packed_bytes(model: Any, first: int) -> int:
    """What the packed copies take: one of each weight, two where the gradient comes back."""
    parts = parts_of(model)
    below = sum(_linear_weights(block) for block in parts.blocks[:first])
    above = sum(_linear_weights(block) for block in [*parts.blocks[first:], parts.head])
    return (below + 2 * above) * int(parts.head.weight.element_size())


def weigh_trunk(model: Any, first: int, rows: Sequence[Row], *, settings: TrainSettings) -> Trunkload:
    skipped = len(beginning_of(rows)) + 1
    steps = plan_steps(rows, settings=settings)
    return Trunkload(
        distinct_tokens=sum(len(tokens) - skipped for tokens in number_rows(rows)),
        visited_tokens=sum(len(rows[at].tokens) - skipped for step in steps for at in step),
        bytes_a_token=model.config.hidden_size * parts_of(model).head.weight.element_size(),
        operations_a_token=2.0 * sum(_linear_weights(block) for block in parts_of(model).blocks[:first]),
    )


def _linear_weights(module: Any) -> int:
    return sum(part.weight.numel() for part in module.modules() if type(part) is nn.Linear)


def _only_adapters_learn(model: Any) -> bool:
    """Then frozen weights can be copied: the copies stay true."""
    adapters = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, LoraLinear)
        for name, parameter in module.named_parameters()
        if name.startswith("lora_")
    }
    return all(id(p) in adapters for p in model.parameters() if p.requires_grad)


def _where(place: str) -> str:
    return {"memory": "in memory", "file": "in a file of the run's folder", "nowhere": "nowhere"}[place]
