"""OLMo and OLMoE: without weights in its norms; from OLMo 2 on with norms after attention and MLP."""

from graftwork.model.families.family import BlockLayout, ModelFamily, PlainRecipe

AFTER = BlockLayout(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)

FAMILIES = (
    ModelFamily("olmo", norms=0, final_norm=False, plain_logits=True),
    ModelFamily(
        "olmo2",
        head_norms="width",
        recipe=PlainRecipe(norm="olmo2", norm_after=True),
        block=AFTER,
        plain_logits=True,
    ),
    ModelFamily("olmoe", head_norms="width"),
    ModelFamily(
        "olmo3",
        head_norms="width",
        block=AFTER,
        plain_logits=True,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
)
