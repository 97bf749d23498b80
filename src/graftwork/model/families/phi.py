"""Phi (one norm in front of attention and MLP, no gate) and Phi 3 (fused products)."""

from graftwork.model.families.family import (
    QKV,
    BlockLayout,
    Linears,
    ModelFamily,
    PlainRecipe,
    Widths,
    query_key_value,
)


def _phi(w: Widths) -> Linears:
    return {
        **query_key_value(w),
        "dense": (w.q, w.hidden),
        "fc1": (w.hidden, w.inner),
        "fc2": (w.inner, w.hidden),
    }


def _phi3(w: Widths) -> Linears:
    return {
        "qkv_proj": (w.hidden, w.q + 2 * w.kv),
        "o_proj": (w.q, w.hidden),
        "gate_up_proj": (w.hidden, 2 * w.inner),
        "down_proj": (w.inner, w.hidden),
    }


FAMILIES = (
    ModelFamily(
        "phi", linears=_phi, norms=1, norm_bias=True, biased=(*QKV, "dense", "fc1", "fc2"), head_bias=True
    ),
    ModelFamily(
        "phi3",
        linears=_phi3,
        recipe=PlainRecipe(fused=True),
        block=BlockLayout(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",)),
        plain_logits=True,
    ),
)
