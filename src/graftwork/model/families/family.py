"""The definition of a model family: layers, norms, biases, defaults, and the training steps written for it.

A family is one `ModelFamily` in a module of this package, listed in its `FAMILIES`. The defaults are Llama's.
Knows no weights; needs no torch.
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
    card_step: bool = False
    """graft's own training step on a card is written for its blocks (train/gpu)."""
    cpu_step: bool = False
    """graft's own training step on a processor is written for its blocks (train/cpu)."""
    plain_logits: bool = False
    """Its logits are the output of its head, without a cap or a scale: nothing to try there."""
