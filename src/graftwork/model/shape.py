"""The numbers of a decoder, read from its config.json; and how many parameters they make.

Pure but for reading one small file. Needs no torch.
"""

import json
from pathlib import Path

from graftwork.records.errors import UserMistake
from graftwork.records.plan import ModelShape

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def read_shape(folder: Path) -> ModelShape:
    config = json.loads((folder / "config.json").read_text())
    try:
        heads = config["num_attention_heads"]
        return ModelShape(
            name=config.get("_name_or_path") or folder.name,
            hidden_size=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            tied_embeddings=config.get("tie_word_embeddings", False),
            max_positions=config.get("max_position_embeddings", 2048),
        )
    except KeyError as missing:
        raise UserMistake(
            f"config.json has no {missing}",
            why="the plan needs the shape of the model",
            fix="use a decoder whose config.json names its sizes (Llama, Qwen, Mistral, …)",
            where=str(folder / "config.json"),
        ) from missing


def linear_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of each linear layer of a block."""
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


def layer_parameters(shape: ModelShape) -> int:
    return sum(a * b for a, b in linear_sizes(shape).values()) + 2 * shape.hidden_size


def total_parameters(shape: ModelShape) -> int:
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.layers * layer_parameters(shape) + shape.hidden_size


def adapter_parameters(shape: ModelShape, *, rank: int, targets: tuple[str, ...], layers: int) -> int:
    sizes = linear_sizes(shape)
    return layers * sum(rank * (sizes[t][0] + sizes[t][1]) for t in targets)
