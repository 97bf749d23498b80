"""How large the tensors of a generator are. Pure, without torch.

In: rows, lengths of prompts and answers. Out: slots, columns, and which prompts are read in one pass. The
generator asks here before it allocates and the plan asks here before it runs, so that they agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
PREFILL_TOKENS = 8192
"""Tokens of prompts that are read in one pass, padding included."""
RECORDED_PREFILLS = (32, 64, 128, 256, 512)
"""Lengths to which a single short prompt is padded on a card, so that reading it is one launch."""
FEWEST_COLUMNS = 128
COLUMNS = 64
"""The columns of a cache come in multiples of this."""


@dataclass(frozen=True)
class DecoderSizes:
    """`most` rows run at once. `padded` is for recorded passes, which come in few sizes."""

    most: int = MOST_ROWS
    padded: bool = False

    def rows(self, rows: int) -> int:
        """Rows of a token pass: a power of two where it is recorded."""
        return min(1 << max(rows - 1, 0).bit_length(), self.most) if self.padded else rows

    def columns(self, columns: int) -> int:
        """Columns that a pass reads, where it needs so many."""
        if not self.padded:
            return columns
        power = 1 << max(columns - 1, 0).bit_length()
        bucket = power * 3 // 4 if columns <= power * 3 // 4 else power
        return max(bucket, FEWEST_COLUMNS)

    def room(self, rows: int, columns: int) -> tuple[int, int]:
        """Slots and columns that are reserved for so many rows of this length."""
        return self.rows(min(rows, self.most)), self.columns(columns)

    def token_columns(self, now: int, final: int) -> int:
        """Columns of the next token passes, where `now` are needed and `final` will be."""
        return self.columns(min(final, 2 * now))

    def token_runs(self, prompt: int, answer: int) -> Iterator[tuple[int, int]]:
        """The token passes of rows with this prompt: how many in a row read how many columns. The first token
        comes from reading the prompt."""
        now, last, final = prompt + 1, prompt + answer - 1, prompt + answer
        while now <= last:
            columns = self.token_columns(now, final) if self.padded else now
            end = min(columns, last)
            yield columns, end - now + 1
            now = end + 1

    def recorded_width(self, rows: int, width: int) -> int | None:
        """The width of a recorded pass over prompts; None for a pass that is not recorded."""
        if not self.padded or rows != 1 or width > RECORDED_PREFILLS[-1]:
            return None
        return next(length for length in RECORDED_PREFILLS if length >= width)


def allocated_columns(columns: int) -> int:
    """Columns that a cache has for so many, with the one for padding."""
    return -(-(columns + 1) // COLUMNS) * COLUMNS


def cut_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """The places of prompts that are read in one pass: of like length together, the longest first.

    A prompt that is longer than a pass is alone, and is read in pieces.
    """
    parts: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(place)
    return parts


def rows_that_fit(config: Any, *, prompt_tokens: int, new_tokens: int, free_bytes: int) -> int:
    """In 16 bits; a usual number where the configuration names its measures in a way of its own."""
    heads = _number(config, "num_attention_heads")
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    if heads is None or hidden is None or layers is None:
        return UNKNOWN_SHAPE_ROWS
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size") or 4 * hidden
    vocabulary = _number(config, "vocab_size") or 0
    keys = cached_numbers(layers, groups, width) * HALF
    # The states in and out of a layer, its gate, up and their product.
    passing = (4 * hidden + 3 * inner) * HALF
    # Growing copies the keys once.
    a_row = 2 * keys * (prompt_tokens + new_tokens) + passing * prompt_tokens + 4 * vocabulary * HALF
    return max(1, min(MOST_ROWS, int(SHARE * free_bytes) // a_row))


def _number(config: Any, name: str) -> int | None:
    """A positive number, or the largest of one for each layer."""
    try:
        found = getattr(config, name, None)
    except Exception:  # some configurations refuse a name that differs from layer to layer
        return None
    if isinstance(found, list | tuple) and found and all(isinstance(number, int) for number in found):
        found = max(found)
    return found if isinstance(found, int) and found > 0 else None
