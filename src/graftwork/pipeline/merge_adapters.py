"""Merges adapters that were trained from one base, here or at several places, into one PEFT folder.

In: adapters by name (`run:ID`, `release:ID`, `model:NAME`, `adapter:FOLDER`) and their weights. Out: a folder
that `graft eval --subject adapter:FOLDER` evaluates and PEFT loads.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graftwork.evaluate.subjects import parse_subject
from graftwork.files.disk import atomic_folder, write_atomic
from graftwork.model.adapter_shape import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterShape,
    from_peft,
    parse_peft,
    to_peft,
)
from graftwork.model.adapters.combine import LoraPair, MergeMethod, combine, mask_source
from graftwork.model.shape import read_shape
from graftwork.pipeline.evaluation_subjects import find_weights
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import name_entry
from graftwork.records.base import Record
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome

PREFIX = "base_model.model."
BY_DATA, EQUAL = "data", "equal"
MERGE_FILE = "merge.json"
KINDS = ("run", "release", "model", "folder", "adapter")


class MergeParent(Record):
    name: str
    weight: float
    trained_tokens: int | None = None
    """Tokens that it learned from, where that is known."""


class MergedAdapter(Record):
    """An adapter made of others."""

    folder: str
    method: str
    rank: int
    layers: int
    kept: float
    """The least share, over all layers, of what was asked for that the rank holds."""
    parents: tuple[MergeParent, ...]
    evaluate: str
    """The command that compares it with its first parent."""


@dataclass(frozen=True)
class MergeRequest:
    names: tuple[str, ...]
    to: Path
    method: MergeMethod = "average"
    weights: str = EQUAL
    """`equal`, `data` or numbers separated by commas."""
    rank: int | None = None
    density: float = 0.5
    seed: int = 0
    shape: AdapterShape | None = None
    """The shape of an average that training starts from; None: rank and strength of the first adapter."""


@dataclass(frozen=True)
class _Parent:
    name: str
    shape: AdapterShape
    base: str
    pairs: dict[str, LoraPair]
    trained_tokens: int | None
    config: dict[str, Any]


def merge_adapters(work: OpenProject, request: MergeRequest) -> MergedAdapter:
    """Combine the adapters and write the folder. Nothing is written over."""
    if len(request.names) < 2:
        raise UserMistake("a merge needs two adapters", fix="name at least two, as run:ID run:ID")
    if request.to.exists():
        raise UserMistake(f"{request.to} exists", fix="name a folder that does not exist yet", where="--to")
    if not 0 < request.density <= 1:
        raise UserMistake(f"the density {request.density} is not between 0 and 1", where="--density")
    parents = [_read_parent(work, name) for name in request.names]
    _require_alike(parents, request.method)
    weights = _weigh(parents, request.weights)
    rank = (request.shape or parents[0].shape).rank if request.rank is None else request.rank
    if request.method != "average" and request.rank is not None:
        raise UserMistake(f"`{request.method}` keeps the rank of its parents", fix="leave out --rank")
    combined = combine(
        [parent.pairs for parent in parents],
        weights,
        method=request.method,
        rank=rank,
        density=request.density,
        draw=mask_source(request.density, request.seed),
    )
    made = MergedAdapter(
        folder=str(request.to),
        method=request.method,
        rank=rank,
        layers=len(combined),
        kept=round(min(pair.kept for pair in combined.values()), 6),
        parents=tuple(
            MergeParent(name=parent.name, weight=round(weight, 6), trained_tokens=parent.trained_tokens)
            for parent, weight in zip(parents, weights, strict=True)
        ),
        evaluate=f"graft eval --subject {request.names[0]} --subject adapter:{request.to}",
    )
    plain = {"rank": rank, "alpha": float(rank), "ranks": {}, "alphas": {}, "stabilised": False}
    shape = request.shape or parents[0].shape.model_copy(update=plain)
    tensors = {}
    for path, pair in combined.items():
        tensors[f"{PREFIX}{path}.lora_A.weight"] = pair.a
        # The combined pair has the scale 1; what reads the folder multiplies by that of its shape.
        tensors[f"{PREFIX}{path}.lora_B.weight"] = pair.b / pair.b.dtype.type(shape.scale_of(path))
    _write(request.to, parents[0], shape, tensors, made)
    return made


def _write(
    to: Path, first: _Parent, shape: AdapterShape, tensors: dict[str, Any], made: MergedAdapter
) -> None:
    from safetensors.numpy import save

    config = to_peft(shape, first.base, transposed=bool(first.config.get("fan_in_fan_out")))
    with atomic_folder(to) as temporary:
        write_atomic(temporary / WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
        write_atomic(temporary / CONFIG_FILE, json.dumps(config, indent=2))
        write_atomic(temporary / MERGE_FILE, made.to_json())


def _read_parent(work: OpenProject, name: str) -> _Parent:
    subject = parse_subject(name)
    if subject.kind not in KINDS:
        raise UserMistake(
            f"{name} is no adapter",
            fix="name run:ID, release:ID, model:NAME or adapter:FOLDER",
            where="NAMES",
        )
    outcome = _last_outcome(work) if subject.kind == "adapter" else None
    weights = find_weights(work, subject, outcome)
    assert weights is not None
    folder = weights.folder
    if not (folder / CONFIG_FILE).is_file():
        raise UserMistake(
            f"{name} has no LoRA weights",
            why="full weights and prompts cannot be merged",
            fix="name LoRA adapters",
            where=str(folder),
        )
    config = parse_peft((folder / CONFIG_FILE).read_bytes(), where=str(folder))
    tensors = _read_tensors(folder / WEIGHTS_FILE)
    paths = sorted({key.removeprefix(PREFIX).partition(".lora_")[0] for key in tensors})
    layers = read_shape(Path(work.base.folder)).layers
    shape = from_peft(config, layers=layers, paths=paths, where=str(folder))
    if shape.kind != "lora" or shape.experts:
        raise UserMistake(
            f"{name} is an adapter of the kind {'experts' if shape.experts else shape.kind}",
            why="only LoRA adapters of linear layers can be merged",
            fix="train it with `method: lora`, without `experts`",
            where=str(folder),
        )
    if other := [key for key in tensors if not key.endswith((".lora_A.weight", ".lora_B.weight"))]:
        raise UserMistake(
            f"{name} has weights besides its LoRA factors",
            why=f"{other[0]} and {len(other) - 1} more" if len(other) > 1 else other[0],
            fix="merge adapters without trained embeddings or other modules",
            where=str(folder),
        )
    pairs = {
        path: LoraPair(
            tensors[f"{PREFIX}{path}.lora_A.weight"],
            tensors[f"{PREFIX}{path}.lora_B.weight"],
            shape.scale_of(path),
        )
        for path in paths
    }
    base = str(config.get("base_model_name_or_path", ""))
    learned = _trained_tokens(work, subject.which) if subject.kind == "run" else None
    return _Parent(name, shape, base, pairs, learned, config)


def _read_tensors(file: Path) -> dict[str, Any]:
    """In float32, whatever the file has: numpy knows no bfloat16."""
    import numpy as np
    from safetensors import SafetensorError, deserialize

    kinds = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
    try:
        entries = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise Damaged(
            f"{file.name} cannot be read",
            why=str(error)[:200],
            fix="get the adapter again from where it was made",
            where=str(file.parent),
        ) from error
    found = {}
    for key, entry in entries:
        data, kind = entry["data"], entry["dtype"]
        if kind == "BF16":
            numbers = (np.frombuffer(data, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif kind in kinds:
            numbers = np.frombuffer(data, dtype=kinds[kind]).astype(np.float32)
        else:
            raise UserMistake(
                f"{key} is of the type {kind}",
                why="only factors in 16, 32 or 64 bits can be merged",
                fix="save the adapter in float32",
                where=str(file),
            )
        found[key] = numbers.reshape(entry["shape"])
    return found


def _last_outcome(work: OpenProject) -> TrainOutcome:
    done = work.ledger.get(name_entry(work, "train"))
    if done is None:
        raise UserMistake(f"the model {work.model} is not trained yet", fix="`graft train` trains it")
    return TrainOutcome.model_validate(done.output)


def _trained_tokens(work: OpenProject, run: str) -> int | None:
    entry = work.runs.get(run)
    return None if entry is None else round(Plan.model_validate(entry.plan).trained_tokens.value)


def _require_alike(parents: Sequence[_Parent], method: MergeMethod) -> None:
    first = parents[0]
    for other in parents[1:]:
        if other.base != first.base:
            raise UserMistake(
                f"{other.name} belongs to the base {other.base}, {first.name} to {first.base}",
                fix="merge adapters of one base",
            )
        if other.pairs.keys() != first.pairs.keys():
            only = sorted(other.pairs.keys() ^ first.pairs.keys())
            raise UserMistake(
                f"{other.name} and {first.name} adapt different layers",
                why=f"only one of them has {only[0]} ({len(only)} differ)",
                fix="merge adapters with the same train.targets and train.upper_layers",
            )
    for other in parents:
        ranks = {pair.a.shape[0] for pair in other.pairs.values()}
        if method != "average" and ranks != {first.shape.rank}:
            shown = ", ".join(str(rank) for rank in sorted(ranks))
            raise UserMistake(
                f"layers of {other.name} have rank {shown}, {first.name} states rank {first.shape.rank}",
                fix="use --method average, which takes any ranks",
            )


def _weigh(parents: Sequence[_Parent], asked: str) -> list[float]:
    if asked == EQUAL:
        return [1 / len(parents)] * len(parents)
    if asked == BY_DATA:
        tokens = [parent.trained_tokens or 0 for parent in parents]
        if not all(tokens):
            unknown = ", ".join(parent.name for parent in parents if not parent.trained_tokens)
            raise UserMistake(
                f"it is not known how many tokens {unknown} learned from",
                fix="name runs as run:ID, or give the weights as numbers",
                where="--weights",
            )
        return [count / sum(tokens) for count in tokens]
    try:
        weights = [float(part) for part in asked.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(parents) or not all(0 < weight < math.inf for weight in weights):
        raise UserMistake(
            f"{asked!r} is not a list of {len(parents)} positive weights",
            fix="use equal, data, or numbers as 0.5,0.3,0.2",
            where="--weights",
        )
    return weights
