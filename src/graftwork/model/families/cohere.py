"""Cohere: attention and MLP next to each other behind one norm of mean and variance, scaled logits."""

from graftwork.model.families.family import BlockLayout, ModelFamily

COHERE = BlockLayout(before_mlp="input_layernorm", norm="layer", parallel=True, interleaved=True)

FAMILIES = (
    ModelFamily("cohere", norms=1, tied=True, block=COHERE),
    ModelFamily(
        "cohere2",
        norms=1,
        tied=True,
        block=COHERE,
        defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    ),
)
