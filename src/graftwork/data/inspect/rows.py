"""Shows rows as text, with the trained part marked.

In: rows of a dataset and a token decoder. Out: pieces of text, each with the flags `trained` and `control`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns
from graftwork.files.disk import explain_os_error
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Row, Split
from graftwork.records.errors import UserMistake, needs_extra
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONGEST_CHARACTER = 4
"""A UTF-8 character has at most four bytes, so at most four tokens."""


class TokenDecoder(Protocol):
    """Turns tokens back into text."""

    @property
    def control_tokens(self) -> frozenset[int]:
        """The tokens that only the template may write."""
        ...

    def decode_pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return a text for each token; of tokens that share a character, the last one has it."""
        ...


class TextPiece(Record):
    """Consecutive tokens and their text."""

    text: str
    tokens: tuple[int, ...]
    trained: bool
    control: bool


class ShownRow(Record):
    """A row with its text; `number` is its position in the split, counted from 0."""

    split: Split
    number: int
    id: str
    origin: Origin
    group: str | None
    tokens: int
    trained_tokens: int
    pieces: tuple[TextPiece, ...]


def show_rows(
    folder: Path,
    *,
    decoder: TokenDecoder,
    split: Split = "train",
    rows: int = 3,
    row_id: str | None = None,
    by_token: bool = False,
) -> tuple[ShownRow, ...]:
    """Return the first rows of a split, or all rows with one id."""
    dataset = read_manifest(folder)
    if row_id is None:
        size = dataset.splits[split].rows if split in dataset.splits else 0
        places: dict[Split, list[int]] = {split: list(range(min(rows, size)))}
    else:
        places = find_row_id(folder, dataset, row_id)
    found = fetch_rows(folder, dataset, places=places)
    if not found:
        sizes = ", ".join(f"{name} {summary.rows}" for name, summary in dataset.splits.items())
        if row_id is None:
            raise UserMistake(
                f"the split {split} has no rows",
                why=f"the dataset holds {sizes} rows",
                fix="name another split",
            )
        raise UserMistake(
            f"no row has the id {row_id!r}",
            why=f"the dataset {dataset.content_hash[:12]} holds {sizes} rows and none begins so",
            fix="`graft data trace FILE:LINE` says what became of a line of the log",
        )
    return tuple(
        show_row(row, split=at, number=number, decoder=decoder, by_token=by_token)
        for (at, number), row in found.items()
    )


def show_row(
    row: Row, *, split: Split, number: int, decoder: TokenDecoder, by_token: bool = False
) -> ShownRow:
    pieces = cut_pieces(row.tokens, trained_from=row.trained_from, decoder=decoder)
    return ShownRow(
        split=split,
        number=number,
        id=row.id,
        origin=row.origin,
        group=row.group,
        tokens=len(row.tokens),
        trained_tokens=len(row.tokens) - row.trained_from,
        pieces=pieces if by_token else join_pieces(pieces),
    )


def cut_pieces(tokens: Sequence[int], *, trained_from: int, decoder: TokenDecoder) -> tuple[TextPiece, ...]:
    """Return one piece per token; tokens that share a character share a piece."""
    control = decoder.control_tokens
    pieces: list[TextPiece] = []
    waiting: list[int] = []
    for place, (token, text) in enumerate(zip(tokens, decoder.decode_pieces(tokens), strict=True)):
        waiting.append(token)
        if text or place in (trained_from - 1, len(tokens) - 1):
            trained = place >= trained_from
            pieces.append(
                TextPiece(text=text, tokens=tuple(waiting), trained=trained, control=token in control)
            )
            waiting = []
    return tuple(pieces)


def join_pieces(pieces: Sequence[TextPiece]) -> tuple[TextPiece, ...]:
    """Join neighbouring pieces with the same flags."""
    joined = []
    for (trained, control), members in groupby(pieces, key=lambda piece: (piece.trained, piece.control)):
        run = list(members)
        joined.append(
            TextPiece(
                text="".join(piece.text for piece in run),
                tokens=tuple(token for piece in run for token in piece.tokens),
                trained=trained,
                control=control,
            )
        )
    return tuple(joined)


def find_row_id(folder: Path, dataset: Dataset, row_id: str) -> dict[Split, list[int]]:
    """Return the positions of the rows with this id, or with the one id that begins with it."""
    exact: dict[Split, list[int]] = {}
    begun: dict[str, dict[Split, list[int]]] = {}
    for split, number, found in iterate_ids(folder, dataset, lambda item: item.startswith(row_id)):
        if found == row_id:
            exact.setdefault(split, []).append(number)
        elif len(begun) < 3:
            begun.setdefault(found, {}).setdefault(split, []).append(number)
    if exact:
        return exact
    if len(begun) > 1:
        raise UserMistake(
            f"several rows begin with {row_id!r}",
            why=f"among them {', '.join(list(begun)[:3])}",
            fix="give more of the id",
        )
    return next(iter(begun.values()), {})


def iterate_ids(
    folder: Path, dataset: Dataset, accept: Callable[[str], bool]
) -> Iterator[tuple[Split, int, str]]:
    for split, first, batch in scan_columns(folder, dataset, columns=("id",)):
        for offset, one in enumerate(batch.column(0).to_pylist()):
            if accept(one):
                yield split, first + offset, one


class TokenizerDecoder:
    """Decodes with the tokenizer.json of a base model."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> None:
        """Load the tokenizer now, so that errors come before any output."""
        _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> "Tokenizer":
        with needs_extra("train", why="tokens cannot be turned back into text without it"):
            from tokenizers import Tokenizer
        try:
            text = self._file.read_text(encoding="utf-8")
        except OSError as error:
            raise explain_os_error(error, self._file) from error
        tokenizer: Tokenizer = Tokenizer.from_str(text)
        return tokenizer

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(place for place, token in added.items() if token.special)

    def decode_pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return what each token adds to the text before it: some tokenizers drop a leading space at the
        beginning only.
        """
        pieces: list[str] = []
        before, begun = 0, 0
        for place in range(len(tokens)):
            known = self._decode(tokens[before:begun])
            text = self._decode(tokens[before : place + 1])[len(known) :]
            is_cut = text.endswith("\ufffd") and place + 1 - begun < LONGEST_CHARACTER
            if is_cut and place + 1 < len(tokens):
                pieces.append("")
                continue
            pieces.append(text)
            before, begun = begun, place + 1
        return pieces

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text
