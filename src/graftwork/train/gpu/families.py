"""Which models and settings the written-out step knows. Reads numbers only: no torch, no weights.

In: a base's config.json as a mapping, the training settings, what the card can. Out: why the plain
step must do instead, or None.
"""

from collections.abc import Mapping
from typing import Any

from graftwork.model.families.registry import family_or_llama
from graftwork.train.settings import TrainSettings

FIRST_CARD = 8.0
"""Ampere: bfloat16, and attention over rows of different lengths."""


def why_plain(settings: TrainSettings, config: Mapping[str, Any], *, capability: float | None) -> str | None:
    """Why a run does not take the written-out step; None if it does."""
    if capability is None or capability < FIRST_CARD:
        return "the card is older than Ampere"
    if settings.method not in ("lora", "qlora"):
        return f"method {settings.method} is trained on the plain path"
    if settings.strategy != "single":
        return "several devices share the run"
    if settings.precision not in ("auto", "bfloat16"):
        return f"it works in bfloat16, not in {settings.precision}"
    if settings.packing == "off":
        return "packing is off"
    return why_not(config)


def why_not(config: Mapping[str, Any]) -> str | None:
    """Why this model's blocks are not those that are written out; None if they are."""
    family = config.get("model_type")
    if not family_or_llama(family).card_step:
        return f"its blocks are of the family {family}, which are not written out"
    if config.get("hidden_act", "silu") != "silu":
        return f"its gate is {config['hidden_act']}, not silu"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return "some of its blocks attend through a sliding window"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return "it attends through a sliding window"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) in ("dynamic", "longrope"):
        return "its rotary positions depend on the length of a batch"
    widths = (config["hidden_size"], config["intermediate_size"])
    return None if all(width % 64 == 0 for width in widths) else "its widths are no multiples of 64"
