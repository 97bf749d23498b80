"""The numbers of a decoder, read from its config.json; and how many parameters they make.

A family that is not known is read from the headers of its safetensors files: the sizes of its tensors, for
any decoder whose blocks are numbered. Reads no tensor; needs no torch.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graftwork.files.safetensors import read_header
from graftwork.model.families import (
    EXPERTS,
    BlockLayout,
    complete_config,
    count_stated,
    find_family,
    why_not_written_out,
)
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.plan import ModelShape, Workload

BLOCK = re.compile(r"^(?:.*?\.)?(\d+)\.(.+)$")
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Small linear layers that choose between experts: an adapter there destabilizes routing."""


def count_layers(folder: Path) -> int:
    """Number of blocks, as the folder's config states it."""
    config = json.loads((folder / "config.json").read_text())
    return int(next((config[key] for key in ("num_hidden_layers", "n_layer") if key in config), 0))


def read_sizes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of the folder."""
    sizes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        entries = read_header(path, fix="fetch the model again")
        try:
            sizes |= {name: tuple(entry["shape"]) for name, entry in entries.items() if "shape" in entry}
        except TypeError as error:
            raise Corrupted(
                f"{path.name} states no shapes", fix="fetch the model again", where=str(path)
            ) from error
    return sizes


def count_tensors(
    sizes: Mapping[str, tuple[int, ...]], *, tied: bool, transposed: bool = False
) -> tuple[dict[str, tuple[int, int]], int, int] | None:
    """Count a decoder's tensors: (inputs, outputs) of the linear layers of its top block, by the shortest
    suffix of the path that identifies the layer; the parameters of that block; all parameters. None if no
    blocks are numbered. `transposed`: its weights are stored as [in, out], as in GPT-2.
    """
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    total = 0
    for name, shape in sizes.items():
        if len(shape) > 3 or (tied and name.startswith("lm_head.")):
            continue  # Masks that old files carry, and a head that is the embedding again.
        total += math.prod(shape)
        match = BLOCK.match(name)
        if match:
            blocks.setdefault(int(match[1]), {})[match[2]] = shape
    if not blocks:
        return None
    top = blocks[max(blocks)]
    # Experts are one tensor in memory, and no linear layers.
    weights = {
        path.removesuffix(".weight"): shape
        for path, shape in top.items()
        if path.endswith(".weight") and len(shape) == 2 and not {"experts", "router"} & set(path.split("."))
    }
    leaves = [path.rsplit(".", 1)[-1] for path in weights]
    linears: dict[str, tuple[int, int]] = {}
    for path, shape in sorted(weights.items()):
        leaf = path.rsplit(".", 1)[-1]
        if leaf not in ROUTERS:
            inputs, outputs = shape if transposed else (shape[1], shape[0])
            linears[leaf if leaves.count(leaf) == 1 else path] = (inputs, outputs)
    return linears, sum(map(math.prod, top.values())), total


# What the layers of a decoder remember of a text while it is written, by the decoder's config. Pure. Input: a
# config with the names of today. Output: positions of each layer. Needs neither torch nor transformers; as
# their cache decides it (`cache_utils.DynamicCache`).
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
EMPTY = ("moe", "mlp")
"""Layers without attention."""
USUAL_STATES = 16
"""State values per hidden value, if a config does not state it (Mamba)."""


def remembered_positions(config: Mapping[str, Any], *, layers: int, position_values: int) -> tuple[int, ...]:
    """How many positions each layer remembers, 0 for all of them; empty if every layer remembers all.

    A state counts as the positions whose keys and values, `position_values` each, would take as much.
    """
    types = config.get("layer_types") or _types_of_windows(config, layers)
    sizes = {FULL: 0, SLIDING: config.get("sliding_window"), CHUNKED: config.get("attention_chunk_size")}
    positions = []
    for kind in types:
        size = sizes.get(kind)
        if size is None:
            size = 1 if kind in EMPTY else math.ceil(_state_values(config) / position_values)
        positions.append(size)
    return tuple(positions) if any(positions) else ()


def _types_of_windows(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Windows in all layers, in all but every n-th one, or in those from a certain one on."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        kind = CHUNKED if config.get("attention_chunk_size") else FULL
        return [kind] * layers
    every = config.get("sliding_window_pattern") or layers + 1
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return [SLIDING if layer >= first and (layer + 1) % every else FULL for layer in range(layers)]


def _state_values(config: Mapping[str, Any]) -> int:
    """Values of a layer with a recurrent state instead of keys and values, for one text."""
    products = (
        ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
        ("hidden_size", "conv_L_cache"),
    )
    for names in products:
        if all(config.get(name) for name in names):
            return math.prod(int(config[name]) for name in names)
    return int(config["hidden_size"]) * USUAL_STATES


OLD_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
"""Names in configs of GPT-2."""


MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1_000_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 10**12,
    "sliding_window_pattern": 10_000,
    "num_experts_per_tok": 100_000,
    "moe_intermediate_size": 10_000_000,
    **dict.fromkeys(EXPERTS, 100_000),
}
"""Far beyond any model: a config that states more is damaged, or an attempt to exhaust memory."""
NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")


LLAMA_LIKE = (None, BlockLayout())


def read_shape(folder: Path) -> ModelShape:
    """The shape that the config states, corrected by what the weights say."""
    config = _read_config(folder / "config.json")
    shape = _stated_shape(
        config, name=config.get("_name_or_path") or folder.name, where=folder / "config.json"
    )
    transposed = config.get("model_type") == "gpt2"
    counted = count_tensors(read_sizes(folder), tied=shape.tied_embeddings, transposed=transposed)
    return shape_of(config, name=shape.name) if counted is None else _with_counts(shape, *counted)


def read_config_shape(file: Path) -> ModelShape:
    """The shape that a config.json states. What the weights would show comes from the family."""
    config = _read_config(file)
    name = str(config.get("_name_or_path") or file.resolve().parent.name)
    return shape_of(config, name=name, where=file)


def read_model_type(file: Path) -> str | None:
    """The family that a config.json states, by transformers' name."""
    return _read_config(file).get("model_type")


def shape_of(config: Mapping[str, Any], *, name: str, where: Path | None = None) -> ModelShape:
    """The shape of a decoder from its config only: linear layers, biases and norms are its family's."""
    whole = _with_names_of_today(config)
    shape = _stated_shape(whole, name=name, where=where)
    linears, block, outside = count_stated(
        whole,
        q=shape.heads * shape.head_dim,
        kv=shape.kv_heads * shape.head_dim,
        head_dim=shape.head_dim,
    )
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return _with_counts(shape, linears, block, embeddings + shape.layers * block + outside)


def _with_counts(
    shape: ModelShape, linears: dict[str, tuple[int, int]], block: int, parameters: int
) -> ModelShape:
    """The shape with what differs from a Llama of its sizes."""
    shape = shape.model_copy(update={"linears": linears if linears != linear_sizes(shape) else {}})
    differs = block != layer_parameters(shape)
    counted = parameters != total_parameters(shape)
    return shape.model_copy(
        update={
            "block_parameters": block if differs else None,
            "parameters": parameters if counted else None,
        }
    )


def _read_config(file: Path) -> dict[str, Any]:
    """config.json with current names."""
    return _with_names_of_today(read_json_object(file, states="the sizes of the model"))


def read_json_object(file: Path, *, states: str) -> dict[str, Any]:
    """Read the settings in a JSON file of a base model; `states` is the purpose of the file."""
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError as missing:
        raise UserError(
            f"there is no {file}",
            why=f"it states {states}",
            fix=f"specify a folder with a {file.name}, or the file itself",
            where=str(file),
        ) from missing
    except (ValueError, RecursionError) as broken:
        raise UserError(
            f"{file.name} is not JSON: {broken}",
            why=f"it states {states}",
            fix="fetch the file again",
            where=str(file),
        ) from broken
    if not isinstance(settings, dict):
        raise UserError(
            f"{file.name} is not a mapping of settings",
            why=f"it states {states}",
            fix="fetch the file again",
            where=str(file),
        )
    return settings


def _with_names_of_today(stated: Mapping[str, Any]) -> dict[str, Any]:
    config = complete_config(stated)
    for name, old in OLD_NAMES.items():
        if name not in config and config.get(old) is not None:
            config[name] = config[old]
    if "n_embd" in config and "intermediate_size" not in config:
        config["intermediate_size"] = 4 * config["n_embd"]
    return config


def _stated_shape(config: Mapping[str, Any], *, name: str, where: Path | None) -> ModelShape:
    _check_sizes(config, where=str(where or name))
    family = find_family(config.get("model_type"))
    experts: dict[str, int] = {}
    try:
        if count := next((config[key] for key in EXPERTS if config.get(key)), 0):
            used = config.get("num_experts_per_tok") or count
            inner = config.get("moe_intermediate_size") or config["intermediate_size"]
            experts = {"experts": count, "experts_used": used, "expert_inner": inner}
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return ModelShape(
            name=name,
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", family.tied if family else "n_embd" in config),
            max_positions=config.get("max_position_embeddings", 2048),
            **experts,
            architecture=config["model_type"] if family and family.block not in LLAMA_LIKE else "",
            remembered=remembered_positions(
                config, layers=config["num_hidden_layers"], position_values=2 * kv_heads * head_dim
            ),
            not_written_out=why_not_written_out(config),
        )
    except KeyError as missing:
        raise UserError(
            f"config.json has no {missing}",
            why="the plan needs the shape of the model",
            fix="use a decoder whose config.json names its sizes (Llama, Qwen, Mistral, …)",
            where=str(where or name),
        ) from missing


def _check_sizes(config: Mapping[str, Any], *, where: str) -> None:
    for name, most in MOST.items():
        size = config.get(name)
        if size is None or (size == 0 and name not in NEEDED):
            continue
        whole = isinstance(size, int | float) and not isinstance(size, bool) and size == size // 1
        if not whole or not 0 < size <= most:
            raise UserError(
                f"config.json states {name}: {str(size)[:40]}",
                why=f"it is a whole number from 1 to {most:,}",
                fix="fetch the file again, or use another base",
                where=where,
            )


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of one expert: gate, up and down."""
    return 3 * shape.hidden_size * shape.expert_inner


def describe_experts(shape: ModelShape, *, adapted: bool, four_bits: bool = False) -> str | None:
    """What is adapted of a mixture-of-experts model, and what is not; None for a dense one."""
    if not shape.experts:
        return None
    used = f"a token goes through {shape.experts_used} of {shape.experts} experts of a block"
    stay = "; the experts stay in 16 bits" if four_bits else ""
    if adapted:
        return f"{used}; attention and all experts are adapted, routers are not{stay}"
    return f"{used}; only attention is adapted, experts and routers are not (`train.experts: true`){stay}"


def active_layer_parameters(shape: ModelShape) -> int:
    """Parameters of a block that a token is routed through."""
    idle = shape.experts - shape.experts_used
    return layer_parameters(shape) - idle * expert_parameters(shape)


def active_parameters(shape: ModelShape) -> int:
    idle = layer_parameters(shape) - active_layer_parameters(shape)
    return total_parameters(shape) - shape.layers * idle


def linear_sizes(shape: ModelShape) -> Mapping[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of a block, by the end of its path."""
    if shape.linears:
        return shape.linears
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "q_proj": (h, q),
        "k_proj": (h, kv),
        "v_proj": (h, kv),
        "o_proj": (q, h),
        "gate_proj": (h, i),
        "up_proj": (h, i),
        "down_proj": (i, h),
    }


def joined_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the products in graft's own step: queries, keys and values fused, gate and up
    fused.
    """
    sizes = dict(linear_sizes(shape))
    joined: dict[str, tuple[int, int]] = {}
    layout = layout_of_shape(shape)
    for name, paths in (("qkv", layout.qkv), ("gate_up", layout.gate_up)):
        members = [path.rsplit(".", 1)[-1] for path in paths]
        if all(member in sizes for member in members):
            parts = [sizes.pop(member) for member in members]
            joined[name] = (parts[0][0], sum(outputs for _, outputs in parts))
    return {**joined, **sizes}


def layout_of_shape(shape: ModelShape) -> BlockLayout:
    """How graft's own steps compute its blocks; as Llama's by default."""
    family = find_family(shape.architecture)
    return (family.block if family is not None else None) or BlockLayout()


def linear_names(shape: ModelShape) -> tuple[str, ...]:
    """The names that adapters are targeted by; two layers of a block can share one."""
    return tuple(dict.fromkeys(path.rsplit(".", 1)[-1] for path in linear_sizes(shape)))


def layer_parameters(shape: ModelShape) -> int:
    if shape.block_parameters is not None:
        return shape.block_parameters
    return sum(a * b for a, b in linear_sizes(shape).values()) + 2 * shape.hidden_size


def cached_numbers(layers: int, kv_heads: int, head_dim: int) -> int:
    """Numbers that attention caches per token: its keys and values in every layer."""
    return 2 * layers * kv_heads * head_dim


def cache_bytes(shape: ModelShape, *, tokens: float, width: float, rows: float = 1) -> float:
    """Keys and values of rows that grow to `tokens`, in `width` bytes each."""
    return cached_numbers(shape.layers, shape.kv_heads, shape.head_dim) * width * tokens * rows


def total_parameters(shape: ModelShape) -> int:
    if shape.parameters is not None:
        return shape.parameters
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.layers * layer_parameters(shape) + shape.hidden_size


def adapter_parameters(
    shape: ModelShape,
    *,
    rank: int,
    targets: tuple[str, ...],
    layers: int,
    ranks: Mapping[str, int] | None = None,
    method: str = "lora",
    experts: bool = False,
) -> int:
    """Trained parameters: the adapters of `layers` layers, or with `full` their weights themselves."""
    if method == "full":
        return total_parameters(shape) if layers == shape.layers else layers * layer_parameters(shape)
    count = 0
    for path, (inputs, outputs) in linear_sizes(shape).items():
        name = path.rsplit(".", 1)[-1]
        if name in targets:
            count += (ranks or {}).get(name, rank) * (inputs + outputs)
            count += outputs if method == "dora" else 0
    return layers * (count + (expert_adapter_parameters(shape, rank) if experts else 0))


def expert_adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Adapter parameters of the experts of one block. An expert has two stacked weights: gate and up, and
    down.
    """
    h, inner = shape.hidden_size, shape.expert_inner
    return shape.experts * rank * ((h + 2 * inner) + (inner + h))


def trained_by(shape: ModelShape, work: Workload) -> int:
    """Parameters that a run trains."""
    return adapter_parameters(
        shape,
        rank=work.rank,
        targets=work.targets,
        layers=work.adapted_layers,
        ranks=work.ranks,
        method=work.method,
        experts=work.experts,
    )
