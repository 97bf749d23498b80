"""Finds the definition of a model family, and counts the parameters of a decoder by it.

In: a config. Out: the family, the linear layers of a block and how many parameters there are, without
reading weights.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

from graftwork.model.families.definitions import FAMILIES
from graftwork.model.families.family import QKV, Linears, ModelFamily, Widths, separate_projections

NESTED = "text_config"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Of the MLP, as graft's own training steps compute them."""
ROTARY = ("default", "llama3", "linear", "yarn")
"""Kinds of rotary positions that depend on nothing but the position."""
LIKE_LLAMA = ModelFamily("")
"""What a decoder of an unknown family is counted as."""


@cache
def all_families() -> Mapping[str, ModelFamily]:
    """By `model_type`."""
    return {family.name: family for family in FAMILIES}


def find_family(model_type: str | None) -> ModelFamily | None:
    return all_families().get(model_type or "")


def family_or_llama(model_type: str | None) -> ModelFamily:
    return find_family(model_type) or LIKE_LLAMA


def recipe_family(model_type: str) -> ModelFamily:
    """The family whose plain step is written out; else Llama, which is what its memory is estimated as."""
    family = find_family(model_type)
    return family if family is not None and family.recipe is not None else LIKE_LLAMA


def has_recipe(model_type: str) -> bool:
    return recipe_family(model_type).recipe is not None


def why_not_written_out(config: Mapping[str, Any]) -> str | None:
    """Why graft's own training steps do not compute this model's blocks; None if they do."""
    name = config.get("model_type")
    layout = family_or_llama(name).block
    if layout is None:
        return f"its blocks are of the family {name}, which are not written out"
    activation = config.get("hidden_activation") or config.get("hidden_act") or layout.activation
    kinds = [rope.get("rope_type") or rope.get("type") or "default" for rope in rope_settings(config)]
    reasons = {
        f"its activation is {activation}, not one of {', '.join(ACTIVATIONS)}": activation not in ACTIVATIONS,
        "its queries and keys have norms of mean and variance (use_qk_norm)": config.get("use_qk_norm"),
        "its tokens see later ones": config.get("use_bidirectional_attention"),
        "its rotary positions depend on the length of a batch": {"dynamic", "longrope"} & set(kinds),
        f"its rotary positions are of the kind {', '.join(kinds)}": set(kinds) - set(ROTARY),
        "its rotary positions turn a part of each head only": any(
            rope["partial_rotary_factor"] != 1 for rope in rope_settings(config)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def rope_settings(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a config says of rotary positions: once, or for each type of attention."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [value for value in stated.values() if isinstance(value, Mapping)]
    whole = {"partial_rotary_factor": config.get("partial_rotary_factor") or 1.0}
    return [whole | dict(kind) for kind in kinds or [stated]]


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the decoder itself, with what its family leaves out."""
    inner = dict(config.get(NESTED) or {})
    whole = {**config, **inner}
    whole.pop(NESTED, None)
    if "model_type" not in inner and NESTED in config:
        whole["model_type"] = f"{config.get('model_type', '')}_text"
    defaults = family_or_llama(whole.get("model_type")).defaults
    return {**defaults, **{key: value for key, value in whole.items() if value is not None}}


def count_stated(config: Mapping[str, Any], *, q: int, kv: int, head_dim: int) -> tuple[Linears, int, int]:
    """The linear layers of a block, its parameters, and those outside of blocks and tables: by the family, as
    Llama where that is unknown."""
    family = family_or_llama(config.get("model_type"))
    h, i = config["hidden_size"], config["intermediate_size"]
    linears = family.linears(Widths(h, i, q, kv))
    norm = (2 if family.norm_bias else 1) * h
    block = sum(a * b for a, b in linears.values()) + family.norms * norm
    # Layers with a bias: the family's, and those that the config asks for.
    biased = list(family.biased)
    if config.get("attention_bias") and family.linears is separate_projections:
        biased += [*QKV, "o_proj"]
    if config.get("use_qkv_bias"):
        biased += QKV
    if config.get("mlp_bias"):
        biased += ["gate_proj", "up_proj", "down_proj"]
    if family.bias_switch and config.get(family.bias_switch) is False:
        biased = []
    block += sum(linears[name][1] for name in dict.fromkeys(biased) if name in linears)
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
    outside = norm if family.final_norm else 0
    outside += config["vocab_size"] if family.head_bias else 0
    outside += config.get("max_position_embeddings", 0) * h if family.positions else 0
    return linears, block, outside
