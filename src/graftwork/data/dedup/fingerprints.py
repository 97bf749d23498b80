"""Fingerprints of rows, and the pairs of rows that share one.

Input: rows. Output: columns of numbers for the row, its turns and its lines (keys, MinHash bands, runs of
words, 13-grams), the same in every process: which line is the question, and what a word weighs, is decided
later. Rows that share a value are found by sorting one column at a time, without the text. Each pair is
packed into 64 bits with the later row in the upper half. A row is paired only with a few rows before it, so
its pairs do not change when rows are appended.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from graftwork.data.audit.row_checks import find_unconfirmed
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.similarity import (
    Array,
    Ragged,
    RunWeights,
    as_sets,
    distinct,
    measure_pairs,
    number_text,
    number_words,
    run_words,
    spread,
)
from graftwork.text.words import fold, words

PERMUTATIONS = 128
MINHASH_SEED = 42
# Bands x rows per band: 16 x 8 proposes pairs from about 0.71 Jaccard similarity, 16 x 5 from 0.57.
NEAR_BANDS, NEAR_ROWS = 16, 8
TURN_BANDS, TURN_ROWS = 16, 5
NEAR = tuple(f"near_{band:02}" for band in range(NEAR_BANDS))
TURN = tuple(f"turn_{band:02}" for band in range(TURN_BANDS))
# The question is one of the last lines; instructions may follow it.
LINES = 6
LINE_WORDS = 48
QUESTION_WORDS = 4
# A turn with more runs than this is represented by a sample of them.
TURN_RUNS = 128
GRAM_WORDS = 13
# One of this many consecutive 13-grams is kept: two turns that share 20 consecutive words share a kept one.
GRAM_WINDOW = 8
# A shorter reply is an answer that different questions may have.
LONG_REPLY_WORDS = 20

SPLIT_FIELDS = {"session": "session", "role": "group", "domain": "domain", "model": "model", "id": "id"}
"""What `data.split_by` may name besides the keys of the log itself."""

KEYS = ("prompt", "reply", "turn", "opening", "together", "later", "capture", "unconfirmed", "replaces")
"""`turn` is the key of all turns of the user, `later` of those after the first (0 if there are none).

`capture` identifies the captured exchange; `unconfirmed` is not 0 if only a model vouches for the reply:
SERVED or TAUGHT. `replaces` is the key of the log line whose row this one replaces.
"""


def compute_fingerprints(
    rows: Sequence[Interaction | None], *, settings: DataSettings
) -> tuple[dict[str, Array], dict[str, tuple[Array, Array]]]:
    """Compute the fingerprints of each row; None is a row to skip.

    Returns columns with one value per row, and columns with any number of values per row (values, offsets).
    0 means none: no session, no words, or a row that was skipped.
    """
    read = [None if row is None else _split_words(row, settings=settings) for row in rows]
    fixed: dict[str, Array] = {
        name: np.array([0 if row is None else row.keys[index] for row in read], dtype=np.uint64)
        for index, name in enumerate(KEYS)
    }
    fixed["length"] = np.array([0 if row is None else row.length for row in read], dtype=np.uint64)
    whole = _number_texts([[] if row is None else row.words for row in read])
    turns = _take_spans(whole, [(0, 0) if row is None else row.turn for row in read])
    exchanges = whole
    if any(row is not None and row.end < len(row.words) for row in read):
        exchanges = _take_spans(whole, [(0, 0) if row is None else (0, row.end) for row in read])
    fixed |= _minhash_bands(run_words(exchanges, size=3), NEAR, size=NEAR_ROWS)
    # A turn of one short line is its own question: comparing it again would only be coarser.
    long = np.array([row is not None and not row.is_one_line for row in read], dtype=bool)
    turn_runs = run_words(_only(turns, long), size=3)
    fixed |= _minhash_bands(turn_runs, TURN, size=TURN_ROWS)
    replies = _take_spans(whole, [(0, 0) if row is None else row.long_reply for row in read])
    ragged = _fingerprint_lines([() if row is None else row.lines for row in read])
    for name, items in (
        ("turn_runs", as_sets(turn_runs, lowest=TURN_RUNS)),
        ("grams", _choose_grams(turns)),
        ("reply_grams", _choose_grams(replies)),
    ):
        ragged[name] = items.values, items.offsets
    return fixed, ragged


_Line = tuple[list[str], bool, list[str]]
"""A line of a user turn: its words, whether it asks, and the context that this depends on in a longer
conversation."""


class _RowWords(NamedTuple):
    """A row as words without the system prompt, up to `end`, and the span of the user's turns.

    The turns of a longer conversation are not adjacent: they are repeated after `end`.
    """

    keys: tuple[int, int, int, int, int, int, int, int, int]
    length: int
    words: list[str]
    end: int
    turn: tuple[int, int]
    long_reply: tuple[int, int]
    lines: tuple[_Line, ...]
    is_one_line: bool


def _split_words(row: Interaction, *, settings: DataSettings) -> _RowWords:
    prompt: list[str] = []
    whole: list[str] = []
    user_turns: list[list[tuple[list[str], str]]] = []
    """For each turn of the user, its lines as words and as text."""
    begins = 0
    for message in row.messages:
        if message.role == "user":
            lines = [(words(line), line) for line in message.content.splitlines()]
            tokens = [word for line, _ in lines for word in line]
            begins = begins if user_turns else len(whole)
            user_turns.append(lines)
        else:
            tokens = words(message.content)
        prompt += [message.role, fold(message.content)]
        if message.role != "system":
            whole += tokens
    reply = words(row.reply)
    opening = [word for line, _ in user_turns[0] for word in line] if user_turns else []
    later = [word for turn in user_turns[1:] for line, _ in turn for word in line]
    end = len(whole) + len(reply)
    if len(user_turns) > 1:
        span, repeated = (end, end + len(opening) + len(later)), opening + later
    else:
        span, repeated = (begins, begins + len(opening)), []
    spoken = _list_lines(user_turns, later)
    return _RowWords(
        keys=(
            # Exact except for case and spacing: rows are dropped by these two keys.
            number_text("\x1f".join(prompt)),
            number_text(fold(row.reply)),
            number_text(" ".join(opening + later)),
            number_text("\x1f".join((row.session, *opening))) if row.session is not None else 0,
            _find_together(row, settings.split_by),
            number_text(" ".join(later)) if later else 0,
            number_text(row.capture.id) if row.capture is not None else 0,
            find_unconfirmed(row, settings),
            0 if row.answered is None else int(row.answered.replaces[:16] or "0", 16),
        ),
        length=sum(len(message.content) for message in row.messages) + len(row.reply),
        words=whole + reply + repeated,
        end=end,
        turn=span,
        long_reply=(end - len(reply), end) if len(reply) >= LONG_REPLY_WORDS else (0, 0),
        lines=spoken,
        is_one_line=not later and len(spoken) < 2 and span[1] - span[0] <= LINE_WORDS,
    )


def _list_lines(user_turns: Sequence[list[tuple[list[str], str]]], later: list[str]) -> tuple[_Line, ...]:
    """List the lines of which one is the question, in the order in which they are considered: the last of a
    turn first.

    A conversation asks what its first turn asks, given what the user says later. Later turns are considered
    only where the first is boilerplate: many chats open with "Hi".
    """
    lines: list[_Line] = []
    for number, turn in enumerate((*user_turns[:1], *reversed(user_turns[1:]))):
        room = LINES if number == 0 else 2 * LINES - len(lines)
        spoken = [line for line in turn if line[0]]
        for line, text in reversed(spoken[-room:] if room else []):
            asks = text.rstrip().endswith(("?", "？"))
            if number == 0:
                lines.append((line, asks, later))
            else:
                # A short question ("And the region?") occurs in many conversations and pairs none.
                lines.append((line, asks and len(line) >= QUESTION_WORDS, later))
    return tuple(lines)


def _find_together(row: Interaction, split_by: str) -> int:
    """Return the key of the value that `data.split_by` keeps together; 0 if the row has none."""
    if split_by == "question":
        return 0
    value: Any = row
    if split_by in SPLIT_FIELDS:
        value = getattr(row, SPLIT_FIELDS[split_by])
    elif split_by in row.extra:
        # Nested values of the log are stored under their dotted name.
        value = row.extra[split_by]
    else:
        value = row.extra
        for part in split_by.split("."):
            if isinstance(value, Mapping):
                value = value.get(part)
            elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = None
    return 0 if value is None else number_text(f"{split_by}\x1f{value}")


def _number_texts(texts: Sequence[Sequence[str]]) -> Ragged:
    values = number_words([word for text in texts for word in text])
    return Ragged(values, _offsets(len(text) for text in texts))


def _take_spans(texts: Ragged, spans: Sequence[tuple[int, int]]) -> Ragged:
    """Return a span of words of each text."""
    starts = np.array([start for start, _ in spans], dtype=np.int64) + texts.offsets[:-1]
    lengths = np.array([stop - start for start, stop in spans], dtype=np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    indices = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    return Ragged(texts.values[indices], offsets)


def _only(items: Ragged, which: Array) -> Ragged:
    """Return the same items; items that are not marked become empty."""
    lengths = np.where(which, np.diff(items.offsets), 0)
    return Ragged(items.values[np.repeat(which, np.diff(items.offsets))], _offsets(lengths))


def _offsets(lengths: Iterable[int]) -> Array:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(np.fromiter(lengths, dtype=np.int64))))


def _minhash_bands(runs: Ragged, names: Sequence[str], *, size: int) -> dict[str, Array]:
    """Compute MinHash bands: one number per `size` hashes, 0 for an item without runs."""
    if not len(runs.values):
        return {name: np.zeros(len(runs.offsets) - 1, dtype=np.uint64) for name in names}
    import rensa

    matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
        runs.values, runs.offsets.astype(np.uint64), PERMUTATIONS, MINHASH_SEED
    )
    digests = np.array(matrix.to_rows(), dtype=np.uint64)
    full = np.diff(runs.offsets) > 0
    bands = {}
    for number, name in enumerate(names):
        band = np.zeros(len(digests), dtype=np.uint64)
        for column in digests[:, number * size : (number + 1) * size].T:
            band = spread(band + column + np.uint64(0x9E3779B97F4A7C15))
        bands[name] = np.where(full, np.maximum(band, np.uint64(1)), np.uint64(0))
    return bands


def _fingerprint_lines(lines: Sequence[tuple[_Line, ...]]) -> dict[str, tuple[Array, Array]]:
    """Return each line's key (its lowest bit: ends as a question) and its runs of one and two words.

    The key covers the line alone, so that boilerplate is recognized; the runs include the context of a
    longer conversation. Runs of one word are even numbers, runs of two words odd ones. `line_sizes` is the
    number of runs per line.
    """
    flat = [line for row in lines for line in row]
    keys = [number_text(" ".join(words)) & ~1 | asks for words, asks, _ in flat]
    numbered = _number_texts([words[-LINE_WORDS:] + context[-LINE_WORDS:] for words, _, context in flat])
    singles, doubles = run_words(numbered, size=1), run_words(numbered, size=2)
    owners = np.concatenate((singles.owners(), doubles.owners()))
    values = np.concatenate(
        (singles.values & np.uint64(0xFFFFFFFE), doubles.values & np.uint64(0xFFFFFFFE) | np.uint64(1))
    )
    order = np.argsort(owners, kind="stable")
    runs = as_sets(Ragged(values[order], singles.offsets + doubles.offsets))
    of_rows = _offsets(len(row) for row in lines)
    return {
        "lines": (np.array(keys, dtype=np.uint64), of_rows),
        "line_sizes": (np.diff(runs.offsets).astype(np.uint32), of_rows),
        "line_runs": (runs.values, runs.offsets[of_rows]),
    }


def _choose_grams(turns: Ragged) -> Ragged:
    """Keep the 13-grams of each turn that are the smallest of GRAM_WINDOW consecutive ones (winnowing)."""
    long = np.diff(turns.offsets) >= GRAM_WORDS
    grams = run_words(_only(turns, long), size=GRAM_WORDS)
    lengths = np.diff(grams.offsets)
    ends = np.repeat(grams.offsets[1:], lengths)
    positions = np.arange(len(grams.values))
    none = np.uint64(2**64 - 1)
    padded = np.concatenate((grams.values, np.full(GRAM_WINDOW, none)))
    smallest = grams.values.copy()
    for step in range(1, GRAM_WINDOW):
        ahead = np.where(positions + step < ends, padded[step : step + len(positions)], none)
        smallest = np.minimum(smallest, ahead)
    is_smallest = np.zeros(len(positions), dtype=bool)
    starts = np.repeat(grams.offsets[:-1], lengths)
    # Windows that reach beyond the end of a turn count only where the turn has no full one.
    begins = positions <= np.maximum(starts, ends - GRAM_WINDOW)
    for step in range(GRAM_WINDOW):
        earlier = positions - step
        inside = earlier >= starts
        window = np.where(inside, earlier, 0)
        is_smallest |= inside & begins[window] & (smallest[window] == grams.values)
    counts = np.bincount(grams.owners()[is_smallest], minlength=len(lengths))
    return Ragged(grams.values[is_smallest], _offsets(counts))


CANDIDATES_PER_ROW = 4
"""Each row is paired with at most this many earlier rows that have the same value."""

MOST_LOOKED_UP = 25_000
"""Values of at most this many new rows are looked up; with more new rows, all values are sorted."""

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
# Entries that are sorted at once, and bytes of a partition that stay in memory before it becomes a file.
_PARTITION_ENTRIES = 500_000
_PARTITION_BYTES = 1 << 20


Arrays = tuple[Array, ...]


class CorpusColumns(Protocol):
    """All rows in row order, as columns and by their position."""

    @property
    def rows(self) -> int: ...

    @property
    def pairs(self) -> Mapping[int, int]:
        """By the row with the better reply to a prompt: the one with the worse, by their scores."""
        ...

    def column(self, name: str) -> Array: ...

    def ragged(self, name: str) -> Iterator[tuple[int, Array, Array]]: ...

    def labels(self, name: str) -> tuple[Array, list[str]]:
        """A column of names as numbers, -1 for none, and the names."""
        ...

    def rows_at(self, positions: Sequence[int]) -> Iterator[tuple[int, Interaction]]: ...

    def origin(self, position: int) -> Origin: ...

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays: ...

    def grow(self, name: str, make: Callable[[int, Arrays | None], Arrays]) -> Arrays: ...


NO_PAIRS: Array = np.zeros(0, dtype=np.uint64)


def pack(later: Array, earlier: Array) -> Array:
    packed: Array = later.astype(np.uint64) << _HALF | earlier.astype(np.uint64)
    return packed


def unpack(pairs: Array) -> tuple[Array, Array]:
    """Return the later and the earlier rows."""
    return (pairs >> _HALF).astype(np.int64), (pairs & _LOW).astype(np.int64)


def rows_of(pairs: Array) -> Array:
    """Return the rows that occur in the pairs, each once, in order."""
    return distinct(np.concatenate(unpack(pairs)))


def measure_rows(
    pairs: Array, rows: Array, sets: Ragged, weights: RunWeights, *, sampled: int | None = None
) -> tuple[Array, Array]:
    """Return the likeness and the containment of pairs of rows; `sets` are those of these ascending rows."""
    later, earlier = (np.searchsorted(rows, side) for side in unpack(pairs))
    return measure_pairs(sets, later, earlier, weighed=weights.of(sets.values), sampled=sampled)


def merge_pairs(parts: Sequence[Array]) -> Array:
    """Return all pairs, sorted, without duplicates."""
    return distinct(np.concatenate(parts)) if parts else NO_PAIRS


def find_first(keys: Array, *, among: Array) -> Array:
    """Return, for each row, the first row with the same key. Rows not in `among`, or with key 0, map to
    themselves.
    """
    first = np.arange(len(keys), dtype=np.int64)
    positions = np.flatnonzero(among & (keys != 0))
    order = positions[np.argsort(keys[positions], kind="stable")]
    starts = _run_starts(keys[order])
    first[order] = order[starts]
    return first


class ValueLookup:
    """A few sorted, distinct numbers that are looked up among many others."""

    _SLOTS = 1 << 20

    def __init__(self, numbers: Array) -> None:
        self._numbers = numbers
        self._slot = numbers.dtype.type(self._SLOTS - 1)
        self._taken = np.zeros(self._SLOTS, dtype=bool)
        self._taken[numbers & self._slot] = True

    def find(self, values: Array) -> tuple[Array, Array]:
        """Return which of the values are among the numbers, and which number each of them is."""
        # Most values are none of the numbers: a table of their lowest bits rules them out quickly.
        maybe = np.flatnonzero(self._taken[values & self._slot])
        if not len(maybe):
            return maybe, maybe
        which = np.minimum(np.searchsorted(self._numbers, values[maybe]), len(self._numbers) - 1)
        same = self._numbers[which] == values[maybe]
        return maybe[same], which[same]


def pair_neighbors(values: Array, positions: Array, *, fresh: Array | None = None) -> Array:
    """Pair each row with the few rows before it that have the same value. Positions ascend; 0 means no value.

    With `fresh`, return only pairs that contain a row marked there.
    """
    indices = np.flatnonzero(values)
    if fresh is not None:
        indices = indices[
            ValueLookup(distinct(values[indices][fresh[positions[indices]]])).find(values[indices])[0]
        ]
    values, positions = values[indices], positions[indices]
    order = np.argsort(values, kind="stable")
    values, positions = values[order], positions[order]
    pairs = []
    for step in range(1, CANDIDATES_PER_ROW + 1):
        same = values[step:] == values[:-step]
        pairs.append(pack(positions[step:][same], positions[:-step][same]))
    return only_fresh(merge_pairs(pairs), fresh)


def is_worth_looking_up(fresh: Array | None) -> bool:
    """Whether there are so few fresh rows that looking up their values is faster than sorting all."""
    return fresh is not None and int(np.count_nonzero(fresh)) <= MOST_LOOKED_UP


def only_fresh(pairs: Array, fresh: Array | None) -> Array:
    """Keep the pairs that contain a fresh row; all pairs if `fresh` is None."""
    if fresh is None:
        return pairs
    later, earlier = unpack(pairs)
    return pairs[fresh[later] | fresh[earlier]]


class SortedEntries(NamedTuple):
    """Values with the row they occur in and 8 bits of marks, sorted by value, then by row."""

    values: Array
    positions: Array
    marks: Array

    def ranks(self) -> Array:
        """Return how many rows before each entry have the same value."""
        ranks: Array = np.arange(len(self.values)) - _run_starts(self.values)
        return ranks

    def pair(self, step: int) -> tuple[Array, Array]:
        """Return the entries that have the same value as the entry `step` before them, and those entries."""
        later = np.flatnonzero(self.values[step:] == self.values[:-step]) + step
        return later, later - step


class ExternalSort:
    """Sorts more entries than fit in memory: partitioned on disk by value, one partition at a time."""

    _ENTRY = np.dtype([("value", "<u8"), ("place", "<u4"), ("mark", "u1")])

    def __init__(self, expected: int) -> None:
        self._files: list[Any] = [
            SpooledTemporaryFile(max_size=_PARTITION_BYTES)  # noqa: SIM115
            for _ in range(min(64, expected // _PARTITION_ENTRIES + 1))
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def add(self, values: Array, positions: Array, marks: Array | None = None) -> None:
        """Positions must ascend from one call to the next."""
        entries = np.zeros(len(values), dtype=self._ENTRY)
        entries["value"], entries["place"] = values, positions
        if marks is not None:
            entries["mark"] = marks
        # The lowest bit may have a meaning of its own.
        partition = (values >> np.uint64(1)) % np.uint64(len(self._files))
        order = np.argsort(partition, kind="stable")
        bounds = np.searchsorted(partition[order], np.arange(len(self._files) + 1))
        for file, (start, stop) in zip(self._files, pairwise(bounds.tolist()), strict=True):
            file.write(entries[order[start:stop]].tobytes())

    def partitions(self) -> Iterator[SortedEntries]:
        for file in self._files:
            file.seek(0)
            entries = np.frombuffer(file.read(), dtype=self._ENTRY)
            order = np.argsort(entries["value"], kind="stable")
            values, positions = entries["value"][order], entries["place"][order].astype(np.int64)
            fresh = np.ones(len(values), dtype=bool)
            fresh[1:] = (values[1:] != values[:-1]) | (positions[1:] != positions[:-1])
            yield SortedEntries(values[fresh], positions[fresh], entries["mark"][order][fresh])


def read_rows(corpus: CorpusColumns, name: str, positions: Array) -> Ragged:
    """Read the values of some rows, by ascending positions."""
    parts = list(stream_rows(corpus, name, positions))
    if not parts:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(positions) + 1, dtype=np.int64))
    return join_ragged(parts)


def stream_rows(corpus: CorpusColumns, name: str, positions: Array) -> Iterator[Ragged]:
    """As `read_rows`, some rows at a time."""
    for first, flat, offsets in corpus.ragged(name):
        low, high = np.searchsorted(positions, [first, first + len(offsets) - 1])
        if low < high:
            yield Ragged(flat, offsets).take(positions[low:high] - first)
        if high == len(positions):
            break


def join_ragged(parts: Sequence[Ragged]) -> Ragged:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate(([0], np.cumsum(lengths))))


def _run_starts(values: Array) -> Array:
    """Return, for each of sorted values, the position of the first equal one."""
    fresh = np.ones(len(values), dtype=bool)
    fresh[1:] = values[1:] != values[:-1]
    starts: Array = np.maximum.accumulate(np.where(fresh, np.arange(len(values)), 0))
    return starts
