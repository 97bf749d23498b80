"""The definition of a model family: layers, norms, biases, defaults, and the training steps written for it.

The defaults are Llama's. Knows no weights; needs no torch.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

Linears = dict[str, tuple[int, int]]
"""(inputs, outputs) of the linear layers of a block, by the end of their path."""

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
    """A block as graft's own training steps compute it (train/gpu, train/cpu): where its layers are, and what
    differs from Llama's. What configs choose (windows, caps, multipliers) is read from the model."""

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
    """Where the config does not name one."""
    gated: bool = True
    """The MLP multiplies its activation with a second product."""
    parallel: bool = False
    """Attention and MLP read the same normed input."""
    interleaved: bool = False
    """Rotary positions turn neighbouring values; otherwise those half a head apart."""
    scaled_residual: bool = False
    """What attention and MLP add is multiplied with a number first."""
    capped: bool = False
    """Scores of attention are capped, which fused attention cannot."""


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
    """Scores are capped, which fused attention cannot: transformers computes them step by step."""
    biased: tuple[str, ...] = ()
    """Linear layers with a bias."""
    bias_switch: str = ""
    """A key of the config that turns all biases off."""
    head_bias: bool = False
    positions: bool = False
    """Learned positions, a row each."""
    tied: bool = False
    """Whether the head is the embedding where the config does not say so."""
    defaults: Mapping[str, Any] = {}
    """What configs of the family leave out."""
    recipe: PlainRecipe | None = None
    """None: the memory of its plain step is traced, or estimated as a Llama's."""
    block: BlockLayout | None = None
    """graft's own training steps compute such blocks; None: it is trained on the plain path."""
    plain_logits: bool = False
    """Its logits are the output of its head, without a cap or a scale: nothing to try there."""
