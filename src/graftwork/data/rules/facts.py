"""All that a rule may ask when the rows have been looked at.

In: the corpus as columns, what repeats what, which rows ask alike, the gathered notes. Out: the
same under names that rules use. The corpus, the repeats and the dealing are ports: whatever has
these members will do. Rows are fetched by place, a few at a time; nothing here holds them all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.data.redaction import redact_row
from graftwork.data.rules.gather import Tally
from graftwork.data.rules.note import Note, Sight
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import InputFile
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONFLICT, DUPLICATE, NEAR_DUPLICATE = 1, 2, 3
# The columns with the prints of the whole prompt and of the reply: equal where those are alike.
PROMPT_PRINT, REPLY_PRINT = "prompt", "reply"


class Unreadable(Protocol):
    """A row that could not be read."""

    @property
    def origin(self) -> Origin: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


class Corpus(Protocol):
    """The readable rows in the order of sight, as columns.

    Labels are numbers, -1 for none, and the names that they number; faults come with the hashes of
    their lines.
    """

    @property
    def rows(self) -> int: ...
    @property
    def inputs(self) -> tuple[InputFile, ...]: ...
    def column(self, name: str) -> "NDArray[Any]": ...
    def labels(self, name: str) -> "tuple[NDArray[np.int32], list[str]]": ...
    def notes(self) -> Iterator[tuple[int, Note]]: ...
    def faults(self) -> "Iterator[tuple[str, Unreadable]]": ...
    def rows_at(self, places: Sequence[int]) -> Iterator[tuple[int, Interaction]]: ...
    def origin(self, place: int) -> Origin: ...


class Repeats(Protocol):
    """For each row the place of the one that stays instead, or -1, and the step that says so, or 0."""

    @property
    def instead(self) -> "NDArray[np.int64]": ...
    @property
    def step(self) -> "NDArray[np.uint8]": ...


class Dealing(Protocol):
    """For each row its split, and the place of the founder of its group: rows of one group ask alike."""

    @property
    def split(self) -> "NDArray[np.uint8]": ...
    @property
    def group(self) -> "NDArray[np.int64]": ...


@dataclass(frozen=True)
class Facts:
    corpus: Corpus
    repeats: Repeats
    dealing: Dealing
    tally: Tally
    sight: Sight

    @property
    def settings(self) -> DataSettings:
        return self.sight.settings

    @cached_property
    def passed(self) -> "NDArray[np.bool_]":
        """The rows that the filter let through."""
        return self.corpus.column("passed").astype(bool)

    @cached_property
    def usable(self) -> "NDArray[np.bool_]":
        """The rows that passed and repeat or contradict no other that stays."""
        usable: NDArray[np.bool_] = self.passed & (self.repeats.step == 0)
        return usable

    def labels(self, name: str) -> "tuple[NDArray[np.int32], list[str]]":
        """A column of names; they are shown to people, so they too are redacted."""
        numbers, names = self.corpus.labels(name)
        return numbers, [redact(one).text for one in names]

    def prints(self, name: str) -> "NDArray[np.uint64]":
        """A column of prints; 0 where a row has none."""
        return self.corpus.column(name).astype("uint64", copy=False)

    def origins(self, places: Iterable[int]) -> tuple[Origin, ...]:
        return tuple(self.corpus.origin(int(place)) for place in places)

    def read(self, places: Iterable[int]) -> dict[int, Interaction]:
        """A few rows by their places, redacted whatever the settings say: what is read is shown."""
        wanted = sorted({int(place) for place in places})
        rows = self.corpus.rows_at(wanted)
        return {place: row if self.settings.redact else redact_row(row).row for place, row in rows}
