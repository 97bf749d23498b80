"""The corpus: all rows of the logs on disk, in row order.

Input: segments of feature files. Output: single columns over all rows as arrays, and rows by their position.
Memory does not grow with the text of the logs: a column of ten million numbers is 80 MB, and rows are read
block by block. Arrays that only the first rows determine are kept from one run to the next: a log that has
grown has the same first rows.
"""

import hashlib
import io
import zipfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from graftwork.data.audit.row_checks import BAD, Note
from graftwork.data.ingest.blocks import IN_OTHER_FILE, ReadFault, SkippedPart
from graftwork.files.disk import explain_os_error, write_atomic
from graftwork.records.dataset import InputFile
from graftwork.records.errors import Corrupted
from graftwork.records.interaction import (
    AnswerOrigin,
    CaptureOrigin,
    Interaction,
    Message,
    Origin,
    RewardLevel,
)

CACHE_BYTES = 160 << 20
LIST_BYTES = 96 << 20
LEARNED = "learned"


Arrays = tuple["np.ndarray[Any, Any]", ...]
Identify = Callable[[int], str]
"""A digest of the first rows of the corpus: everything that is read of them."""
CACHE_FORM = 1
"""Incremented when the computations change: older files are then not used."""


def write_arrays(path: Path, arrays: dict[str, "np.ndarray[Any, Any]"], *, durable: bool = True) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy has no type for named arrays
    write_atomic(path, buffer.getvalue(), durable=durable)


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Read arrays by their names; none where the file is missing or damaged, or lacks one of these."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
    return arrays if arrays.keys() >= set(names) else {}


class PrefixCache:
    """Holds the latest arrays of each name; `save` writes those that are new."""

    def __init__(self, folder: Path, identify: Identify) -> None:
        self._folder, self._identify = folder, identify
        self._held: dict[str, tuple[int, Arrays]] = {}
        """By name: how many rows the arrays depend on, and these."""
        self._new: set[str] = set()
        self._looked: set[str] = set()
        self._stamps: dict[int, str] = {}

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays:
        """Arrays that the first `rows` rows determine; without `store`, for this process only."""
        entry = self._hold(name)
        if entry is not None and entry[0] == rows:
            return entry[1]
        return self._put(name, rows, make(), store=store)

    def grow(self, name: str, rows: int, make: Callable[[int, Arrays | None], Arrays]) -> Arrays:
        """Arrays of all `rows` rows; `make` gets how many rows those of the last run cover, and these."""
        entry = self._hold(name)
        if entry is None or entry[0] > rows:
            return self._put(name, rows, make(0, None))
        covered, of_known = entry
        arrays = make(covered, of_known)
        is_same = covered == rows and all(map(np.array_equal, arrays, of_known))
        return arrays if is_same else self._put(name, rows, arrays)

    def forget(self) -> None:
        """Drop what is held in memory."""
        self._held.clear()
        self._new.clear()
        self._looked.clear()
        self._stamps.clear()

    def save(self) -> None:
        """Write what was computed; not durably, since it can be computed again."""
        for name in sorted(self._new):
            rows, arrays = self._held[name]
            by_name = {f"array_{number}": array for number, array in enumerate(arrays)}
            by_name |= {"rows": np.array(rows), "of": np.array(self._stamp(rows))}
            write_arrays(self._folder / f"{name}.npz", by_name, durable=False)
        self._new.clear()

    def _put(self, name: str, rows: int, arrays: Arrays, *, store: bool = True) -> Arrays:
        self._held[name] = rows, arrays
        if store:
            self._new.add(name)
        return arrays

    def _hold(self, name: str) -> tuple[int, Arrays] | None:
        if name not in self._held and name not in self._looked:
            self._looked.add(name)
            stored = read_arrays(self._folder / f"{name}.npz", ("rows", "of"))
            rows = int(stored["rows"]) if stored else 0
            if stored and str(stored["of"]) == self._stamp(rows):
                self._held[name] = rows, tuple(stored[f"array_{n}"] for n in range(len(stored) - 2))
        return self._held.get(name)

    def _stamp(self, rows: int) -> str:
        if rows not in self._stamps:
            self._stamps[rows] = f"{CACHE_FORM} {self._identify(rows)}"
        return self._stamps[rows]


class Segment(NamedTuple):
    """The rows `start` to `stop` of one feature file, whose block begins on `first_line` of `file`."""

    file: str
    block: int
    first_line: int
    features: str
    start: int
    stop: int


class JoinedFacts(NamedTuple):
    """What other lines of the logs say about a row: a score, and a reply that is worse than its own."""

    reward: float | None
    level: RewardLevel | None
    rejected: str | None = None


def join_facts(row: Interaction, joined: JoinedFacts) -> Interaction:
    """Return the row with what is logged separately. Its own score of the call and its own pair win."""
    update: dict[str, Any] = {}
    if joined.reward is not None and (
        row.reward is None or (row.reward_level == "trace" and joined.level != "trace")
    ):
        update = {"reward": joined.reward, "reward_level": joined.level}
    if joined.rejected is not None and row.rejected is None:
        update["rejected"] = joined.rejected
    return row.model_copy(update=update) if update else row


class Corpus:
    def __init__(
        self,
        folder: Path,
        *,
        segments: Sequence[Segment],
        inputs: Sequence[InputFile],
        features_key: str = "",
    ) -> None:
        """`features_key` identifies the settings that row features depend on."""
        self._folder, self._features_key = folder, features_key
        self.segments = tuple(segments)
        self.inputs = tuple(inputs)
        self._firsts = [0]
        for segment in self.segments:
            self._firsts.append(self._firsts[-1] + segment.stop - segment.start)
        self.rows = self._firsts[-1]
        self.withdrawn: dict[int, str] = {}
        """Rows that passed their own checks but are contradicted by another row, with the reason."""
        self.joined: dict[int, JoinedFacts] = {}
        """What other lines say about rows."""
        self.low_rated: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """Rows that cannot be references for tests because of their score."""
        self.pairs: dict[int, int] = {}
        """By the row with the better reply to a prompt: the one with the worse, by their scores."""
        self._fields: dict[str, int] = {}
        self._held: dict[str, np.ndarray[Any, Any]] = {}
        self._lists: dict[tuple[str, int], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._list_bytes = 0
        self._learned = PrefixCache(folder / LEARNED, self.identify)

    def column(self, name: str) -> "np.ndarray[Any, Any]":
        """Return one value per row, in row order. Read-only: the array is cached."""
        values = self._held.pop(name, None)
        if values is None:
            parts = [self._read(segment, name).to_numpy(zero_copy_only=False) for segment in self.segments]
            values = np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)
            if name == "passed":
                values[list(self.withdrawn)] = False
            if name == "unconfirmed":
                values[self.low_rated] = BAD
            values.flags.writeable = False
        # Grouping and the leakage check read the same columns: reading every block again would cost more.
        self._held[name] = values
        while sum(column.nbytes for column in self._held.values()) > CACHE_BYTES:
            del self._held[next(iter(self._held))]
        return values

    def withdraw(self, rows: dict[int, str]) -> None:
        """Mark these rows as not passed, with their reasons."""
        self.withdrawn |= rows
        self._held.pop("passed", None)
        self._learned.forget()

    def rate_low(self, rows: "npt.NDArray[np.int64]") -> None:
        """Mark these rows as no references for tests."""
        if not len(rows):
            return
        self.low_rated = np.union1d(self.low_rated, rows)
        self._held.pop("unconfirmed", None)
        self._learned.forget()

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays:
        """Return arrays that the first `rows` rows determine: of the last run, if these are the same."""
        return self._learned.remember(name, rows, make, store=store)

    def grow(self, name: str, make: Callable[[int, Arrays | None], Arrays]) -> Arrays:
        """Return arrays of all rows; `make` gets those of the first rows, and how many these are."""
        return self._learned.grow(name, self.rows, make)

    def identify(self, rows: int) -> str:
        """Return a digest of the first rows, and of the settings that their features depend on."""
        digest = hashlib.sha256(self._features_key.encode())
        # Not the feature files: the last block of a log that has grown is another one.
        for name in ("line_key", "prompt", "reply", "passed", "unconfirmed"):
            digest.update(self.column(name)[:rows].tobytes())
        return digest.hexdigest()

    def forget(self) -> None:
        """Free the cached columns and arrays, and keep them on disk for the next run."""
        self._held.clear()
        self._lists.clear()
        self._list_bytes = 0
        self._learned.save()
        self._learned.forget()

    def ragged(
        self, name: str
    ) -> Iterator[tuple[int, "np.ndarray[Any, Any]", "np.ndarray[Any, np.dtype[np.int64]]"]]:
        """Yield, block by block: the first position, all values, and the offset of each row's values."""
        for number, (first, segment) in enumerate(self.by_segment()):
            entry = self._lists.get((name, number))
            if entry is None:
                lists = self._read(segment, name)
                offsets = lists.offsets.to_numpy().astype(np.int64)
                entry = lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0]
                # Grouping and the leak check read them a dozen times, in order: those that come first stay.
                if self._list_bytes < LIST_BYTES:
                    self._lists[name, number] = entry
                    self._list_bytes += entry[0].nbytes + entry[1].nbytes
            yield first, *entry

    def labels(self, name: str) -> "tuple[np.ndarray[Any, np.dtype[np.int32]], list[str]]":
        """Return a column of texts as numbers, -1 for none, and the distinct texts."""
        numbers_by_label: dict[str, int] = {}
        parts = [np.zeros(0, dtype=np.int32)]
        for segment in self.segments:
            if name == "file":
                number = numbers_by_label.setdefault(segment.file, len(numbers_by_label))
                parts.append(np.full(segment.stop - segment.start, number, dtype=np.int32))
                continue
            coded = self._read(segment, name).dictionary_encode()
            lookup = [
                numbers_by_label.setdefault(label, len(numbers_by_label))
                for label in coded.dictionary.to_pylist()
            ]
            numbers = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            parts.append(np.array([*lookup, -1], dtype=np.int32)[numbers])
        return np.concatenate(parts), list(numbers_by_label)

    def has_label(self, name: str, *labels: str) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """Mark the rows whose label in this column is one of these."""
        numbers, names = self.labels(name)
        return np.isin(numbers, [number for number, label in enumerate(names) if label in labels])

    def notes(self) -> Iterator[tuple[int, Note]]:
        """Yield the notes on rows, in order."""
        for first, segment in zip(self._firsts, self.segments, strict=False):
            for number, packed in enumerate(self._read(segment, "notes").to_pylist()):
                for note in orjson.loads(packed) if packed else ():
                    yield first + number, Note(*note)

    def faults(self) -> Iterator[tuple[str, ReadFault]]:
        """Yield the rows that could not be read, with the hashes of their lines."""
        for segment, head in self._heads():
            for line, input_hash, code, message in head["faults"]:
                origin = Origin(file=segment.file, line=segment.first_line + line)
                yield input_hash, ReadFault(origin=origin, code=code, message=message)

    def left_out(self) -> Iterator[SkippedPart]:
        """Yield what is not an exchange in the lines of the logs, by rule."""
        for segment, head in self._heads():
            for line, rule, count, trace, call in head["left_out"]:
                origin = Origin(file=segment.file, line=segment.first_line + line)
                is_row = call != 0 and (trace, call) in self._calls
                yield SkippedPart(origin=origin, rule=IN_OTHER_FILE if is_row else rule, count=count)

    @cached_property
    def _calls(self) -> set[tuple[int, int]]:
        """The hashes of trace and call of every row of a trace."""
        traces, calls = self.column("trace"), self.column("call")
        positions = np.flatnonzero(traces != 0)
        return set(zip(traces[positions].tolist(), calls[positions].tolist(), strict=True))

    def scores(self) -> Iterator[tuple[int, int, float]]:
        """Yield separately logged scores: the hashes of their trace and call (0 for none), the value."""
        for _, head in self._heads():
            yield from ((trace, call, value) for trace, call, value in head["scores"])

    def _heads(self) -> Iterator[tuple[Segment, dict[str, Any]]]:
        """Yield the head of every block once; see `read_head`."""
        read_blocks = set()
        for segment in self.segments:
            if (segment.file, segment.block) not in read_blocks:
                read_blocks.add((segment.file, segment.block))
                yield segment, read_head(self._folder / segment.features)

    def rows_at(self, positions: Sequence[int]) -> Iterator[tuple[int, Interaction]]:
        """Yield the rows at these positions, which must ascend."""
        start = 0
        for (first, stop), segment in zip(pairwise(self._firsts), self.segments, strict=True):
            until = start
            while until < len(positions) and positions[until] < stop:
                until += 1
            if until > start:
                rows = read_interactions(
                    self._folder / segment.features,
                    [segment.start + int(position) - first for position in positions[start:until]],
                    file=segment.file,
                    first_line=segment.first_line,
                )
                for position, row in zip(
                    (int(position) for position in positions[start:until]), rows, strict=True
                ):
                    joined = self.joined.get(position)
                    yield position, row if joined is None else join_facts(row, joined)
            start = until

    def origin(self, position: int) -> Origin:
        segment = self.segments[bisect_right(self._firsts, position) - 1]
        return Origin(file=segment.file, line=segment.first_line + int(self._lines[position]))

    @cached_property
    def _lines(self) -> "np.ndarray[Any, np.dtype[np.int32]]":
        return self.column("line").astype(np.int32)

    def by_segment(self) -> Iterator[tuple[int, Segment]]:
        """Yield every segment with the position of its first row."""
        return zip(self._firsts, self.segments, strict=False)

    def path_of(self, segment: Segment) -> Path:
        return self._folder / segment.features

    def read_columns(
        self, segment: Segment, names: Sequence[str], numbers: Sequence[int] | None = None
    ) -> dict[str, list[Any]]:
        """Read several columns of one segment as lists: of all of its rows, or of these."""
        table = read_table(self._folder / segment.features, names)
        table = table.slice(segment.start, segment.stop - segment.start)
        selection = table if numbers is None else table.take(pa.array(numbers, pa.int64()))
        values: dict[str, list[Any]] = selection.to_pydict()
        return values

    def _read(self, segment: Segment, name: str) -> "pa.Array":
        # All blocks have the same columns: their positions are looked up once.
        if name not in self._fields:
            with _opened(self._folder / segment.features) as reader:
                self._fields = {field: number for number, field in enumerate(reader.schema.names)}
        with _opened(self._folder / segment.features, [self._fields[name]]) as reader:
            column = reader.read_all().column(name).combine_chunks()
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        return column.slice(segment.start, segment.stop - segment.start)


def read_head(path: Path) -> dict[str, Any]:
    """What a feature file says besides its rows: `records`, their number, and as lists `faults` (rows that
    could not be read), `left_out` and `scores` of traces.
    """
    with _opened(path) as reader:
        return {name.decode(): orjson.loads(value) for name, value in reader.schema.metadata.items()}


def read_table(path: Path, names: Sequence[str]) -> "pa.Table":
    """Read columns of a feature file."""
    with _opened(path) as reader:
        indices = [reader.schema.get_field_index(name) for name in names]
    with _opened(path, indices) as reader:
        return reader.read_all()


@contextmanager
def _opened(path: Path, fields: list[int] | None = None) -> Iterator["pa.ipc.RecordBatchFileReader"]:
    try:
        with pa.OSFile(str(path)) as source:
            options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            yield pa.ipc.open_file(source, options=options)
    except pa.ArrowException as error:
        raise _damaged(path) from error
    except OSError as error:
        # Arrow raises this when it cannot decompress a file.
        raise (_damaged(path) if error.errno is None else explain_os_error(error, path)) from error


def read_interactions(
    path: Path, numbers: Sequence[int], *, file: str, first_line: int
) -> Iterator[Interaction]:
    """Read rows of a feature file by their numbers."""
    table = read_table(path, ["line", "interaction"])
    selection = table.take(pa.array(numbers, pa.int64()))
    lines, packed = selection.column("line").to_pylist(), selection.column("interaction").to_pylist()
    for line, data in zip(lines, packed, strict=True):
        yield decode_row(data, origin=Origin(file=file, line=first_line + line))


def encode_row(row: Interaction) -> bytes:
    """Encode a row without its origin: the same bytes wherever the line is."""
    values = row.model_dump(mode="json", exclude={"origin", "messages"}, exclude_none=True)
    # A row without an id is identified by its origin, plus a number where one line has several rows.
    if row.id.startswith(str(row.origin)):
        values["number"] = values.pop("id").removeprefix(str(row.origin))
    values["messages"] = [(message.role, message.content) for message in row.messages]
    return orjson.dumps(values)


def decode_row(data: bytes, *, origin: Origin) -> Interaction:
    values = orjson.loads(data)
    if "number" in values:
        values["id"] = f"{origin}{values.pop('number')}"
    messages = tuple(Message.model_construct(role=role, content=text) for role, text in values["messages"])
    if "capture" in values:
        values["capture"] = CaptureOrigin.model_construct(**values["capture"])
    if "turn_weights" in values:
        values["turn_weights"] = tuple(values["turn_weights"])
    if "answered" in values:
        values["answered"] = AnswerOrigin.model_construct(**values["answered"])
    # Validated when it was written: validating again would dominate the time.
    return Interaction.model_construct(**{**values, "origin": origin, "messages": messages})


def _damaged(path: Path) -> Corrupted:
    return Corrupted(
        "a block of row features of the logs is damaged",
        why="it is not valid Arrow",
        fix="delete it and run the same command again",
        where=str(path),
    )
