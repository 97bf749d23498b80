"""What is learned, whatever the method: begun, named, saved. One seam for the trainer.

In: a loaded base and the shape of what is learned: adapters of any kind, or the weights themselves.
Out: the parameters to train, their tensors by name, and in the end a folder that `load_adapter`
takes. Does not know how they are trained.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from graftwork.model.adapter_shape import CONFIG_FILE, WEIGHTS_FILE, AdapterShape
from graftwork.model.adapters.full_weights import (
    holds_full_weights,
    learned_weights,
    save_full,
    start_from_full,
    unfreeze_weights,
)
from graftwork.model.adapters.peft import (
    adapter_tensors,
    attach,
    read_adapter_shape,
    save_adapter,
)
from graftwork.model.load import tensors_digest
from graftwork.records.errors import UserMistake


def make_trainable(
    model: Any, shape: AdapterShape, *, seed: int, start: Path | None = None
) -> list[nn.Parameter]:
    """The parameters to train: fresh, or as an earlier run left them in the folder `start`."""
    if shape.kind == "full":
        if start is not None:
            if not holds_full_weights(start):
                raise UserMistake(
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
    """What training changes, by the names that it is saved under."""
    return adapter_tensors(model) or learned_weights(model)


def trained_digest(model: Any) -> str:
    """One hash over what is learned, after every step.

    Adapters by all their bytes. Whole models by the sum of each tensor's bits, which costs a pass over
    the memory and not the hashing of all of it.
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
        raise UserMistake(
            "the adapter to start from is no PEFT folder",
            why=f"it lacks {CONFIG_FILE} or {WEIGHTS_FILE}",
            fix="set `train.start_from` to the folder of an adapter",
            where=str(folder),
        )
    tensors = load_file(folder / WEIGHTS_FILE)
    # Training goes on only with what was trained before: same layers, ranks and strength.
    theirs, ours = (
        each.model_dump() | {"targets": sorted(each.targets), "layers": sorted(each.layers)}
        for each in (read_adapter_shape(model, folder, tensors), shape)
    )
    if differing := [key for key in theirs if theirs[key] != ours[key]]:
        names = {"kind": "method", "stabilised": "rank_stabilised", "ranks": "modules", "alphas": "modules"}
        setting = names.get(differing[0], "upper_layers" if differing[0] == "layers" else differing[0])
        raise UserMistake(
            "the adapter to start from has another shape than the settings",
            why="; ".join(f"{k}: it has {theirs[k]}, the settings have {ours[k]}" for k in differing),
            fix=f"give `train.{setting}` its value, or start without it",
            where=str(folder),
        )
    own = adapter_tensors(model)
    strangers = sorted(own.keys() ^ tensors.keys())
    unlike = strangers or [name for name in own if own[name].shape != tensors[name].shape]
    if unlike:
        raise UserMistake(
            f"the adapter to start from does not fit at {unlike[0]}",
            why="its weights are not those of the shape that its config states",
            fix="start from an adapter that was trained on this base",
            where=str(folder),
        )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


def sum_bits(weight: Tensor) -> Tensor:
    """Two numbers that change when any bit does, or nearly: one pass over the memory, on its device."""
    whole = {4: torch.int32, 2: torch.int16, 8: torch.int64}[weight.element_size()]
    bits = weight.contiguous().view(whole)
    # Two sums, of which one weighs rows: what only changes places is seen too.
    rows = bits.reshape(bits.shape[0], -1).sum(dim=1, dtype=torch.int64)
    places = torch.arange(1, rows.numel() + 1, device=rows.device)
    return torch.stack([rows.sum(), (rows * places).sum()])
