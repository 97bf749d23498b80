"""OLMo: without weights in its norms; from OLMo 2 on with norms after attention and MLP."""

from graftwork.model.families.family import ModelFamily, PlainRecipe

FAMILIES = (
    ModelFamily("olmo", norms=0, final_norm=False, plain_logits=True),
    ModelFamily(
        "olmo2",
        head_norms="width",
        recipe=PlainRecipe(norm="olmo2", norm_after=True),
        card_step=True,
        plain_logits=True,
    ),
    ModelFamily("olmo3", head_norms="width"),
)
