"""LoRA adapters: attached to a model, saved and loaded as plain PEFT folders.

Input: a model and the shape of an adapter, or a PEFT folder. Output: the model with adapters next to its
linear layers; the base weights stay where and what they are. Several adapters can be attached at once; one of
them, or none, is active. A folder of full weights is taken like an adapter. `make_trainable` and
`save_trained` are what the trainer calls, whatever the method.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from graftwork.files.disk import atomic_folder, explain_os_error, write_atomic
from graftwork.model.adapter_shape import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterShape,
    from_peft,
    parse_peft,
    require_names,
    to_peft,
)
from graftwork.model.adapters.full_weights import (
    activate_weights,
    holds_full_weights,
    learned_weights,
    load_full,
    save_full,
    start_from_full,
    unfreeze_weights,
)
from graftwork.model.adapters.lora import (
    LoraExperts,
    LoraLinear,
    fresh_pairs,
    target_parameters,
    wrap_experts,
)
from graftwork.model.load import tensors_digest
from graftwork.model.parts import block_linears, decoder_parts, is_transposed
from graftwork.records.errors import Corrupted, UserError

PREFIX = "base_model.model."
PARTS = ("lora_A", "lora_B", "lora_magnitude_vector")


def attach(model: Any, shape: AdapterShape, *, name: str = "default", seed: int) -> list[nn.Parameter]:
    """Add a fresh adapter: A random, determined by `seed`, B zero, so that the output is unchanged at
    first."""
    generator = torch.Generator().manual_seed(seed)
    parameters: list[nn.Parameter] = []
    for path, layer in _targets(model, shape):
        rank = shape.rank_of(path)
        bound = 1 / math.sqrt(layer.in_features)
        a = torch.empty(rank, layer.in_features).uniform_(-bound, bound, generator=generator)
        b = torch.zeros(layer.out_features, rank)
        magnitude = layer.base_lengths() if shape.kind == "dora" else None
        layer.add(name, a, b, shape.scale_of(path), magnitude=magnitude)
        parameters += [getattr(layer, part)[name] for part in PARTS if name in getattr(layer, part)]
    for path, experts in wrap_experts(model, shape):
        experts.add(name, fresh_pairs(experts, shape.rank, generator), shape.scale_of(path))
        parameters += [tensor for _, *pair in experts.named_pairs(name) for tensor in pair]
    activate(model, name)
    return parameters


def activate(model: Any, name: str | None) -> None:
    """Activate one adapter, or none: then the model is its base."""
    activate_weights(model, name)
    for module in model.modules():
        if isinstance(module, LoraLinear | LoraExperts):
            module.active = name


@contextmanager
def acting(model: Any, name: str | None) -> Iterator[None]:
    activate(model, name)
    try:
        yield
    finally:
        activate(model, None)


def adapter_tensors(model: Any, *, name: str = "default") -> dict[str, Tensor]:
    """Return the adapter's weights under PEFT's names."""
    tensors: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear) and name in module.scales:
            for part in PARTS:
                if name in getattr(module, part):
                    tensors[_key(path, part)] = getattr(module, part)[name].detach()
        if isinstance(module, LoraExperts) and name in module.scales:
            for inside, a, b in module.named_pairs(name):
                tensors[_key(f"{path}{inside}", "lora_A")] = a.detach()
                tensors[_key(f"{path}{inside}", "lora_B")] = b.detach()
    return tensors


def save_adapter(model: Any, folder: Path, *, shape: AdapterShape, base: str, name: str = "default") -> None:
    """Write a folder that PEFT, vLLM and the Hugging Face Hub accept."""
    tensors = {k: v.float().cpu().contiguous() for k, v in adapter_tensors(model, name=name).items()}
    transposed = any(
        is_transposed(module.base_layer) for module in model.modules() if isinstance(module, LoraLinear)
    )
    with atomic_folder(folder) as temporary:
        write_atomic(temporary / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        config = to_peft(shape, base, transposed=transposed, parameters=target_parameters(model, shape))
        write_atomic(temporary / CONFIG_FILE, json.dumps(config, indent=2))


def read_config(folder: Path) -> dict[str, Any]:
    """What the adapter_config.json of a PEFT folder says."""
    try:
        text = (folder / CONFIG_FILE).read_bytes()
    except OSError as error:
        raise explain_os_error(error, folder / CONFIG_FILE) from error
    return parse_peft(text, where=str(folder))


def read_adapter_shape(model: Any, folder: Path, tensors: dict[str, Tensor]) -> AdapterShape:
    """The shape that a PEFT folder states, for this model."""
    config = read_config(folder)
    paths = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors}
    return from_peft(config, layers=len(decoder_parts(model).blocks), paths=paths, where=str(folder))


def load_adapter(model: Any, folder: Path, *, name: str = "default") -> AdapterShape | None:
    """Attach the adapter of a PEFT folder, with every tensor in its place or not at all. A folder of full
    weights has no adapter shape, so nothing is returned.
    """
    if not (folder / CONFIG_FILE).exists() and holds_full_weights(folder):
        load_full(model, folder, name=name)
        activate(model, name)
        return None
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except SafetensorError as error:
        raise Corrupted(
            f"{WEIGHTS_FILE} cannot be read",
            why=str(error)[:200],
            fix="get the adapter again from where it was made",
            where=str(folder),
        ) from error
    shape = read_adapter_shape(model, folder, tensors)
    fitting = []
    for path, layer in _targets(model, shape, where=str(folder)):
        parts = [_take(tensors, path, part, folder) for part in PARTS[: 3 if shape.kind == "dora" else 2]]
        a, b = parts[:2]
        if a.shape[1] != layer.in_features or b.shape[0] != layer.out_features:
            size = (layer.out_features, layer.in_features)
            raise _no_fit(
                f"the adapter does not fit {path}",
                f"the layer is {size}, the adapter {tuple(b.shape)} × {tuple(a.shape)}",
                folder,
            )
        magnitude = parts[2].reshape(-1) if len(parts) == 3 else None
        fitting.append((layer, a, b, shape.scale_of(path), magnitude))
    of_experts = [
        (experts, _take_pairs(tensors, path, experts, folder), shape.scale_of(path))
        for path, experts in wrap_experts(model, shape)
    ]
    if tensors:
        raise _no_fit(
            f"the adapter has {len(tensors)} tensors that the base does not have",
            f"the first is {next(iter(tensors))}",
            folder,
        )
    for layer, a, b, scale, magnitude in fitting:
        layer.add(name, a, b, scale, magnitude=magnitude)
    for experts, pairs, scale in of_experts:
        experts.add(name, pairs, scale)
    activate(model, name)
    return shape


def _take_pairs(
    tensors: dict[str, Tensor], path: str, experts: LoraExperts, folder: Path
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each stack of one expert layer."""
    pairs, stacks = {}, list(experts.stacks.items())
    for index, (stack, weight) in enumerate(stacks):
        inside = f"{path}{'.base_layer' * (len(stacks) - 1 - index)}"
        a, b = (_take(tensors, inside, part, folder) for part in PARTS[:2])
        if a.shape[1] != weight.shape[2] or b.shape[0] != weight.shape[1] or a.shape[0] != b.shape[1]:
            raise _no_fit(
                f"the adapter does not fit {path}.{stack}",
                f"the experts are {tuple(weight.shape)}, the adapter {tuple(b.shape)} × {tuple(a.shape)}",
                folder,
            )
        pairs[stack] = (a, b)
    return pairs


def _take(tensors: dict[str, Tensor], path: str, part: str, folder: Path) -> Tensor:
    try:
        return tensors.pop(_key(path, part))
    except KeyError as missing:
        raise _no_fit(
            f"the adapter has no tensor {missing}",
            "its config names a layer that its weights do not hold",
            folder,
        ) from missing


def _no_fit(what: str, why: str, folder: Path) -> UserError:
    fix = "use the adapter with the base that it was trained on"
    return UserError(what, why=why, fix=fix, where=str(folder))


def _key(path: str, part: str) -> str:
    """PEFT's name of a tensor. Magnitudes are a separate vector, not the weight of a layer."""
    return f"{PREFIX}{path}.{part}" + ("" if part == PARTS[2] else ".weight")


def _targets(model: Any, shape: AdapterShape, *, where: str = "") -> Iterator[tuple[str, LoraLinear]]:
    """Each linear layer that gets an adapter, wrapped if necessary."""
    linears = list(block_linears(model))
    names = {path.rsplit(".", 1)[-1] for _, path, _ in linears}
    paths = {path for _, path, _ in linears}
    # A name with dots is the end of a path; it counts where any path ends so.
    unmet = [t for t in shape.targets if not any(p == t or p.endswith(f".{t}") for p in paths)]
    require_names(unmet, names, setting="train.target_modules", where=where)
    for block, path, module in linears:
        if block not in shape.layers or not shape.wants(path):
            continue
        if isinstance(module, LoraLinear):
            yield path, module
            continue
        wrapped = LoraLinear(module)
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, wrapped)
        yield path, wrapped


def make_trainable(
    model: Any, shape: AdapterShape, *, seed: int, start: Path | None = None
) -> list[nn.Parameter]:
    """Return the parameters to train: fresh, or as an earlier run left them in the folder `start`."""
    if shape.kind == "full":
        if start is not None:
            if not holds_full_weights(start):
                raise UserError(
                    "there are no full weights to start from",
                    why="`method: full` starts from full weights; an adapter is something else",
                    fix="merge the adapter first (`graft release export run --format merged`), or set "
                    "`train.method: lora`",
                    where=str(start),
                )
            start_from_full(model, start)
        return unfreeze_weights(model, shape.layers)
    parameters = attach(model, shape, seed=seed)
    if start is not None:
        _start_from(model, start, shape)
    return parameters


def trained_tensors(model: Any) -> dict[str, Tensor]:
    """Return the trained tensors, by the names they are saved under."""
    return adapter_tensors(model) or learned_weights(model)


def trained_digest(model: Any) -> str:
    """Hash what is trained, after every step. Adapters by all their bytes. Whole models by the sum of each
    tensor's bits, which costs one pass over the memory instead of hashing all of it.
    """
    adapter = adapter_tensors(model)
    if adapter:
        return tensors_digest(adapter)
    return tensors_digest({name: sum_bits(weight) for name, weight in learned_weights(model).items()})


def save_trained(model: Any, folder: Path, *, shape: AdapterShape, base: str) -> None:
    """A PEFT folder, or one of full weights."""
    if shape.kind == "full":
        save_full(model, folder)
    else:
        save_adapter(model, folder, shape=shape, base=base)


@torch.no_grad()
def _start_from(model: Any, folder: Path, shape: AdapterShape) -> None:
    """Fill the fresh adapter with the weights of a folder of the same shape."""
    if not (folder / CONFIG_FILE).is_file() or not (folder / WEIGHTS_FILE).is_file():
        raise UserError(
            "the adapter to start from is not a PEFT folder",
            why=f"it lacks {CONFIG_FILE} or {WEIGHTS_FILE}",
            fix="set `train.start_from` to the folder of an adapter",
            where=str(folder),
        )
    tensors = load_file(folder / WEIGHTS_FILE)
    # Training continues only with what was trained before: same layers, ranks and strength.
    theirs, ours = (
        candidate.model_dump() | {"targets": sorted(candidate.targets), "layers": sorted(candidate.layers)}
        for candidate in (read_adapter_shape(model, folder, tensors), shape)
    )
    if differing := [key for key in theirs if theirs[key] != ours[key]]:
        names = {"kind": "method", "targets": "target_modules", "ranks": "modules", "alphas": "modules"}
        setting = names.get(differing[0], "upper_layers" if differing[0] == "layers" else differing[0])
        raise UserError(
            "the adapter to start from has a different shape than the settings",
            why="; ".join(f"{k}: it has {theirs[k]}, the settings have {ours[k]}" for k in differing),
            fix=f"set `train.{setting}` to its value, or start without it",
            where=str(folder),
        )
    current = adapter_tensors(model)
    strangers = sorted(current.keys() ^ tensors.keys())
    mismatched = strangers or [name for name in current if current[name].shape != tensors[name].shape]
    if mismatched:
        raise UserError(
            f"the adapter to start from does not fit at {mismatched[0]}",
            why="its weights are not those of the shape that its config states",
            fix="start from an adapter that was trained on this base",
            where=str(folder),
        )
    for name, tensor in tensors.items():
        current[name].copy_(tensor)


def sum_bits(weight: Tensor) -> Tensor:
    """Return two numbers that change when almost any bit does: one pass over the memory, on its device."""
    whole = {4: torch.int32, 2: torch.int16, 8: torch.int64}[weight.element_size()]
    bits = weight.contiguous().view(whole)
    # Two sums, of which one weighs rows: what only changes places is seen too.
    rows = bits.reshape(bits.shape[0], -1).sum(dim=1, dtype=torch.int64)
    positions = torch.arange(1, rows.numel() + 1, device=rows.device)
    return torch.stack([rows.sum(), (rows * positions).sum()])
