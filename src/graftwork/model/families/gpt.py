"""GPT-2 and GPT-NeoX: fused queries, keys and values, no gate in the MLP."""

from graftwork.model.families.family import Linears, ModelFamily, Widths


def _gpt_neox(w: Widths) -> Linears:
    return {
        "query_key_value": (w.hidden, 3 * w.hidden),
        "dense": (w.hidden, w.hidden),
        "dense_h_to_4h": (w.hidden, w.inner),
        "dense_4h_to_h": (w.inner, w.hidden),
    }


def _gpt2(w: Widths) -> Linears:
    return {
        "c_attn": (w.hidden, 3 * w.hidden),
        "attn.c_proj": (w.hidden, w.hidden),
        "c_fc": (w.hidden, w.inner),
        "mlp.c_proj": (w.inner, w.hidden),
    }


FAMILIES = (
    ModelFamily(
        "gpt_neox",
        linears=_gpt_neox,
        norm_bias=True,
        biased=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        plain_logits=True,
    ),
    ModelFamily(
        "gpt2",
        linears=_gpt2,
        norm_bias=True,
        biased=("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
        positions=True,
        tied=True,
        plain_logits=True,
    ),
)
