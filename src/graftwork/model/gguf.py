"""Bases and LoRA adapters as GGUF files: written, cached, converted by llama.cpp; Modelfiles for Ollama.

Input: a transformers folder, or a PEFT folder and its base. Output: one file. Tensors are read, arranged,
converted and written one at a time. Only merging needs torch. What cannot be written exactly is refused.

Converted files are named by the content that they are made of. The cache is shared by all projects of a user,
next to converted base models. A file appears whole or not at all. A new one removes those that were not used
for longest, until all of them together are below a limit: each can be converted again.

llama.cpp's own converter is run only where the user has it, as a child process with the same Python.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.files.disk import explain_os_error, file_digest, make_folder, sync_folder
from graftwork.files.safetensors import header_length, read_header
from graftwork.model.adapter_shape import AdapterShape, from_peft, parse_peft
from graftwork.model.base import find_base, models_folder
from graftwork.model.chat.template import ChatTemplate
from graftwork.model.families import complete_config
from graftwork.model.shape import count_layers, read_json_object, read_sizes
from graftwork.records.base import GIB, fingerprint
from graftwork.records.errors import EnvironmentFailure, NegativeResult, UserError
from graftwork.records.interaction import Message
from graftwork.records.release import GgufPrecision

# Which models the GGUF writer knows, and how llama.cpp names and lays out their tensors. In: the config.json
# of a base. Output: the architecture, its metadata, names of tensors and the order of their rows. A family
# that is not listed is refused: a file with rows in the wrong order loads and answers nonsense.
Array = NDArray[Any]


class GgufFamily(NamedTuple):
    """`interleaved`: llama.cpp rotates neighboring rows of queries and keys, transformers the two halves."""

    architecture: str
    interleaved: bool = False


FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("llama", interleaved=True),
    "mistral": GgufFamily("llama", interleaved=True),
    "qwen2": GgufFamily("qwen2"),
    "qwen3": GgufFamily("qwen3"),
}
ROPE_FACTORS = "rope_freqs.weight"
_ROTATED = ("q_proj", "k_proj")


class GgufArchitecture:
    """The layout of one base."""

    def __init__(self, config: Mapping[str, Any], *, where: str) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        self.config = complete_config(config)
        family = FAMILIES.get(str(self.config.get("model_type")))
        if family is None:
            raise UserError(
                f"a model of the type {self.config.get('model_type')!r} cannot be written as GGUF",
                why=f"the writer supports {', '.join(FAMILIES)}",
                fix="serve it with the embedded engine or vLLM",
                where=where,
            )
        self._family = family
        self._where = where
        self.name = family.architecture
        self.layers = int(self.config["num_hidden_layers"])
        self.heads = int(self.config["num_attention_heads"])
        self.kv_heads = int(self.config.get("num_key_value_heads") or self.heads)
        self.head_dim = int(self.config.get("head_dim") or self.config["hidden_size"] // self.heads)
        self.tied = bool(self.config.get("tie_word_embeddings"))
        kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == self.name)
        self._names: Any = get_tensor_name_map(kind, self.layers)
        self._rope = _rope_settings(self.config)

    def metadata(self) -> dict[str, int | float | str]:
        """Keys and values of the file, without `general.*` and the tokenizer."""
        config, rope = self.config, self._rope
        fields: dict[str, int | float | str] = {
            "block_count": self.layers,
            "context_length": int(config["max_position_embeddings"]),
            "embedding_length": int(config["hidden_size"]),
            "feed_forward_length": int(config["intermediate_size"]),
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
            "rope.dimension_count": self.head_dim,
            "rope.freq_base": float(rope.get("rope_theta") or 10_000.0),
            "vocab_size": int(config["vocab_size"]),
        }
        kind = rope.get("rope_type", "default")
        if kind == "linear":
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
        elif kind not in ("default", "llama3"):
            raise self._unknown(f"rotary positions of the kind {kind!r}")
        if config.get("use_sliding_window"):
            raise self._unknown("sliding window attention")
        return {f"{self.name}.{key}": value for key, value in fields.items()}

    def rope_factors(self) -> Array | None:
        """Divisors of llama.cpp for the frequencies, for positions scaled as in Llama 3; else None."""
        rope = self._rope
        if rope.get("rope_type") != "llama3":
            return None
        base, pairs = float(rope.get("rope_theta") or 10_000.0), self.head_dim // 2
        lengths = 2 * math.pi * base ** (np.arange(pairs) / pairs)
        factor, old = float(rope["factor"]), float(rope["original_max_position_embeddings"])
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        share = np.clip((old / lengths - low) / (high - low), 0.0, 1.0)
        return np.asarray(1 / ((1 - share) / factor + share), np.float32)

    def tensor_name(self, name: str) -> str:
        """The name of a weight of transformers in the file."""
        path, _, suffix = name.rpartition(".")
        block_name: str | None = self._names.get_name(path)
        if block_name is None or suffix not in ("weight", "bias"):
            raise self._unknown(f"the weight {name}")
        return f"{block_name}.{suffix}"

    def arrange(self, path: str, rows: Array) -> Array:
        """The rows, which are outputs of the layer at `path`, in the order that llama.cpp expects."""
        layer = path.rpartition(".")[2]
        if not self._family.interleaved or layer not in _ROTATED:
            return rows
        heads = self.heads if layer == "q_proj" else self.kv_heads
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)

    def _unknown(self, what: str) -> UserError:
        return UserError(
            f"{what} cannot be written as GGUF",
            why=f"the writer does not support it in a model of the type {self.config.get('model_type')!r}",
            fix="serve it with the embedded engine or vLLM",
            where=self._where,
        )


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary positions, as configs since transformers 5 and before it state them."""
    old = dict(config.get("rope_scaling") or {})
    settings = {"rope_theta": config.get("rope_theta"), **old, **(config.get("rope_parameters") or {})}
    settings.setdefault("rope_type", old.get("type", "default"))
    return settings


# The tokenizer of a base as metadata of a GGUF file. Input: the tokenizer.json, tokenizer_config.json and
# template of a folder. Output: keys and values, and whether llama.cpp will split text exactly as the
# tokenizer does. Our own engine sends tokens, so only other programs depend on that.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Types of a token, as llama.cpp numbers them."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
}
"""The patterns that llama.cpp supports by name."""


def read_vocabulary(folder: Path, *, size: int) -> dict[str, Any]:
    """`size` is the number of rows of the embedding; rows without a token get a name of their own."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise UserError(
            "a tokenizer of this kind cannot be written as GGUF",
            why=f"the writer supports byte-level BPE; this one is {model.get('type')}"
            f"{' with byte fallback' if model.get('byte_fallback') else ''}",
            fix="serve the model with the embedded engine or vLLM",
            where=str(folder / "tokenizer.json"),
        )
    tokens = [f"[PAD{number}]" for number in range(size)]
    kinds = [UNUSED] * size
    for text, number in model["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in tokenizer.get("added_tokens", ()):
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    split = _known_split(tokenizer.get("pre_tokenizer")) if tokenizer.get("normalizer") is None else None
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split or "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        **_special_tokens(folder, {text: number for number, text in enumerate(tokens)}),
    }


def _special_tokens(folder: Path, numbers: dict[str, int]) -> dict[str, Any]:
    template = ChatTemplate.from_folder(folder)
    # The end of turn, not the configured end of text: programs that read the file stop there.
    fields: dict[str, Any] = {
        "tokenizer.ggml.eos_token_id": template.eos,
        "tokenizer.chat_template": template.source,
    }
    config = read_json_object(folder / "tokenizer_config.json", states="the special tokens and the template")
    for key, name in (("bos_token", "bos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if text in numbers:
            fields[f"tokenizer.ggml.{name}_token_id"] = numbers[text]
    return fields


def _known_split(pre: Any) -> str | None:
    """llama.cpp's name for the pre-tokenizer; None if it has none."""
    steps = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre or {"type": ""}]
    kinds = [step["type"] for step in steps]
    if any(step["type"] == "ByteLevel" and step.get("add_prefix_space") for step in steps):
        return None
    own_pattern = steps[-1]["type"] == "ByteLevel" and steps[-1].get("use_regex", True)
    if kinds == ["ByteLevel"] and own_pattern:
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and own_pattern and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not own_pattern and steps[0]["behavior"] == "Isolated":
        return SPLITS.get(steps[0]["pattern"].get("Regex", ""))
    return None


WRITER = 1
"""Part of the names of cached files; incremented when the output changes."""
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


PlannedTensor = tuple[str, tuple[int, ...], str, Callable[[], Array]]
"""A tensor of the file: its name, its shape, how it is stored, and what computes it."""
Change = Callable[[str, Array], Array]
"""Returns a weight of the base, by its name, in the form to write."""


def write_base(
    folder: Path, target: Path, *, precision: GgufPrecision, change: Change = lambda _name, weight: weight
) -> None:
    """Norms, biases and vectors stay in float32; matrices get the requested precision."""
    config = json.loads((folder / "config.json").read_text())
    architecture = GgufArchitecture(config, where=str(folder))
    size = int(architecture.config["vocab_size"])
    metadata = {
        "general.type": "model",
        "general.file_type": _FILE_TYPES[precision],
        "general.quantization_version": 2,
        **architecture.metadata(),
        **read_vocabulary(folder, size=size),
    }

    def plan(tensor: StoredTensor) -> PlannedTensor:
        path = tensor.name.rpartition(".")[0]
        kind: str = precision if len(tensor.shape) > 1 else "f32"
        if kind.startswith("q") and tensor.shape[-1] % 32:
            kind = "f16"  # rows that cannot be cut into the blocks of a quantized type
        return (
            architecture.tensor_name(tensor.name),
            tensor.shape,
            kind,
            lambda: architecture.arrange(path, change(tensor.name, tensor.read())),
        )

    tensors = [
        plan(tensor)
        for tensor in stored_tensors(folder)
        if not (architecture.tied and tensor.name == "lm_head.weight")
    ]
    factors = architecture.rope_factors()
    if factors is not None:
        tensors.append((ROPE_FACTORS, factors.shape, "f32", lambda: factors))
    _write(target, architecture.name, metadata, tensors)


def write_adapter(folder: Path, target: Path, *, base: Path) -> None:
    """Each scale is multiplied into B in float32, since the file has room for one alpha only."""
    architecture = GgufArchitecture(json.loads((base / "config.json").read_text()), where=str(base))
    tensors = {tensor.name: tensor for tensor in stored_tensors(folder)}
    paths = sorted({name.removeprefix(_PREFIX).partition(".lora_")[0] for name in tensors})
    shape = _read_shape(folder, layers=architecture.layers, paths=paths)
    planned: list[PlannedTensor] = []
    for path in paths:
        name = architecture.tensor_name(f"{path}.weight")
        if name == "output.weight" and architecture.tied:
            raise _refuse("an adapter on the head of a base whose head is its embedding", folder)
        a, b = tensors[f"{_PREFIX}{path}.lora_A.weight"], tensors[f"{_PREFIX}{path}.lora_B.weight"]

        def scaled(path: str = path, b: StoredTensor = b) -> Array:
            return architecture.arrange(path, b.read()) * np.float32(shape.scale_of(path))

        planned.append((f"{name}.lora_a", a.shape, "f32", a.read))
        planned.append((f"{name}.lora_b", b.shape, "f32", scaled))
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 0.0}
    _write(target, architecture.name, metadata, planned)


def write_merged(base: Path, adapter: Path, target: Path, *, precision: GgufPrecision) -> None:
    """Merge an adapter (LoRA, DoRA or full weights) into the base in float32, then convert."""
    import torch

    from graftwork.model.adapters.merge import merged_weights

    change_tensor, _ = merged_weights(base, adapter)

    def change(name: str, weight: Array) -> Array:
        # Files are mapped read-only; what is merged is another tensor.
        changed: Array = change_tensor(name, torch.from_numpy(np.array(weight))).numpy()
        return changed

    write_base(base, target, precision=precision, change=change)


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


def _refuse(what: str, folder: Path) -> UserError:
    return UserError(
        f"{what} cannot be written as GGUF",
        why="llama.cpp adds a low-rank product to a weight of the base, and nothing else",
        fix="serve it with the embedded engine, or export it merged: `graft release export --format ollama`",
        where=str(folder),
    )


def _write(target: Path, architecture: str, metadata: dict[str, Any], tensors: list[PlannedTensor]) -> None:
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    writer = GGUFWriter(target, architecture)
    for key, value in metadata.items():
        kind = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}.get(type(value), "ARRAY")
        writer.add_key_value(key, value, GGUFValueType[kind])
    for name, shape, kind, _ in tensors:
        stored = GGMLQuantizationType[kind.upper()]
        if kind in ("f32", "f16"):
            dtype = np.dtype(np.float32 if kind == "f32" else np.float16)
            size = int(np.prod(shape)) * dtype.itemsize
            writer.add_tensor_info(name, shape, dtype, size)
        else:
            packed = quant_shape_to_byte_shape(shape, stored)
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), int(np.prod(packed)), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, _, kind, make in tensors:
        writer.write_tensor_data(quantize(make(), GGMLQuantizationType[kind.upper()]))
    writer.close()


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """Every tensor of the folder's safetensors files, by name."""
    tensors = []
    for path in sorted(folder.glob("*.safetensors")):
        header: dict[str, Any] = read_header(path, fix="fetch the weights again")
        start = 8 + header_length(path)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _NUMPY_TYPES:
                raise UserError(
                    f"the tensor {name} is of the type {entry['dtype']}",
                    why=f"only {', '.join(_NUMPY_TYPES)} can be converted",
                    fix="use a base that is not quantized",
                    where=str(path),
                )
            shape, offset = tuple(entry["shape"]), start + int(entry["data_offsets"][0])
            tensors.append(StoredTensor(name, path, entry["dtype"], shape, offset))
    return sorted(tensors, key=lambda tensor: tensor.name)


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LIMIT_VARIABLE = "GRAFT_GGUF_CACHE_GIB"
DEFAULT_LIMIT_GIB = 20.0
_SHOWN = 24
_IN_USE_SECONDS = 3600.0
"""A file that was requested within this time may be about to be opened."""


def base_file(folder: Path, *, precision: GgufPrecision) -> Path:
    """The base in this folder as GGUF."""
    name = f"{base_revision(folder)[:_SHOWN]}-{precision}-{WRITER}.gguf"
    return _converted(name, lambda path: write_base(folder, path, precision=precision))


def adapter_file(folder: Path, *, base: Path) -> Path:
    """The PEFT adapter in `folder` as a GGUF adapter of `base`."""
    name = f"{adapter_content(folder)[:_SHOWN]}-{base_revision(base)[:_SHOWN]}-{WRITER}.lora.gguf"
    return _converted(name, lambda path: write_adapter(folder, path, base=base))


def base_revision(folder: Path) -> str:
    return find_base(str(folder), project_folder=Path()).revision


def adapter_content(folder: Path) -> str:
    """Hash what an adapter computes: its weights and its shape."""
    return fingerprint([file_digest(folder / name) for name in ADAPTER_FILES if (folder / name).exists()])


def _converted(name: str, write: Callable[[Path], None]) -> Path:
    folder = models_folder() / "gguf"
    path = folder / name
    if path.is_file():
        with suppress(OSError):
            os.utime(path)  # when it was last used
        return path
    try:
        most_bytes = float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GIB)) * GIB
    except ValueError as error:
        raise UserError(
            f"{LIMIT_VARIABLE} is not a number",
            why="it limits the converted files that are kept, in GiB",
            fix=f"export {LIMIT_VARIABLE}={DEFAULT_LIMIT_GIB:g}",
        ) from error
    try:
        make_folder(folder)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".gguf")
    except OSError as error:
        raise explain_os_error(error, folder) from error
    try:
        write(Path(temporary))
        os.fsync(descriptor)
        # Of several processes that convert the same model, each puts the same content here.
        Path(temporary).replace(path)
        sync_folder(folder)
        remove_unused(folder, most_bytes=most_bytes)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    return path


def remove_unused(folder: Path, *, most_bytes: float, now: float | None = None) -> list[Path]:
    """Remove the least recently used files until the rest is below the limit; returns them. A server that has
    a file open keeps reading it.
    """
    now = time.time() if now is None else now
    files = []
    for path in folder.glob("*.gguf"):
        with suppress(OSError):  # another process removed it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total, removed = sum(size for _, size, _ in files), []
    for used, size, path in sorted(files):
        unfinished = path.name.startswith(".")
        if now - used < _IN_USE_SECONDS or (total <= most_bytes and not unfinished):
            continue
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed.append(path)
            total -= size
    return removed


CONVERTER = "convert_hf_to_gguf.py"
CONVERTER_VARIABLE = "GRAFT_GGUF_CONVERTER"
EXTRA_SHARE = 0.001
"""Converters may add small tensors of their own (factors of rotary positions); never more than this."""


def find_converter(folder: Path = Path()) -> Path:
    """The script that the user named, has on the path, or has in a checkout next to the project."""
    configured = os.environ.get(CONVERTER_VARIABLE)
    if configured:
        if Path(configured).is_file():
            return Path(configured)
        raise _lacks(f"{CONVERTER_VARIABLE} names {configured}, and there is no such file")
    on_path = shutil.which(CONVERTER)
    for candidate in (*([Path(on_path)] if on_path else []), folder / "llama.cpp" / CONVERTER):
        if candidate.is_file():
            return candidate
    raise _lacks(f"{CONVERTER} is neither on the path nor in {folder / 'llama.cpp'}")


def convert(folder: Path, target: Path, *, converter: Path) -> None:
    """Run the converter; its output type follows the weights' own."""
    command = [sys.executable, str(converter), str(folder), "--outfile", str(target), "--outtype", "auto"]
    # Some checkouts bring the reader and writer that fits them.
    bundled = converter.parent / "gguf-py"
    path = os.pathsep.join(
        filter(None, [str(bundled) if bundled.is_dir() else "", os.environ.get("PYTHONPATH", "")])
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0 or not target.is_file():
        last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise EnvironmentFailure(
            "the converter to GGUF failed",
            why=" · ".join(last) or f"exit code {done.returncode}",
            fix="check whether it supports this kind of model, and `pip install gguf sentencepiece` for it",
            where=str(converter),
        )


def read_back(target: Path, folder: Path) -> dict[str, str | int | float]:
    """Read the converted file back; raises if it does not contain the model that was converted."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise EnvironmentFailure(
            "the package gguf is not installed",
            why="a GGUF file is read back before it counts as written",
            fix="pip install gguf",
        ) from error
    reader: Any = GGUFReader(str(target))
    architecture = str(_field(reader, "general.architecture"))
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    sizes = read_sizes(folder)
    weights, layers = sum(map(math.prod, sizes.values())), count_layers(folder)
    blocks = int(_field(reader, f"{architecture}.block_count") or 0)
    facts: dict[str, str | int | float] = {
        "architecture": architecture,
        "tensors": len(reader.tensors),
        "elements": elements,
        "blocks": blocks,
        "context_length": int(_field(reader, f"{architecture}.context_length") or 0),
        "embedding_length": int(_field(reader, f"{architecture}.embedding_length") or 0),
        "file_type": int(_field(reader, "general.file_type") or 0),
    }
    whole = weights <= elements <= weights * (1 + EXTRA_SHARE)
    if not whole or blocks != layers:
        raise NegativeResult(
            "the GGUF file does not hold the model that was converted",
            why=f"{elements} weights in {len(reader.tensors)} tensors and {blocks} blocks; the model has "
            f"{weights} in {len(sizes)} and {layers}",
            fix="use a converter that supports this kind of model",
            where=str(target),
        )
    return facts


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()


def _lacks(why: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        "there is no converter to GGUF here",
        why=why,
        fix=f"get llama.cpp (`git clone https://github.com/ggml-org/llama.cpp`) into the project's folder, "
        f"or set {CONVERTER_VARIABLE} to its {CONVERTER}",
    )


_SYSTEM, _FIRST, _REPLY, _SECOND = "qsystemq", "qfirstq", "qreplyq", "qsecondq"


class TurnTexts(NamedTuple):
    """What a template writes around the texts of a conversation that ends with a question."""

    opening: str
    """Text before the first question if there is no system message."""
    before_system: str
    after_system: str
    after_question: str
    """Text up to where the model begins to answer."""
    after_reply: str

    def write(self, messages: Sequence[Message]) -> str:
        """The prompt, as the Ollama template below gives it."""
        text = ""
        for index, message in enumerate(messages):
            if message.role == "system":
                text += f"{self.before_system}{message.content}{self.after_system}"
            elif message.role == "user":
                text += f"{'' if index else self.opening}{message.content}{self.after_question}"
            else:
                text += f"{message.content}{self.after_reply}"
        return text

    def to_go(self) -> str:
        """The same as a Go template. Every text is a string literal, whose white space cannot be trimmed."""
        system = f"{_go(self.before_system)}{{{{ .Content }}}}{_go(self.after_system)}"
        opening = f"{{{{ if eq $i 0 }}}}{_go(self.opening)}{{{{ end }}}}"
        question = f"{opening}{{{{ .Content }}}}{_go(self.after_question)}"
        reply = f"{{{{ .Content }}}}{_go(self.after_reply)}"
        return (
            "{{ range $i, $_ := .Messages }}"
            f'{{{{ if eq .Role "system" }}}}{system}'
            f'{{{{ else if eq .Role "user" }}}}{question}'
            f'{{{{ else if eq .Role "assistant" }}}}{reply}'
            "{{ end }}{{ end }}"
        )


def find_turn_texts(template: ChatTemplate) -> TurnTexts | None:
    """None if the template writes anything but fixed text between turns."""
    plain = _split(template, _user(_FIRST), _reply(_REPLY), _user(_SECOND))
    directed = _split(template, Message(role="system", content=_SYSTEM), _user(_FIRST))
    if plain is None or directed is None:
        return None
    texts = TurnTexts(plain[0], directed[0], directed[1], plain[1], plain[2])
    tries = (
        (_user("one"),),
        (Message(role="system", content="be brief"), _user("one"), _reply("two"), _user("three")),
        (_user("one"), _reply("two"), _user("three"), _reply("four"), _user("five")),
    )
    same = all(texts.write(messages) == template.prompt_text(messages) for messages in tries)
    return texts if same else None


def write_modelfile(template: ChatTemplate, *, gguf: str) -> str:
    lines = [f"FROM ./{gguf}"]
    turns = find_turn_texts(template)
    if turns is not None:
        lines.append(f'TEMPLATE """{turns.to_go()}"""')
    else:
        lines.append(
            "# The chat template has no fixed texts between turns: Ollama takes the one in the file."
        )
    lines += [f"PARAMETER stop {json.dumps(template.end_of_turn)}", "PARAMETER temperature 0"]
    return "\n".join(lines) + "\n"


def _split(template: ChatTemplate, *messages: Message) -> list[str] | None:
    """The texts around the contents; None if a content is missing or changed."""
    remaining, parts = template.prompt_text(messages), []
    for message in messages:
        before, separator, remaining = remaining.partition(message.content)
        if not separator:
            return None
        parts.append(before)
    return [*parts, remaining]


def _user(text: str) -> Message:
    return Message(role="user", content=text)


def _reply(text: str) -> Message:
    return Message(role="assistant", content=text)


def _go(text: str) -> str:
    """A Go string literal in an action. A run of three quotes would end the text in the Modelfile."""
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if text else ""
