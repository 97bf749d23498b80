"""LoRA adapters: attached to a model, saved and loaded as plain PEFT folders.

In: a model and the shape of an adapter, or a PEFT folder. Out: the model with adapters beside its
linear layers; the base weights stay where and what they are. Several adapters can be attached at
once; one of them, or none, is active.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from graftwork.files.whole import folder_made_whole, write_whole
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."


class AdapterShape(Record):
    """Which linear layers get an adapter, and of what rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    layers: tuple[int, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class LoraLinear(nn.Module):
    """A frozen linear layer with low-rank adapters beside it: y = W x + scale · B (A x)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ParameterDict()
        self.lora_B = nn.ParameterDict()
        self.scales: dict[str, float] = {}
        self.active: str | None = None

    def add(self, name: str, a: Tensor, b: Tensor, scale: float) -> None:
        self.lora_A[name] = nn.Parameter(a)
        self.lora_B[name] = nn.Parameter(b)
        self.scales[name] = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        if self.active is None or self.active not in self.scales:
            return y
        low = nn.functional.linear(x, self.lora_A[self.active])
        return y + nn.functional.linear(low, self.lora_B[self.active]) * self.scales[self.active]


def attach(model: Any, shape: AdapterShape, *, name: str = "default", seed: int) -> list[nn.Parameter]:
    """Add a fresh adapter: A random from `seed` alone, B zero, so that nothing changes at first."""
    generator = torch.Generator().manual_seed(seed)
    parameters: list[nn.Parameter] = []
    for _, layer in _targets(model, shape):
        linear = layer.base_layer
        bound = 1 / math.sqrt(linear.in_features)
        a = torch.empty(shape.rank, linear.in_features).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(linear.out_features, shape.rank)
        device = linear.weight.device
        layer.add(name, a.to(device), b.to(device), shape.scale)
        parameters += [layer.lora_A[name], layer.lora_B[name]]
    activate(model, name)
    return parameters


def activate(model: Any, name: str | None) -> None:
    """Let one adapter act, or none: then the model is its base."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.active = name


@contextmanager
def acting(model: Any, name: str | None) -> Iterator[None]:
    activate(model, name)
    try:
        yield
    finally:
        activate(model, None)


def adapter_tensors(model: Any, *, name: str = "default") -> dict[str, Tensor]:
    """The adapter's weights under the names that PEFT gives them."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and name in module.scales:
            tensors[f"{PREFIX}{path}.lora_A.weight"] = module.lora_A[name].detach()
            tensors[f"{PREFIX}{path}.lora_B.weight"] = module.lora_B[name].detach()
    return tensors


def save_adapter(model: Any, folder: Path, *, shape: AdapterShape, base: str, name: str = "default") -> None:
    """Write a folder that PEFT, vLLM and the Hugging Face Hub take as it is."""
    tensors = {k: v.float().cpu().contiguous() for k, v in adapter_tensors(model, name=name).items()}
    with folder_made_whole(folder) as temporary:
        write_whole(temporary / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_whole(temporary / CONFIG_FILE, json.dumps(_peft_config(shape, base), indent=2))


def load_adapter(model: Any, folder: Path, *, name: str = "default") -> AdapterShape:
    """Attach the adapter of a PEFT folder, every tensor in its place or not at all."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    shape = _shape_of(config, layers=model.config.num_hidden_layers, where=str(folder))
    tensors = load_file(folder / WEIGHTS_FILE)
    for path, layer in _targets(model, shape):
        try:
            a = tensors.pop(f"{PREFIX}{path}.lora_A.weight")
            b = tensors.pop(f"{PREFIX}{path}.lora_B.weight")
        except KeyError as missing:
            raise UserMistake(
                f"the adapter has no tensor {missing}",
                why="its config names a layer that its weights do not hold",
                fix="use the adapter with the base that it was trained on",
                where=str(folder),
            ) from missing
        weight = layer.base_layer.weight
        if a.shape[1] != weight.shape[1] or b.shape[0] != weight.shape[0]:
            raise UserMistake(
                f"the adapter does not fit {path}",
                why=f"the layer is {tuple(weight.shape)}, the adapter {tuple(b.shape)} × {tuple(a.shape)}",
                fix="use the adapter with the base that it was trained on",
                where=str(folder),
            )
        layer.add(name, a.to(weight.device), b.to(weight.device), shape.scale)
    if tensors:
        raise UserMistake(
            f"the adapter has {len(tensors)} tensors that the base has no place for",
            why=f"the first is {next(iter(tensors))}",
            fix="use the adapter with the base that it was trained on",
            where=str(folder),
        )
    activate(model, name)
    return shape


def _targets(model: Any, shape: AdapterShape) -> Iterator[tuple[str, LoraLinear]]:
    """Each linear layer that gets an adapter, wrapped where it is not yet."""
    wanted = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | LoraLinear)
        and path.rsplit(".", 1)[-1] in shape.targets
        and _layer_of(path) in shape.layers
    ]
    if not wanted:
        raise UserMistake(
            f"no layer of the model is named {', '.join(shape.targets)}",
            fix="set `train.targets` to names of its linear layers",
        )
    for path, module in wanted:
        if isinstance(module, LoraLinear):
            yield path, module
            continue
        wrapped = LoraLinear(module)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, wrapped)
        yield path, wrapped


def _layer_of(path: str) -> int:
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)


def _peft_config(shape: AdapterShape, base: str) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": list(shape.targets),
        "layers_to_transform": list(shape.layers),
        "layers_pattern": None,
        "modules_to_save": None,
    }


def _shape_of(config: dict[str, Any], *, layers: int, where: str) -> AdapterShape:
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise UserMistake(
            "only plain LoRA adapters can be loaded",
            fix="merge the adapter into its base and serve that",
            where=where,
        )
    chosen = config.get("layers_to_transform")
    if isinstance(chosen, int):
        chosen = [chosen]
    return AdapterShape(
        rank=config["r"],
        alpha=config["lora_alpha"],
        targets=tuple(config["target_modules"]),
        layers=tuple(range(layers) if chosen is None else chosen),
    )
