"""Qwen 2 (biases on queries, keys and values) and Qwen 3 (norms of each head), dense and with experts."""

from graftwork.model.families.family import QKV, BlockLayout, ModelFamily, PlainRecipe

FAMILIES = (
    ModelFamily("qwen2", biased=QKV, recipe=PlainRecipe(), block=BlockLayout(), plain_logits=True),
    ModelFamily("qwen2_moe", biased=QKV),
    ModelFamily("qwen3", head_norms="head", recipe=PlainRecipe(), block=BlockLayout(), plain_logits=True),
    ModelFamily("qwen3_moe", head_norms="head"),
)
