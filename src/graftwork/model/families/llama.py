"""Llama, and the families that have its blocks."""

from graftwork.model.families.family import ModelFamily, PlainRecipe

LLAMA = ModelFamily("llama", recipe=PlainRecipe(), card_step=True, cpu_step=True, plain_logits=True)

FAMILIES = (
    LLAMA,
    LLAMA._replace(name="mistral"),
    ModelFamily("ministral"),
    ModelFamily("mixtral"),
    ModelFamily("granite"),
    ModelFamily("smollm3", tied=True, plain_logits=True),
    ModelFamily("stablelm", norm_bias=True),
)
