"""Qwen 2 (biases on queries, keys and values) and Qwen 3 (norms of each head), dense and with experts."""

from graftwork.model.families.family import QKV, BlockLayout, ModelFamily, PlainRecipe

WINDOWS = {"use_sliding_window": False, "max_window_layers": 28}
"""Configs name a window that is not used unless they say so."""
DENSE = ModelFamily(
    "",
    recipe=PlainRecipe(),
    block=BlockLayout(),
    plain_logits=True,
    defaults={"sliding_window": 4096, **WINDOWS},
)

FAMILIES = (
    DENSE._replace(name="qwen2", biased=QKV),
    ModelFamily("qwen2_moe", biased=QKV, defaults=WINDOWS),
    DENSE._replace(name="qwen3", head_norms="head"),
    ModelFamily("qwen3_moe", head_norms="head", defaults=WINDOWS),
)
