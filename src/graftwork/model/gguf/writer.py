"""Writes a base, or a LoRA adapter of it, as a GGUF file.

In: a transformers folder, or a PEFT folder and its base. Out: one file. Tensors are read, arranged, converted
and written one at a time. Needs no torch. What cannot be written exactly is refused.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.files.safetensors import header_length, read_header
from graftwork.model.adapter_shape import AdapterShape, from_peft, parse_peft
from graftwork.model.gguf.architecture import ROPE_FACTORS, Array, GgufArchitecture
from graftwork.model.gguf.vocabulary import read_vocabulary
from graftwork.records.errors import UserMistake
from graftwork.records.release import GgufPrecision

WRITER = 1
"""Goes into the names of cached files; a change of what is written changes it."""
_PREFIX = "base_model.model."
ADAPTER_CONFIG = "adapter_config.json"
_FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q5_1": 9, "q4_1": 3}
"""`general.file_type`, as llama.cpp numbers it."""
_NUMPY_TYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: where it is, and of what type and shape."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self) -> NDArray[np.float32]:
        """Its values in float32."""
        data = np.memmap(self.path, _NUMPY_TYPES[self.dtype], mode="r", offset=self.offset, shape=self.shape)
        if self.dtype == "BF16":
            return (data.astype(np.uint32) << 16).view(np.float32)
        return np.asarray(data, np.float32)


class _PlannedTensor(NamedTuple):
    """A tensor of the file: its name, how it is stored, and what computes it."""

    name: str
    shape: tuple[int, ...]
    kind: str
    make: Callable[[], Array]


Change = Callable[[str, Array], Array]
"""Gives a weight of the base, by its name, as it is written."""


def write_base(
    folder: Path, target: Path, *, precision: GgufPrecision, change: Change = lambda _name, weight: weight
) -> None:
    """Norms, biases and vectors stay in float32; matrices get the precision that is asked for."""
    config = json.loads((folder / "config.json").read_text())
    architecture = GgufArchitecture(config, where=str(folder))
    size = int(architecture.config["vocab_size"])
    metadata = {
        "general.type": "model",
        "general.file_type": _FILE_TYPES[precision],
        "general.quantization_version": 2,
        **architecture.metadata(),
        **read_vocabulary(folder, size=size).metadata,
    }
    tensors = [
        _plan_weight(tensor, architecture, precision, change)
        for tensor in stored_tensors(folder)
        if not (architecture.tied and tensor.name == "lm_head.weight")
    ]
    factors = architecture.rope_factors()
    if factors is not None:
        tensors.append(_PlannedTensor(ROPE_FACTORS, factors.shape, "f32", lambda: factors))
    _write(target, architecture.name, metadata, tensors)


def write_adapter(folder: Path, target: Path, *, base: Path) -> None:
    """Each scale is multiplied into B in float32, since the file has room for one alpha only."""
    architecture = GgufArchitecture(json.loads((base / "config.json").read_text()), where=str(base))
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
    paths = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors})
    shape = _read_shape(folder, layers=architecture.layers, paths=paths)
    planned: list[_PlannedTensor] = []
    for path in paths:
        name = architecture.tensor_name(f"{path}.weight")
        if name == "output.weight" and architecture.tied:
            raise _refuse("an adapter on the head of a base whose head is its embedding", folder)
        a, b = tensors[f"{_PREFIX}{path}.lora_A.weight"], tensors[f"{_PREFIX}{path}.lora_B.weight"]
        scaled = _scaled(b, path, shape.scale_of(path), architecture)
        planned.append(_PlannedTensor(f"{name}.lora_a", a.shape, "f32", a.read))
        planned.append(_PlannedTensor(f"{name}.lora_b", b.shape, "f32", scaled))
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    _write(target, architecture.name, metadata, planned)


def write_merged(base: Path, adapter: Path, target: Path, *, precision: GgufPrecision) -> None:
    """Merge an adapter (LoRA, DoRA or full weights) into the base in float32, then convert."""
    tensors = {tensor.name: tensor for tensor in stored_tensors(adapter)}
    if not (adapter / ADAPTER_CONFIG).is_file():
        _require_known(tensors, base)
        write_base(
            base, target, precision=precision, change=lambda name, weight: _replaced(tensors, name, weight)
        )
        return
    paths = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors}
    _require_known([f"{path}.weight" for path in paths], base)
    config = parse_peft((adapter / ADAPTER_CONFIG).read_bytes(), where=str(adapter))
    layers = int(json.loads((base / "config.json").read_text())["num_hidden_layers"])
    shape = from_peft(config, layers=layers, paths=paths, where=str(adapter))

    def change(name: str, weight: Array) -> Array:
        path = name.removesuffix(".weight")
        if path not in paths:
            return weight
        a, b = (tensors[f"{_PREFIX}{path}.{part}.weight"].read() for part in ("lora_A", "lora_B"))
        merged: Array = weight + np.float32(shape.scale_of(path)) * (b @ a)
        if shape.kind != "dora":
            return merged
        lengths = np.linalg.norm(merged, axis=1, keepdims=True)
        stretched: Array = merged * (_magnitude(tensors, path).reshape(-1, 1) / lengths)
        return stretched

    write_base(base, target, precision=precision, change=change)


def _magnitude(tensors: dict[str, StoredTensor], path: str) -> Array:
    start = f"{_PREFIX}{path}.lora_magnitude_vector"
    return next(tensor for name, tensor in tensors.items() if name.startswith(start)).read()


def _replaced(tensors: dict[str, StoredTensor], name: str, weight: Array) -> Array:
    return tensors[name].read() if name in tensors else weight


def _require_known(names: Iterable[str], base: Path) -> None:
    """Refuse an adapter of weights that the base does not have: they would be lost."""
    known = {tensor.name for tensor in stored_tensors(base)}
    missing = sorted(set(names) - known)
    if missing:
        raise UserMistake(
            f"the base has no weight {missing[0]}",
            why="the weight names in its files differ from those that the adapter names",
            fix="save the base once with `model.save_pretrained(folder)` and name that folder as the base",
            where=str(base),
        )


def _scaled(b: StoredTensor, path: str, scale: float, architecture: GgufArchitecture) -> Callable[[], Array]:
    return lambda: architecture.arrange(path, b.read()) * np.float32(scale)


def _read_shape(folder: Path, *, layers: int, paths: list[str]) -> AdapterShape:
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        raise _refuse("a release of full weights", folder)
    config = parse_peft(file.read_bytes(), where=str(folder))
    if config.get("use_dora"):
        raise _refuse("a DoRA adapter", folder)
    if config.get("modules_to_save") or config.get("bias", "none") != "none" or config.get("fan_in_fan_out"):
        raise _refuse("an adapter that changes more than linear layers", folder)
    return from_peft(config, layers=layers, paths=paths, where=str(folder))


def _refuse(what: str, folder: Path) -> UserMistake:
    return UserMistake(
        f"{what} cannot be written as GGUF",
        why="llama.cpp adds a low-rank product to a weight of the base, and nothing else",
        fix="serve it with the embedded engine, or export it merged: `graft release export --format ollama`",
        where=str(folder),
    )


def _plan_weight(
    tensor: StoredTensor, architecture: GgufArchitecture, precision: str, change: Change
) -> _PlannedTensor:
    path = tensor.name.rpartition(".")[0]
    kind = precision if len(tensor.shape) > 1 else "f32"
    if kind.startswith("q") and tensor.shape[-1] % 32:
        kind = "f16"  # rows that cannot be cut into the blocks of a quantized type
    return _PlannedTensor(
        architecture.tensor_name(tensor.name),
        tensor.shape,
        kind,
        lambda: architecture.arrange(path, change(tensor.name, tensor.read())),
    )


def _write(target: Path, architecture: str, metadata: dict[str, Any], tensors: list[_PlannedTensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    writer = GGUFWriter(target, architecture)
    for key, value in metadata.items():
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}.get(type(value), "ARRAY")
        writer.add_key_value(key, value, GGUFValueType[kind])
    for tensor in tensors:
        stored = GGMLQuantizationType[tensor.kind.upper()]
        if tensor.kind in ("f32", "f16"):
            dtype = np.dtype(np.float32 if tensor.kind == "f32" else np.float16)
            size = int(np.prod(tensor.shape)) * dtype.itemsize
            writer.add_tensor_info(tensor.name, tensor.shape, dtype, size)
        else:
            packed = quant_shape_to_byte_shape(tensor.shape, stored)
            writer.add_tensor_info(tensor.name, packed, np.dtype(np.uint8), int(np.prod(packed)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(quantize(tensor.make(), GGMLQuantizationType[tensor.kind.upper()]))
    writer.close()


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder's safetensors files, by name."""
    found = [tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _in_file(path)]
    return sorted(found, key=lambda tensor: tensor.name)


def _in_file(path: Path) -> Iterator[StoredTensor]:
    header: dict[str, Any] = read_header(path, fix="fetch the weights again")
    start = 8 + header_length(path)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _NUMPY_TYPES:
            raise UserMistake(
                f"the tensor {name} is of the type {entry['dtype']}",
                why=f"only {', '.join(_NUMPY_TYPES)} can be converted",
                fix="use a base that is not quantized",
                where=str(path),
            )
        yield StoredTensor(
            name, path, entry["dtype"], tuple(entry["shape"]), start + int(entry["data_offsets"][0])
        )
