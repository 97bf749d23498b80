"""Granite: Llama's blocks with multipliers on embeddings, scores, residuals and logits."""

from graftwork.model.families.family import BlockLayout, ModelFamily

FAMILIES = (
    ModelFamily("granite", block=BlockLayout(scaled_residual=True)),
    ModelFamily("granitemoe"),
)
