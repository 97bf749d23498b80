"""Model families, each defined once as far as it differs from Llama: layers, norms, biases, recipe of a step.

Input: a config. Output: the family, the linear layers of a block and how many parameters there are, without
reading weights. To add a family, write its `ModelFamily` into `FAMILIES`, and a test. Needs no torch.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

Linears = dict[str, tuple[int, int]]
"""(inputs, outputs) of the linear layers of a block, by the suffix of their path."""

QKV = ("q_proj", "k_proj", "v_proj")


class Widths(NamedTuple):
    """The widths that the layers of a block are made of."""

    hidden: int
    inner: int
    q: int
    kv: int


def separate_projections(w: Widths) -> Linears:
    """Queries, keys and values each with their own layer, and a gated MLP."""
    return {
        **query_key_value(w),
        "o_proj": (w.q, w.hidden),
        "gate_proj": (w.hidden, w.inner),
        "up_proj": (w.hidden, w.inner),
        "down_proj": (w.inner, w.hidden),
    }


def query_key_value(w: Widths) -> Linears:
    return {"q_proj": (w.hidden, w.q), "k_proj": (w.hidden, w.kv), "v_proj": (w.hidden, w.kv)}


class PlainRecipe(NamedTuple):
    """How the block of transformers computes, as far as memory depends on it (costmodel/plain_decoder.py)."""

    norm: Literal["llama", "gemma", "olmo2"] = "llama"
    """When the norm multiplies with its weight and casts back."""
    fused: bool = False
    """One product gives queries, keys and values; one gives gate and up."""
    norm_after: bool = False
    """Norms come after attention and MLP instead of before them."""
    scaled_embedding: bool = False


class BlockLayout(NamedTuple):
    """A block as graft's own training steps compute it (`train/gpu`, `train/cpu`): where its layers are, and
    how it differs from Llama's. What configs choose (windows, caps, multipliers) is read from the model.
    """

    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    """RMS norm; RMS norm whose weight is stored less one; norm of mean and variance."""
    activation: Literal["silu", "gelu_pytorch_tanh", "gelu"] = "silu"
    """Default if the config names none."""
    gated: bool = True
    """The MLP multiplies its activation with a second product."""
    parallel: bool = False
    """Attention and MLP read the same normed input."""
    interleaved: bool = False
    """Rotary positions rotate neighboring values; otherwise those half a head apart."""
    scaled_residual: bool = False
    """The output of attention and MLP is scaled before it is added."""
    capped: bool = False
    """Attention scores are capped, which fused attention does not support."""


class ModelFamily(NamedTuple):
    """One `model_type` of transformers."""

    name: str
    linears: Callable[[Widths], Linears] = separate_projections
    norms: int = 2
    """Norms over the hidden state in a block, each with a weight."""
    norm_bias: bool = False
    final_norm: bool = True
    head_norms: Literal["none", "head", "width"] = "none"
    """Norms of queries and keys: none, over each head, over all heads at once."""
    capped_attention: bool = False
    """Scores are capped, which fused attention does not support: transformers computes them step by step."""
    biased: tuple[str, ...] = ()
    """Linear layers with a bias."""
    bias_switch: str = ""
    """A key of the config that turns all biases off."""
    head_bias: bool = False
    positions: bool = False
    """Learned positions, one row each."""
    tied: bool = False
    """Whether the head is the embedding if the config does not state it."""
    defaults: Mapping[str, Any] = {}
    """What configs of the family leave out."""
    recipe: PlainRecipe | None = None
    """None: the memory of its plain step is traced, or estimated as a Llama's."""
    block: BlockLayout | None = None
    """graft's own training steps compute such blocks; None: it is trained on the plain path."""
    plain_logits: bool = False
    """Its logits are the output of its head, without a cap or a scale: no trial is needed."""


LLAMA = ModelFamily("llama", recipe=PlainRecipe(), block=BlockLayout(), plain_logits=True)
QWEN_WINDOWS = {"use_sliding_window": False, "max_window_layers": 28}
"""Configs name a window that is only used if a flag says so."""
DENSE_QWEN = ModelFamily(
    "",
    recipe=PlainRecipe(),
    block=BlockLayout(),
    plain_logits=True,
    defaults={"sliding_window": 4096, **QWEN_WINDOWS},
)
GEMMA = BlockLayout(norm="rms_plus_one", activation="gelu_pytorch_tanh")
LATER_GEMMA = GEMMA._replace(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)
NORMS_AFTER = BlockLayout(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)
COHERE = BlockLayout(before_mlp="input_layernorm", norm="layer", parallel=True, interleaved=True)


FAMILIES = (
    # Llama, and the families that have its blocks.
    LLAMA,
    LLAMA._replace(name="mistral"),
    ModelFamily("ministral"),
    ModelFamily("mixtral"),
    ModelFamily("stablelm", norm_bias=True),
    # Qwen 2 (biases on queries, keys and values) and Qwen 3 (norms of each head), dense and with experts.
    DENSE_QWEN._replace(name="qwen2", biased=QKV),
    ModelFamily("qwen2_moe", biased=QKV, defaults=QWEN_WINDOWS),
    DENSE_QWEN._replace(name="qwen3", head_norms="head"),
    ModelFamily("qwen3_moe", head_norms="head", defaults=QWEN_WINDOWS),
    # SmolLM 3: Llama's blocks, of which every fourth has no rotary positions.
    ModelFamily(
        "smollm3",
        tied=True,
        block=BlockLayout(),
        plain_logits=True,
        defaults={"use_sliding_window": False},
    ),
    # Granite: Llama's blocks with multipliers on embeddings, scores, residuals and logits.
    ModelFamily("granite", block=BlockLayout(scaled_residual=True)),
    ModelFamily("granitemoe"),
    # Gemma, Gemma 2 and Gemma 3.
    ModelFamily(
        "gemma",
        tied=True,
        defaults={"head_dim": 256},
        recipe=PlainRecipe(norm="gemma", scaled_embedding=True),
        block=GEMMA,
    ),
    ModelFamily(
        "gemma2",
        norms=4,
        capped_attention=True,
        tied=True,
        defaults={"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
        block=LATER_GEMMA._replace(capped=True),
    ),
    ModelFamily(
        "gemma3_text",
        norms=4,
        head_norms="head",
        tied=True,
        block=LATER_GEMMA,
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            # That of all sizes but 1B, which states its own.
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    ),
    # OLMo and OLMoE: without weights in its norms; from OLMo 2 on with norms after attention and MLP.
    ModelFamily("olmo", norms=0, final_norm=False, plain_logits=True),
    ModelFamily(
        "olmo2",
        head_norms="width",
        recipe=PlainRecipe(norm="olmo2", norm_after=True),
        block=NORMS_AFTER,
        plain_logits=True,
    ),
    ModelFamily("olmoe", head_norms="width"),
    ModelFamily(
        "olmo3",
        head_norms="width",
        block=NORMS_AFTER,
        plain_logits=True,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    # Cohere: attention and MLP next to each other after one norm of mean and variance, scaled logits.
    ModelFamily("cohere", norms=1, tied=True, block=COHERE),
    ModelFamily(
        "cohere2",
        norms=1,
        tied=True,
        block=COHERE,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    # StarCoder 2: layer norms and linear layers with biases, no gate in the MLP.
    ModelFamily(
        "starcoder2",
        linears=lambda w: {
            **query_key_value(w),
            "o_proj": (w.q, w.hidden),
            "c_fc": (w.hidden, w.inner),
            "c_proj": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=(*QKV, "o_proj", "c_fc", "c_proj"),
        bias_switch="use_bias",
        tied=True,
        block=BlockLayout(
            gate_up=("mlp.c_fc",),
            down="mlp.c_proj",
            norm="layer",
            activation="gelu_pytorch_tanh",
            gated=False,
        ),
        plain_logits=True,
    ),
    # Phi (one norm in front of attention and MLP, no gate) and Phi 3 (fused products).
    ModelFamily(
        "phi",
        linears=lambda w: {
            **query_key_value(w),
            "dense": (w.q, w.hidden),
            "fc1": (w.hidden, w.inner),
            "fc2": (w.inner, w.hidden),
        },
        norms=1,
        norm_bias=True,
        biased=(*QKV, "dense", "fc1", "fc2"),
        head_bias=True,
    ),
    ModelFamily(
        "phi3",
        linears=lambda w: {
            "qkv_proj": (w.hidden, w.q + 2 * w.kv),
            "o_proj": (w.q, w.hidden),
            "gate_up_proj": (w.hidden, 2 * w.inner),
            "down_proj": (w.inner, w.hidden),
        },
        recipe=PlainRecipe(fused=True),
        block=BlockLayout(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        plain_logits=True,
    ),
    # GPT-2 and GPT-NeoX: fused queries, keys and values, no gate in the MLP.
    ModelFamily(
        "gpt_neox",
        linears=lambda w: {
            "query_key_value": (w.hidden, 3 * w.hidden),
            "dense": (w.hidden, w.hidden),
            "dense_h_to_4h": (w.hidden, w.inner),
            "dense_4h_to_h": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        plain_logits=True,
    ),
    ModelFamily(
        "gpt2",
        linears=lambda w: {
            "c_attn": (w.hidden, 3 * w.hidden),
            "attn.c_proj": (w.hidden, w.hidden),
            "c_fc": (w.hidden, w.inner),
            "mlp.c_proj": (w.inner, w.hidden),
        },
        norm_bias=True,
        biased=("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
        positions=True,
        tied=True,
        plain_logits=True,
    ),
)


NESTED = "text_config"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Activations of the MLP that graft's own training steps support."""
ROTARY = ("default", "llama3", "linear", "yarn")
"""Kinds of rotary positions that depend only on the position."""
LIKE_LLAMA = ModelFamily("")
"""The shape assumed for a decoder of an unknown family."""


@cache
def all_families() -> Mapping[str, ModelFamily]:
    """By `model_type`."""
    return {family.name: family for family in FAMILIES}


def find_family(model_type: str | None) -> ModelFamily | None:
    return all_families().get(model_type or "")


def family_or_llama(model_type: str | None) -> ModelFamily:
    return find_family(model_type) or LIKE_LLAMA


def recipe_family(model_type: str) -> ModelFamily:
    """The family whose plain step is modeled; else Llama, as which its memory is estimated."""
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
    """Return the config's settings of rotary positions: one, or one for each type of attention."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [value for value in stated.values() if isinstance(value, Mapping)]
    whole = {"partial_rotary_factor": config.get("partial_rotary_factor") or 1.0}
    return [whole | dict(kind) for kind in kinds or [stated]]


def complete_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the decoder itself, with the family's defaults."""
    inner = dict(config.get(NESTED) or {})
    whole = {**config, **inner}
    whole.pop(NESTED, None)
    if "model_type" not in inner and NESTED in config:
        whole["model_type"] = f"{config.get('model_type', '')}_text"
    defaults = family_or_llama(whole.get("model_type")).defaults
    return {**defaults, **{key: value for key, value in whole.items() if value is not None}}


def count_stated(config: Mapping[str, Any], *, q: int, kv: int, head_dim: int) -> tuple[Linears, int, int]:
    """Return the linear layers of a block, its parameters, and those outside of blocks and embeddings: by the
    family, as Llama if that is unknown.
    """
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
