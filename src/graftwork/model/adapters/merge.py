"""An adapter merged into its base, weight by weight: no model is held, let alone two.

Input: the base's folder, the adapter's, an empty folder. Output: a folder that transformers loads: the same
files as the base's, of which only the adapted weights differ. Each is merged in float32 and written in the
type that the base has on disk. Does not know what the model is for.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from graftwork.files.safetensors import TYPE_NAMES, TensorEntry, encode_header, in_file_order
from graftwork.model.adapter_shape import CONFIG_FILE, WEIGHTS_FILE, from_peft
from graftwork.model.adapters.full_weights import FULL_WEIGHTS_FILE, holds_full_weights
from graftwork.model.adapters.peft import PREFIX, read_config
from graftwork.model.base import FINGERPRINT_FILE
from graftwork.model.shape import count_layers
from graftwork.records.dataset import Row
from graftwork.records.errors import UserError
from graftwork.records.release import Agreement

COPIED = (".json", ".jinja", ".txt", ".model")
"""Files of a base to copy: config, tokenizer, template. Never code or pickles."""

Change = Callable[[str, Tensor], Tensor]


def merge_into(base: Path, adapter: Path, folder: Path) -> int:
    """Fill `folder` with the merged model; returns how many weights differ from the base's."""
    change, names = merged_weights(base, adapter)
    for path in sorted(base.iterdir()):
        if path.suffix in COPIED and path.name != FINGERPRINT_FILE:
            shutil.copyfile(path, folder / path.name)
    kinds = {name: getattr(torch, kind) for kind, name in TYPE_NAMES.items()}
    for path in sorted(base.glob("*.safetensors")):
        # The same file with changed weights. Header first, then one weight after the other.
        handle, entries = _opened(path), []
        for name in _names(handle):
            part = handle.get_slice(name)
            shape, dtype = part.get_shape(), part.get_dtype()
            width = kinds[dtype].itemsize
            entries.append(TensorEntry(name, dtype, shape, width, math.prod(shape) * width))
        entries = in_file_order(entries)
        with (folder / path.name).open("wb") as out:
            out.write(encode_header(entries, handle.metadata() or {"format": "pt"}))
            for entry in entries:
                weight = change(entry.name, handle.get_tensor(entry.name)).contiguous()
                out.write(weight.reshape(-1).view(torch.uint8).numpy().data)
    return len(names)


def merge_weight(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, *, magnitude: Tensor | None, transposed: bool
) -> Tensor:
    """W + scale · B A; with magnitudes, each row is rescaled to the trained length."""
    whole = (weight.T if transposed else weight).float() + scale * (b.float() @ a.float())
    if magnitude is not None:
        whole = whole * (magnitude.float().reshape(-1) / whole.norm(dim=1))[:, None]
    return (whole.T if transposed else whole).to(weight.dtype)


def merged_weights(base: Path, adapter: Path) -> tuple[Change, set[str]]:
    """Yield each merged weight and the names of those it concerns: by LoRA, DoRA or full weights. Refused if
    the base lacks a weight that would change.
    """
    if not (adapter / CONFIG_FILE).exists() and holds_full_weights(adapter):
        replacing = _opened(adapter / FULL_WEIGHTS_FILE)
        names = set(_names(replacing))

        def replace(name: str, weight: Tensor) -> Tensor:
            return replacing.get_tensor(name).to(weight.dtype) if name in names else weight

        change: Change = replace
    else:
        change, names = _low_rank_changes(base, adapter)
    base_names = {name for path in base.glob("*.safetensors") for name in _names(_opened(path))}
    if missing := names - base_names:
        raise UserError(
            f"the base has no weight {min(missing)}",
            why="the weight names in its files differ from those of the loaded model",
            fix="save it once with `model.save_pretrained(folder)` and name that folder as the base",
            where=str(base),
        )
    return change, names


def _low_rank_changes(base: Path, adapter: Path) -> tuple[Change, set[str]]:
    config = read_config(adapter)
    if config.get("target_parameters"):
        raise UserError(
            "an adapter of experts cannot be merged into its base",
            why="the files of a base hold experts in a different form than the loaded model that was adapted",
            fix="use the adapter with its base, or merge it with PEFT's `merge_and_unload`",
            where=str(adapter),
        )
    handle = _opened(adapter / WEIGHTS_FILE)
    paths = {key.removeprefix(PREFIX).partition(".lora_")[0] for key in _names(handle)}
    shape = from_peft(config, layers=count_layers(base), paths=paths, where=str(adapter))

    def change(name: str, weight: Tensor) -> Tensor:
        path = name.removesuffix(".weight")
        if path not in paths:
            return weight
        # PEFT writes magnitudes without the `.weight` that A and B have.
        magnitudes = [
            key for key in _names(handle) if key.startswith(f"{PREFIX}{path}.lora_magnitude_vector")
        ]
        return merge_weight(
            weight,
            handle.get_tensor(f"{PREFIX}{path}.lora_A.weight"),
            handle.get_tensor(f"{PREFIX}{path}.lora_B.weight"),
            shape.scale_of(path),
            magnitude=handle.get_tensor(magnitudes[0]) if shape.kind == "dora" and magnitudes else None,
            transposed=bool(config.get("fan_in_fan_out")),
        )

    return change, {f"{path}.weight" for path in paths}


def _names(handle: Any) -> list[str]:
    names: list[str] = handle.keys()
    return names


def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


MOST_TOKENS = 512
"""A longer row is truncated here."""

ALLOWED = {"float32": (1e-4, 0.999), "float16": (0.02, 0.98), "bfloat16": (0.08, 0.95)}
"""Largest difference as a share of the largest logit, and least share of equal top tokens. In float32 the two
ways differ only by the order of sums. In 16 bits the merged weight itself is rounded, unlike the unmerged
pair: that is the price of merging, and it is bounded here.
"""


@torch.inference_mode()
def reply_logits(model: Any, rows: Sequence[Row]) -> list[Tensor]:
    """Return for each row the logits that predict its reply, in float32 on the host."""
    per_row = []
    device = next(model.parameters()).device
    for row in rows:
        tokens = torch.tensor(row.tokens[:MOST_TOKENS], device=device)[None]
        logits = model(input_ids=tokens, use_cache=False).logits[0]
        first = min(row.trained_from, tokens.shape[1] - 1) - 1
        per_row.append(logits[max(first, 0) : -1].float().cpu())
    return per_row


def compare_logits(one: Sequence[Tensor], other: Sequence[Tensor], *, dtype: str) -> Agreement:
    """Compare `other` with `one`, position by position."""
    largest = total = 0.0
    top = highest = positions = 0.0
    count = 0
    for first_logits, second_logits in zip(one, other, strict=True):
        differences = (first_logits - second_logits).abs()
        # What is not a number agrees with nothing, and would be lost in a maximum.
        largest = max(largest, float(differences.max())) if torch.isfinite(differences).all() else math.inf
        total += float(differences.sum())
        count += differences.numel()
        highest = max(highest, float(first_logits.abs().max()))
        top += float((first_logits.argmax(dim=-1) == second_logits.argmax(dim=-1)).sum())
        positions += first_logits.shape[0]
    difference, first = ALLOWED.get(dtype, ALLOWED["bfloat16"])
    return Agreement(
        rows=len(one),
        positions=int(positions),
        dtype=dtype,
        largest_difference=largest,
        mean_difference=total / max(count, 1),
        largest_logit=highest,
        same_first=top / max(positions, 1),
        allowed_difference=difference,
        allowed_first=first,
    )
