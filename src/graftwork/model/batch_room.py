"""How many rows a card can answer at once. Pure.

In: a decoder's configuration, the lengths of a row, the free bytes. Out: a number of rows, at least one.
Counted are the keys and values, twice (those of the prompts stand beside the recorded step's own place for a
moment), and what reading the prompts needs while it passes. Does not know what else uses the card.
"""

from typing import Any

MOST_ROWS = 256
"""More rows answer hardly more a second: by then the products keep the card busy."""
SHARE = 0.8
"""Of the free memory; the rest is for what the allocator cannot use in one piece."""


def rows_with_room(
    config: Any, *, prompt_tokens: int, new_tokens: int, free_bytes: int, bytes_each: int = 2
) -> int:
    heads: int = config.num_attention_heads
    width: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    groups: int = getattr(config, "num_key_value_heads", None) or heads
    keys = 2 * config.num_hidden_layers * groups * width * bytes_each
    # The states in and out of a layer, its gate, up and their product.
    passing = (4 * config.hidden_size + 3 * config.intermediate_size) * bytes_each
    a_row: int = 2 * keys * (prompt_tokens + new_tokens) + passing * prompt_tokens
    a_row += 4 * config.vocab_size * bytes_each
    return max(1, min(MOST_ROWS, int(SHARE * free_bytes) // a_row))
