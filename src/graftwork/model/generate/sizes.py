"""How large the tensors of a generator are. Pure, without torch.

In: rows, lengths of prompts and answers. Out: slots, columns, and which prompts are read in one pass. The
generator asks here before it allocates and the plan asks here before it runs, so that they agree.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graftwork.model.generate.memory import MOST_ROWS

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
