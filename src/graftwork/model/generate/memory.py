"""How many rows fit into the free memory of a card."""

from typing import Any

from graftwork.model.shape import cached_numbers

MOST_ROWS = 256
"""More rows answer hardly more a second: by then the products keep the card busy."""
SHARE = 0.8
"""Of the free memory; the rest is for what the allocator cannot use in one piece."""
HALF = 2
"""Bytes of a number in 16 bits."""
UNKNOWN_SHAPE_ROWS = 32
"""For a decoder whose measures cannot be read; an out-of-memory error halves it."""


def rows_that_fit(config: Any, *, prompt_tokens: int, new_tokens: int, free_bytes: int) -> int:
    a_row = bytes_of_row(config, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    if a_row is None:
        return UNKNOWN_SHAPE_ROWS
    return max(1, min(MOST_ROWS, int(SHARE * free_bytes) // a_row))


def bytes_of_row(config: Any, *, prompt_tokens: int, new_tokens: int) -> int | None:
    """In 16 bits; None where the configuration names its measures in a way of its own."""
    heads = _number(config, "num_attention_heads")
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    if heads is None or hidden is None or layers is None:
        return None
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size") or 4 * hidden
    vocabulary = _number(config, "vocab_size") or 0
    keys = cached_numbers(layers, groups, width) * HALF
    # The states in and out of a layer, its gate, up and their product.
    passing = (4 * hidden + 3 * inner) * HALF
    # Growing copies the keys once.
    return 2 * keys * (prompt_tokens + new_tokens) + passing * prompt_tokens + 4 * vocabulary * HALF


def _number(config: Any, name: str) -> int | None:
    """A positive number, or the largest of one for each layer."""
    try:
        found = getattr(config, name, None)
    except Exception:  # some configurations refuse a name that differs from layer to layer
        return None
    if isinstance(found, list | tuple) and found and all(isinstance(number, int) for number in found):
        found = max(found)
    return found if isinstance(found, int) and found > 0 else None
