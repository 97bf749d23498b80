"""How many tokens rows have: counted where the base's tokenizer is at hand, else estimated from characters.

In: the columns of the corpus and a function that counts. Out: a length per row. Time is bounded: of a large
log only the rows next to the limit are counted, and those that would be used before the others.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

CountTokens: TypeAlias = Callable[[Sequence[Interaction]], Sequence[int]]
"""The tokens of each row in the form in which it is trained on: prompt, reply and control tokens."""

MOST_COUNTED = 8_000_000
"""Characters of the rows that are counted: some seconds at most."""
_MOST_TOKENS_PER_CHARACTER, _MOST_CONTROL_TOKENS = 4, 128
_MOST_CHARACTERS_PER_TOKEN = 100
_ROWS_AT_ONCE = 2000


class LengthColumns(Protocol):
    def column(self, name: str) -> "NDArray[Any]": ...
    def rows_at(self, places: Sequence[int]) -> "Iterator[tuple[int, Interaction]]": ...


class RowLengths(NamedTuple):
    """Tokens of whole rows and of their prompts."""

    whole: "NDArray[Any]"
    prompt: "NDArray[Any]"
    is_counted: bool
    """Whether every row that may be longer than the limit was counted."""


def measure_lengths(
    corpus: LengthColumns, *, settings: DataSettings, wanted: "NDArray[Any]", count: CountTokens | None
) -> RowLengths:
    """Measure the rows, exactly where that decides whether they have more than `max_tokens`.

    The `wanted` ones come first.
    """
    import numpy as np

    most = settings.max_tokens
    prompts = corpus.column("prompt_chars").astype(np.float64)
    sizes = prompts + corpus.column("reply_chars")
    shares = np.divide(prompts, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    whole = np.rint(sizes / CHARACTERS_PER_TOKEN)
    if count is None:
        return RowLengths(whole, whole * shares, is_counted=False)
    # The system prompts of the settings are not in the columns.
    added = max(map(len, (settings.system_prompt or "", *settings.system_prompts.values())))
    may_be_long = (sizes + added) * _MOST_TOKENS_PER_CHARACTER + _MOST_CONTROL_TOKENS > most
    doubtful = np.flatnonzero(may_be_long & (sizes <= most * _MOST_CHARACTERS_PER_TOKEN))
    distance = np.abs(np.log(np.maximum(whole[doubtful], 1) / most))
    order = doubtful[np.lexsort((distance, ~wanted[doubtful]))]
    chosen = np.sort(order[np.cumsum(sizes[order]) <= MOST_COUNTED])
    tokens = np.zeros(len(chosen))
    for start in range(0, len(chosen), _ROWS_AT_ONCE):
        rows = [row for _, row in corpus.rows_at(chosen[start : start + _ROWS_AT_ONCE].tolist())]
        tokens[start : start + len(rows)] = count(rows)
    if tokens.any():
        # What was not counted is estimated by what was.
        whole = np.rint(sizes * (tokens.sum() / max(sizes[chosen].sum(), 1)))
    whole[chosen] = tokens
    return RowLengths(whole, whole * shares, is_counted=len(chosen) == len(doubtful))
