"""Which models the GGUF writer knows, and how llama.cpp names and lays out their tensors.

In: the config.json of a base. Out: the architecture, its metadata, names of tensors and the order of their
rows. A family that is not listed is refused: a file with rows in the wrong order loads and answers nonsense.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graftwork.model.families.registry import complete_config
from graftwork.records.errors import UserMistake

Array = NDArray[Any]


class GgufFamily(NamedTuple):
    """`interleaved`: llama.cpp rotates neighbouring rows of queries and keys, transformers the two halves."""

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
        self.config = complete_config(config)
        family = FAMILIES.get(str(self.config.get("model_type")))
        if family is None:
            raise UserMistake(
                f"a model of the type {self.config.get('model_type')!r} cannot be written as GGUF",
                why=f"the writer knows {', '.join(FAMILIES)}",
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
        self._names = _name_map(self.name, self.layers)
        self._rope = _rope_settings(self.config)

    def metadata(self) -> dict[str, int | float | str]:
        """Keys and values of the file, without `general.*` and the tokenizer."""
        config, rope = self.config, self._rope
        found: dict[str, int | float | str] = {
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
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
        elif kind not in ("default", "llama3"):
            raise self._unknown(f"rotary positions of the kind {kind!r}")
        if config.get("use_sliding_window"):
            raise self._unknown("sliding window attention")
        return {f"{self.name}.{key}": value for key, value in found.items()}

    def rope_factors(self) -> Array | None:
        """What llama.cpp divides the frequencies by, for positions scaled as in Llama 3; else None."""
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
        found: str | None = self._names.get_name(path)
        if found is None or suffix not in ("weight", "bias"):
            raise self._unknown(f"the weight {name}")
        return f"{found}.{suffix}"

    def arrange(self, path: str, rows: Array) -> Array:
        """The rows, which are outputs of the layer at `path`, in the order that llama.cpp expects."""
        layer = path.rpartition(".")[2]
        if not self._family.interleaved or layer not in _ROTATED:
            return rows
        heads = self.heads if layer == "q_proj" else self.kv_heads
        halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)

    def _unknown(self, what: str) -> UserMistake:
        return UserMistake(
            f"{what} cannot be written as GGUF",
            why=f"the writer does not know it in a model of the type {self.config.get('model_type')!r}",
            fix="serve it with the embedded engine or vLLM",
            where=self._where,
        )


def _name_map(architecture: str, layers: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return get_tensor_name_map(kind, layers)


def _rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rotary positions, as configs since transformers 5 and before it state them."""
    old = dict(config.get("rope_scaling") or {})
    settings = {"rope_theta": config.get("rope_theta"), **old, **(config.get("rope_parameters") or {})}
    settings.setdefault("rope_type", old.get("type", "default"))
    return settings
