"""What one family of decoders has otherwise than Llama: its linear layers, norms and biases, from its config.

In: a config with the names of today. Out: the linear layers of a block and how many parameters there are,
without a weight being read. Pure. To add a family: one entry in FAMILIES.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

NESTED = "text_config"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Family(NamedTuple):
    """How a block is built. The defaults are Llama's."""

    norms: int = 2
    """Norms over the hidden state in a block, each with a weight."""
    norm_bias: bool = False
    final_norm: bool = True
    head_norms: Literal["none", "head", "width"] = "none"
    """Norms on q and k: one of a head's width for all heads, or over the whole width."""
    biased: tuple[str, ...] = ()
    """Linear layers with a bias."""
    layers: Literal["llama", "phi3", "phi", "starcoder2", "gpt_neox", "gpt2"] = "llama"
    head_bias: bool = False
    positions: bool = False
    """Learned positions, a row each."""
    tied: bool = False
    """Where the config does not say it."""


QKV = ("q_proj", "k_proj", "v_proj")
PLAIN = Family()
FAMILIES: dict[str, Family] = {
    "llama": PLAIN,
    "mistral": PLAIN,
    "ministral": PLAIN,
    "granite": PLAIN,
    "smollm3": PLAIN._replace(tied=True),
    "mixtral": PLAIN,
    "qwen2": Family(biased=QKV),
    "qwen2_moe": Family(biased=QKV),
    "qwen3": Family(head_norms="head"),
    "qwen3_moe": Family(head_norms="head"),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(norms=4, head_norms="head", tied=True),
    "phi3": Family(layers="phi3"),
    "phi": Family(
        norms=1,
        norm_bias=True,
        layers="phi",
        biased=(*QKV, "dense", "fc1", "fc2"),
        head_bias=True,
    ),
    "olmo": Family(norms=0, final_norm=False),
    "olmo2": Family(head_norms="width"),
    "olmo3": Family(head_norms="width"),
    "stablelm": Family(norm_bias=True),
    "starcoder2": Family(
        norm_bias=True, layers="starcoder2", biased=(*QKV, "o_proj", "c_fc", "c_proj"), tied=True
    ),
    "gpt_neox": Family(
        norm_bias=True,
        layers="gpt_neox",
        biased=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    "gpt2": Family(
        norm_bias=True,
        layers="gpt2",
        biased=("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
        positions=True,
        tied=True,
    ),
}

LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    },
}
"""What configs of a family leave out where it is the usual."""


class Stated(NamedTuple):
    """`linears` of a block by the end of their path; what a block and the whole hold beside them."""

    linears: dict[str, tuple[int, int]]
    block: int
    beside: int
    """Parameters of neither blocks nor embeddings nor head."""


def find_family(config: Mapping[str, Any]) -> Family | None:
    return FAMILIES.get(config.get("model_type", ""))


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the decoder itself, with what its family leaves out."""
    inner = dict(config.get(NESTED) or {})
    whole = {**config, **inner}
    whole.pop(NESTED, None)
    if "model_type" not in inner and NESTED in config:
        whole["model_type"] = f"{config.get('model_type', '')}_text"
    left_out = LEFT_OUT.get(whole.get("model_type", ""), {})
    return {**left_out, **{key: value for key, value in whole.items() if value is not None}}


def count_stated(config: Mapping[str, Any], *, q: int, kv: int, head_dim: int) -> Stated:
    """What a decoder of these sizes has, by its family; as Llama where the family is not known."""
    family = find_family(config) or PLAIN
    h, i = config["hidden_size"], config["intermediate_size"]
    linears = _linears(family, h=h, i=i, q=q, kv=kv)
    biased = _biased(config, family, linears)
    norm = (2 if family.norm_bias else 1) * h
    block = sum(a * b for a, b in linears.values()) + family.norms * norm
    block += sum(linears[name][1] for name in biased)
    if family.head_norms == "head":
        block += 2 * head_dim
    if family.head_norms == "width":
        block += q + kv
    experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
    if experts:
        mlp = {name: linears.pop(name) for name in ("gate_proj", "up_proj", "down_proj")}
        block -= sum(a * b for a, b in mlp.values())
        block += experts * (3 * h * config.get("moe_intermediate_size", i) + h)
        shared = config.get("shared_expert_intermediate_size", 0)
        block += 3 * h * shared + (h if shared else 0)
    beside = norm if family.final_norm else 0
    beside += config["vocab_size"] if family.head_bias else 0
    beside += config.get("max_position_embeddings", 0) * h if family.positions else 0
    return Stated(linears, block, beside)


def _biased(config: Mapping[str, Any], family: Family, linears: Mapping[str, tuple[int, int]]) -> list[str]:
    """Layers with a bias: the family's, and those that the config asks for."""
    named = list(family.biased)
    if config.get("attention_bias") and family.layers == "llama":
        named += [*QKV, "o_proj"]
    if config.get("use_qkv_bias"):
        named += QKV
    if config.get("mlp_bias"):
        named += ["gate_proj", "up_proj", "down_proj"]
    if family.layers == "starcoder2" and config.get("use_bias") is False:
        named = []
    return [name for name in dict.fromkeys(named) if name in linears]


def _linears(family: Family, *, h: int, i: int, q: int, kv: int) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of a block's linear layers."""
    apart = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv)}
    if family.layers == "phi3":
        return {
            "qkv_proj": (h, q + 2 * kv),
            "o_proj": (q, h),
            "gate_up_proj": (h, 2 * i),
            "down_proj": (i, h),
        }
    if family.layers == "phi":
        return {**apart, "dense": (q, h), "fc1": (h, i), "fc2": (i, h)}
    if family.layers == "starcoder2":
        return {**apart, "o_proj": (q, h), "c_fc": (h, i), "c_proj": (i, h)}
    if family.layers == "gpt_neox":
        return {
            "query_key_value": (h, 3 * h),
            "dense": (h, h),
            "dense_h_to_4h": (h, i),
            "dense_4h_to_h": (i, h),
        }
    if family.layers == "gpt2":
        return {"c_attn": (h, 3 * h), "attn.c_proj": (h, h), "c_fc": (h, i), "mlp.c_proj": (i, h)}
    return {**apart, "o_proj": (q, h), "gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}
