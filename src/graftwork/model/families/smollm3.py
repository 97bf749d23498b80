"""SmolLM 3: Llama's blocks, of which every fourth has no rotary positions."""

from graftwork.model.families.family import BlockLayout, ModelFamily

FAMILIES = (
    ModelFamily(
        "smollm3",
        tied=True,
        block=BlockLayout(),
        plain_logits=True,
        defaults={"use_sliding_window": False},
    ),
)
