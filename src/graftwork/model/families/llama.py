"""Llama, and the families that have its blocks."""

from graftwork.model.families.family import BlockLayout, ModelFamily, PlainRecipe

LLAMA = ModelFamily("llama", recipe=PlainRecipe(), block=BlockLayout(), plain_logits=True)

FAMILIES = (
    LLAMA,
    LLAMA._replace(name="mistral"),
    ModelFamily("ministral"),
    ModelFamily("mixtral"),
    ModelFamily("stablelm", norm_bias=True),
)
