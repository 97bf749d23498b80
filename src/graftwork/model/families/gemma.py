"""Gemma, Gemma 2 and Gemma 3."""

from graftwork.model.families.family import BlockLayout, ModelFamily, PlainRecipe

FIRST = BlockLayout(norm="rms_plus_one", activation="gelu_pytorch_tanh")
LATER = FIRST._replace(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)

FAMILIES = (
    ModelFamily(
        "gemma",
        tied=True,
        defaults={"head_dim": 256},
        recipe=PlainRecipe(norm="gemma", scaled_embedding=True),
        block=FIRST,
    ),
    ModelFamily(
        "gemma2",
        norms=4,
        capped_attention=True,
        tied=True,
        defaults={"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
        block=LATER._replace(capped=True, capped_logits=True),
    ),
    ModelFamily(
        "gemma3_text",
        norms=4,
        head_norms="head",
        tied=True,
        block=LATER,
        defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            # That of all sizes but 1B, which states its own.
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
    ),
)
