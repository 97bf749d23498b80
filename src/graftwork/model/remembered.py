"""What the layers of a decoder remember of a text while it is written, by the decoder's config. Pure.

In: a config with the names of today. Out: positions of each layer. Needs neither torch nor transformers; as
their cache decides it (`cache_utils.DynamicCache`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
EMPTY = ("moe", "mlp")
"""Layers without attention."""
USUAL_STATES = 16
"""Values of a state for each hidden one, where a config does not say (Mamba)."""


def remembered_positions(config: Mapping[str, Any], *, layers: int, position_values: int) -> tuple[int, ...]:
    """How many positions each layer remembers, 0 for all of them; empty if every layer remembers all.

    A state counts as the positions whose keys and values, `position_values` each, would take as much.
    """
    types = config.get("layer_types") or _types_of_windows(config, layers)
    sizes = {FULL: 0, SLIDING: config.get("sliding_window"), CHUNKED: config.get("attention_chunk_size")}
    found = []
    for kind in types:
        size = sizes.get(kind)
        if size is None:
            size = 1 if kind in EMPTY else math.ceil(_state_values(config) / position_values)
        found.append(size)
    return tuple(found) if any(found) else ()


def _types_of_windows(config: Mapping[str, Any], layers: int) -> Sequence[str]:
    """Windows in all layers, in all but every n-th one, or in those from a certain one on."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        kind = CHUNKED if config.get("attention_chunk_size") else FULL
        return [kind] * layers
    every = config.get("sliding_window_pattern") or layers + 1
    first = config.get("max_window_layers", 0) if "use_sliding_window" in config else 0
    return [SLIDING if at >= first and (at + 1) % every else FULL for at in range(layers)]


def _state_values(config: Mapping[str, Any]) -> int:
    """Of a layer with a state instead of keys and values, for one text."""
    products = (
        ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
        ("hidden_size", "conv_L_cache"),
    )
    for names in products:
        if all(config.get(name) for name in names):
            return math.prod(int(config[name]) for name in names)
    return int(config["hidden_size"]) * USUAL_STATES
