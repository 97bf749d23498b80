"""StarCoder 2: layer norms and linear layers with biases, no gate in the MLP."""

from graftwork.model.families.family import QKV, BlockLayout, Linears, ModelFamily, Widths, query_key_value


def _linears(w: Widths) -> Linears:
    return {
        **query_key_value(w),
        "o_proj": (w.q, w.hidden),
        "c_fc": (w.hidden, w.inner),
        "c_proj": (w.inner, w.hidden),
    }


FAMILIES = (
    ModelFamily(
        "starcoder2",
        linears=_linears,
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
)
