"""Weights learned as a whole: saved as a folder like a model's, loaded next to the base's own.

Input: a model whose weights are trained, or a folder of such weights. Output: the folder (model.safetensors,
config.json), or a model that holds both sets of weights and lets one act, as it does with adapters. Costs the
memory of the whole model again for every set.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from graftwork.files.disk import atomic_folder, write_atomic
from graftwork.model.parts import decoder_parts
from graftwork.records.errors import UserError

FULL_WEIGHTS_FILE = "model.safetensors"
MODEL_CONFIG_FILE = "config.json"
_WEIGHT_SETS = "_graft_weight_sets"


class WeightSets:
    """The base's tensors and those trained in their place, by the name of the set."""

    def __init__(self, model: Any) -> None:
        self.base = {name: parameter.data for name, parameter in weights_of(model).items()}
        self.learned: dict[str, dict[str, Tensor]] = {}
        self.acting: str | None = None


def holds_full_weights(folder: Path) -> bool:
    return (folder / FULL_WEIGHTS_FILE).is_file() and (folder / MODEL_CONFIG_FILE).is_file()


def weights_of(model: Any) -> dict[str, nn.Parameter]:
    """The model's own parameters by their own names; an adapter around a layer lengthens them."""
    return {
        name.replace(".base_layer", ""): parameter
        for name, parameter in model.named_parameters()
        if ".lora_" not in name
    }


def unfreeze_weights(model: Any, layers: tuple[int, ...]) -> list[nn.Parameter]:
    """Make the weights trainable: all of them, or those of the chosen blocks."""
    parts = decoder_parts(model)
    whole = len(layers) == len(parts.blocks)
    trainable = (
        model.parameters() if whole else (p for index in layers for p in parts.blocks[index].parameters())
    )
    parameters = list(trainable)
    for parameter in parameters:
        parameter.requires_grad_(True)
    return parameters


def learned_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights that are trained, by name."""
    return {name: weight.detach() for name, weight in weights_of(model).items() if weight.requires_grad}


def save_full(model: Any, folder: Path) -> None:
    """Write a folder that transformers loads as a model."""
    tensors = {name: weight.detach().cpu().contiguous() for name, weight in weights_of(model).items()}
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / FULL_WEIGHTS_FILE, metadata={"format": "pt"})
        write_atomic(temporary / MODEL_CONFIG_FILE, model.config.to_json_string())


def load_full(model: Any, folder: Path, *, name: str) -> None:
    """Keep the folder's weights next to the base's; `act` swaps them."""
    weights = weights_of(model)
    tensors = load_file(folder / FULL_WEIGHTS_FILE)
    _require_fit(weights, tensors, folder)
    weight_sets: WeightSets | None = getattr(model, _WEIGHT_SETS, None)
    if weight_sets is None:
        weight_sets = WeightSets(model)
        object.__setattr__(model, _WEIGHT_SETS, weight_sets)
    weight_sets.learned[name] = {
        key: tensor.to(weights[key].device, weights[key].dtype) for key, tensor in tensors.items()
    }
    if weight_sets.acting == name:
        weight_sets.acting = None  # The set was replaced: the next activation uses the new one.


@torch.no_grad()
def start_from_full(model: Any, folder: Path) -> None:
    """Continue from trained weights: they become the model's own."""
    weights = weights_of(model)
    tensors = load_file(folder / FULL_WEIGHTS_FILE)
    _require_fit(weights, tensors, folder)
    for name, tensor in tensors.items():
        weights[name].copy_(tensor)


def weight_set_names(model: Any) -> frozenset[str]:
    weight_sets: WeightSets | None = getattr(model, _WEIGHT_SETS, None)
    return frozenset() if weight_sets is None else frozenset(weight_sets.learned)


def acting_weights(model: Any) -> str | None:
    """Return the set that is active in place of the base's weights."""
    weight_sets: WeightSets | None = getattr(model, _WEIGHT_SETS, None)
    return None if weight_sets is None else weight_sets.acting


def activate_weights(model: Any, name: str | None) -> None:
    """Activate the weights of a set; those of the base if no set has this name."""
    weight_sets: WeightSets | None = getattr(model, _WEIGHT_SETS, None)
    if weight_sets is None:
        return
    target = name if name in weight_sets.learned else None
    if target == weight_sets.acting:
        return
    tensors = weight_sets.base if target is None else weight_sets.learned[target]
    for key, parameter in weights_of(model).items():
        parameter.data = tensors[key]
    weight_sets.acting = target


def _require_fit(weights: dict[str, nn.Parameter], tensors: dict[str, Tensor], folder: Path) -> None:
    """Every weight must fit, or none is used."""
    for name in sorted(weights.keys() | tensors.keys()):
        mine, theirs = weights.get(name), tensors.get(name)
        if mine is not None and theirs is not None and mine.shape == theirs.shape:
            continue
        sizes = [f"{tuple(t.shape)}" if t is not None else "not there" for t in (mine, theirs)]
        raise UserError(
            f"the learned weights do not fit {name}",
            why=f"in the base it is {sizes[0]}, in the folder {sizes[1]}",
            fix="use the weights with the base that they were trained from, in its full precision",
            where=str(folder),
        )
