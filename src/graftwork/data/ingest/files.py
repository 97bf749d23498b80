"""Finds log files and cuts each into blocks of JSON lines, whatever its container.

Input: files, folders, globs or `-` as the user named them. Output: file names in order, and blocks; a damaged
container is a fault of the block where it broke. JSON arrays, CSV and TSV, and Parquet files are split into
rows, each as JSON on one line, with the line (in Parquet, the row number) it begins on. Never holds a whole
file; Parquet is decoded in a process of its own with bounded memory (`parquet_child`). Does not parse rows.
"""

import csv
import errno
import logging
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, takewhile
from pathlib import Path
from typing import IO

import orjson

from graftwork.data.ingest import parquet_child as child
from graftwork.data.ingest.blocks import (
    ALWAYS_UNPACKED,
    BLOCK_SIZE,
    MAX_LINE,
    MOST_GROWTH,
    ByteStream,
    Entry,
    FaultCode,
    Flaw,
    LogBlock,
    cut_lines,
    gather_blocks,
    name_size,
    split_lines,
    too_long,
)
from graftwork.data.ingest.parquet_child import TEXT_COLUMNS, open_cell
from graftwork.data.ingest.transcripts import cut_transcript, find_transcript
from graftwork.files.disk import explain_os_error
from graftwork.process.machine import machine_memory
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.base import GIB
from graftwork.records.errors import UserError
from graftwork.text.shape import MOST_VALUES

log = logging.getLogger(__name__)

STANDARD_INPUT = "-"
# Where the shell puts the output of a command given as a file: `<(zcat old.gz)`.
_SHELL_PIPES = ("/dev/", "/proc/")
_CONTAINERS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_LISTED = f"{', '.join(_CONTAINERS)}, packed with gzip or zstd or not"
ENDINGS = tuple(ending + packing for ending in _CONTAINERS for packing in ("", ".gz", ".zst"))


def find_sources(paths: Iterable[str], *, root: Path = Path()) -> tuple[str, ...]:
    """Return every file that `paths` name, each once. A path that names nothing is an error."""
    # `./log.jsonl` is `log.jsonl`: the first name is kept.
    names_by_path: dict[str, str] = {}
    for path in paths:
        for name in _find(path, root=root):
            names_by_path.setdefault(os.path.normpath(root / name), name)
    if not names_by_path:
        raise UserError(
            "no log file was specified",
            why="a dataset is built from logs",
            fix="specify files, folders or globs under data.logs in graft.yaml, or give a path",
        )
    return tuple(names_by_path.values())


def _find(path: str, *, root: Path) -> list[str]:
    if path == STANDARD_INPUT:
        return [path]
    whole = root / path
    try:
        mode = whole.stat().st_mode
    except OSError as error:
        if any(mark in path for mark in "*?[") and error.errno != errno.ELOOP:
            return _find_by_pattern(path, root=root)
        raise _explain(error, whole) from error
    except ValueError:
        raise UserError(
            "this is not a path", why="it contains a NUL character", fix="check data.logs"
        ) from None
    if stat.S_ISDIR(mode):
        return _walk(path, root=root)
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and path.startswith(_SHELL_PIPES)):
        raise UserError(
            "this is not a file",
            why="it is a pipe, a socket or a device, and logs are read more than once",
            fix="write it to a file first, or pipe it to standard input and use `-`",
            where=path,
        )
    return [path]


def _find_by_pattern(pattern: str, *, root: Path) -> list[str]:
    # `**` at the end matches only folders in Python before 3.13.
    glob = f"{pattern}/*" if pattern.endswith("**") else pattern
    path = Path(glob)
    base = Path(path.anchor) if path.is_absolute() else root
    try:
        matches = list(base.glob(str(path.relative_to(path.anchor)) if path.is_absolute() else glob))
    except (ValueError, NotImplementedError, re.error) as error:
        raise UserError(
            f"this pattern cannot be read: {error}", fix="check data.logs", where=pattern
        ) from None
    files = [match for match in matches if match.is_file()]
    names = [str(file if path.is_absolute() else file.relative_to(root)) for file in files]
    hidden_wanted = "/." in f"/{pattern}"
    names = sorted(name for name in names if hidden_wanted or "/." not in f"/{name}")
    if not names:
        raise UserError("no file matches this pattern", fix="check data.logs", where=pattern)
    return names


def _walk(folder: str, *, root: Path) -> list[str]:
    """Return the logs below a folder. Links to folders are not followed, so there are no loops."""
    names: list[str] = []
    unread: list[str] = []

    def refuse(error: OSError) -> None:
        raise _explain(error, Path(error.filename or root / folder)) from error

    for parent, folders, files in os.walk(root / folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [str(Path(parent, name)) for name in files if _is_log(name) and _is_file(Path(parent, name))]
        unread += [
            name
            for name in files
            if not name.startswith(".") and not _is_log(name) and os.access(Path(parent, name), os.F_OK)
        ]
    if names and unread:
        _name_unread(root / folder, tuple(sorted(unread)))
    if not names:
        raise UserError(
            "the folder contains no log",
            why=f"no file in it ends in {_LISTED}",
            fix="use another folder, or its files one by one",
            where=folder,
        )
    # As the user names them.
    return sorted(str(Path(folder) / Path(name).relative_to(root / folder)) for name in names)


_MOST_NAMED = 3


@cache  # once per process: a command looks for its logs several times
def _name_unread(folder: Path, names: tuple[str, ...]) -> None:
    suffix = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(names[:_MOST_NAMED])
    log.warning("%s: not read, by their names: %s%s; logs end in %s", folder, listed, suffix, _LISTED)


def _is_file(path: Path) -> bool:
    """Whether this is a file, or a link to one. A broken link is skipped."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise _explain(error, path) from error
        log.warning("%s is skipped: the link points to no file", path)
        return False


def _is_log(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _explain(error: OSError, path: Path) -> Exception:
    if error.errno == errno.ELOOP:
        return UserError(
            "this is a symbolic link that points to itself",
            why="its target does not exist",
            fix="fix the link or remove it from data.logs",
            where=str(path),
        )
    return explain_os_error(error, path)


_JSON = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def cut_blocks(
    name: str, *, root: Path, size: int = BLOCK_SIZE, longest: int = MAX_LINE
) -> Iterator[LogBlock]:
    """Yield the blocks of one source. A row longer than `longest` is a fault and never held in memory."""
    path = root / name
    is_empty = True
    try:
        for index, block in enumerate(_open_blocks(name, path, size=size, longest=longest)):
            is_empty = is_empty and not block.faults and not block.data.strip()
            yield block._replace(index=index)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if is_empty:
        raise UserError(
            "the file is empty",
            why="there is nothing to learn from",
            fix="specify a file with one JSON object per line",
            where=name,
        )


def _open_blocks(name: str, path: Path, *, size: int, longest: int) -> Iterator[LogBlock]:
    if name == STANDARD_INPUT:
        stream = ByteStream(sys.stdin.buffer, size=None)
        delimiter = guess_delimiter(stream.head)
        yield from _cut_stream(stream, file="stdin", delimiter=delimiter, size=size, longest=longest)
        return
    with path.open("rb") as handle:
        # A file may grow meanwhile; a pipe has no size.
        state = os.fstat(handle.fileno())
        stream = ByteStream(handle, size=state.st_size if stat.S_ISREG(state.st_mode) else None)
        # The file itself must be Parquet, rather than what is compressed in it.
        is_parquet = stream.head.startswith(MAGIC) and handle.seekable()
        if is_parquet and os.pread(handle.fileno(), len(MAGIC), 0) == MAGIC:
            yield from gather_blocks(split_parquet(path, longest=longest), file=name, size=size)
            return
        ending = inner_ending(name)
        delimiter = None
        if ending not in _JSON:
            delimiter = _DELIMITERS.get(ending) or guess_delimiter(stream.head)
        yield from _cut_stream(stream, file=name, delimiter=delimiter, size=size, longest=longest)


def inner_ending(name: str) -> str:
    """Return the suffix of the container: `.csv` for `log.csv.gz`."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def _cut_stream(
    stream: ByteStream, *, file: str, delimiter: str | None, size: int, longest: int
) -> Iterator[LogBlock]:
    head = stream.head.lstrip()
    if stream.head.startswith(MAGIC):
        raise UserError(
            "Parquet must be read from a file",
            why="its metadata is at its end",
            fix="save it as a plain, uncompressed file and specify that",
            where=file,
        )
    elif delimiter:
        rows = split_table(stream, delimiter=delimiter, longest=longest)
        yield from gather_blocks(rows, file=file, size=size)
    elif transcript := find_transcript(stream.head):
        yield from cut_transcript(stream, transcript, file=file, size=size, longest=longest)
    elif head.startswith(b"[") and head[1:].lstrip()[:1] in (b"{", b"]", b""):
        # One array of objects.
        yield from gather_blocks(split_array(stream, longest=longest), file=file, size=size)
    elif head.partition(b"\n")[0].rstrip() == b"{" and b"\n" in head:
        # Objects that are spread over several lines: the first line only opens one.
        rows = split_array(stream, longest=longest, has_brackets=False)
        yield from gather_blocks(rows, file=file, size=size)
    else:
        yield from cut_lines(stream, file=file, size=size, longest=longest)


_SEPARATORS = re.compile(rb"[ \t\r\n,]*+")
_STRING = rb'"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
# Everything up to the next bracket, with strings as a whole; then the bracket, or a string that is not closed
# here.
_TO_BRACKET = re.compile(rb"(?:[^\"\[\]{}]++|" + _STRING + rb')*+(["\[\]{}]?)')
_SCALAR = re.compile(_STRING + rb"|[^,\]\n]++")
_CLOSER = {ord("{"): ord("}"), ord("["): ord("]")}
_ENDS_THERE = -1  # the stream ends inside the element
_BROKEN = -2
_DEEPEST = 1024
"""The parser's limit; a row that is nested deeper is rejected."""


def split_array(stream: ByteStream, *, longest: int, has_brackets: bool = True) -> Iterator[Entry | Flaw]:
    """Yield the elements; where the stream is damaged, those before the damage and then its flaw."""
    buffer = _Buffer(iter(stream), longest=longest)
    buffer.drop(buffer.data.index(b"[") + 1 if has_brackets else 0)
    line = buffer.line
    for record in _split(buffer, stream, is_closed=has_brackets):
        line = record.line
        yield record
    if stream.damage:
        yield Flaw(max(line, buffer.line), "parse_error", f"{stream.damage}; the rows before are read")


def _split(buffer: "_Buffer", stream: ByteStream, *, is_closed: bool) -> Iterator[Entry | Flaw]:
    longest = buffer.longest
    wasted = 0
    indent: bytes | None = None  # of the first element that begins a line, and so of all
    while True:
        margin = buffer.skip_separators()
        if not buffer.left:
            if is_closed and not stream.damage:
                yield Flaw(buffer.line, "parse_error", _UNCLOSED)
            return
        if buffer.data[buffer.start] == ord("]"):
            buffer.drop(1)
            yield from _rest_by_line(buffer)
            return
        end = buffer.find_end()
        line = buffer.line
        if end == _ENDS_THERE and stream.damage:
            return
        if end > longest:
            buffer.drop(end)
            yield too_long(line, end, longest=longest)
            continue
        indent = margin if indent is None else indent
        if end >= 0 and buffer.is_one_element(end, indent or b""):
            # A line end inside an element is white space, and so is \r; in a string both are invalid.
            yield Entry(line, buffer.take(end).replace(b"\n", b"\r"))
            continue
        wasted += buffer.scanned
        yield buffer.take_broken()
        if wasted > 4 * longest:
            # With too many broken places, only lines count that are objects by themselves.
            for record in _rest_by_line(buffer):
                if isinstance(record, Entry) and record.data.startswith(b"{") and record.data.endswith(b"}"):
                    yield record
            return
        if not buffer.find_next_line(indent or b""):
            return


_UNCLOSED = "the array is not closed; the file may still be being written"


class _Buffer:
    """A part of the stream in memory. `start` is the position in it, `line` the line of that position."""

    def __init__(self, chunks: Iterator[bytes], *, longest: int) -> None:
        self.chunks = chunks
        self.longest = longest
        self.data = next(chunks, b"")
        self.start = 0
        self.line = 1
        self.scanned = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.start

    def grow(self) -> bool:
        """Read one more chunk, and drop what is done."""
        chunk = next(self.chunks, b"")
        if not chunk:
            return False
        self.data = self.data[self.start :] + chunk
        self.start = 0
        return True

    def drop(self, count: int) -> None:
        end = self.start + count
        self.line += self.data.count(b"\n", self.start, end)
        self.start = end

    def take(self, count: int) -> bytes:
        data = self.data[self.start : self.start + count]
        self.drop(count)
        return data

    def skip_separators(self) -> bytes | None:
        """Skip to the next element, or to the end. Returns the indentation if the element begins its line."""
        separators = b""
        while True:
            match = _SEPARATORS.match(self.data, self.start)
            gap = match.group() if match else b""
            # Only the last line and the line end before it matter.
            separators = b"".join((separators + gap).rpartition(b"\n")[1:])
            self.drop(len(gap))
            if self.left or not self.grow():
                begins_line = separators.startswith(b"\n") and b"," not in separators
                return separators[1:] if begins_line else None

    def find_end(self) -> int:
        """Return the length of the element that begins here, or why it has none."""
        if self.data[self.start] not in _CLOSER:
            match = _SCALAR.match(self.data, self.start)
            while match and match.end() == len(self.data) and self.left <= self.longest and self.grow():
                match = _SCALAR.match(self.data, self.start)
            return match.end() - self.start if match else _BROKEN
        closers = bytearray()
        offset = brackets = 0
        while True:
            match = _TO_BRACKET.match(self.data, self.start + offset)
            token = match.group(1) if match else b""
            offset = self.scanned = (match.start(1) if match else 0) - self.start
            if not token or token == b'"':
                if token and self.data.find(b"\n", self.start + offset) >= 0:
                    return _BROKEN
                if self.left > self.longest:
                    return _BROKEN
                if not self.grow():
                    return _ENDS_THERE
                continue
            offset += 1
            brackets += 1
            fits = True
            if token[0] in _CLOSER:
                closers.append(_CLOSER[token[0]])
            else:
                fits = token[0] == closers.pop()
            if not fits or len(closers) > _DEEPEST or brackets > 2 * MOST_VALUES:
                return _BROKEN
            if not closers:
                return offset

    def is_one_element(self, count: int, indent: bytes) -> bool:
        """Whether this is one element, and not several broken ones whose brackets happen to match."""
        if self.data.find(b"\n" + indent + b"{", self.start, self.start + count) < 0:
            return True
        try:
            orjson.loads(self.data[self.start : self.start + count])
        except orjson.JSONDecodeError:
            return False
        return True

    def take_broken(self) -> Entry | Flaw:
        """Read the line of a broken element, without its line end; an overlong one is only measured."""
        line, size, text = self.line, 0, b""
        while True:
            end = self.data.find(b"\n", self.start)
            part = self.take((end if end >= 0 else len(self.data)) - self.start)
            size += len(part)
            text = text + part if size <= self.longest else b""
            if end >= 0 or not self.grow():
                break
        if size > self.longest:
            return too_long(line, size, longest=self.longest)
        return Entry(line, text.rstrip(b" \t\r,") or b"{")

    def find_next_line(self, indent: bytes) -> bool:
        """Skip to the next line that begins like the elements of this file."""
        marker = b"\n" + indent + b"{"
        while True:
            match_start = self.data.find(marker, self.start)
            if match_start >= 0:
                self.drop(match_start + 1 - self.start)
                return True
            self.drop(max(self.left - len(marker), 0))
            if not self.grow():
                return False


def _rest_by_line(buffer: _Buffer) -> Iterator[Entry | Flaw]:
    """What looked like an array may have been the first line of a file of lines."""
    chunks = chain((buffer.data[buffer.start :],), buffer.chunks)
    for record in split_lines(chunks, line=buffer.line, longest=buffer.longest):
        if isinstance(record, Flaw):
            yield record
        elif record.data.strip():
            yield Entry(record.line, record.data.strip().removesuffix(b","))


_KNOWN_COLUMNS = TEXT_COLUMNS | {"messages", "conversations"}
_LONGEST_NAME = 200


def guess_delimiter(head: bytes) -> str | None:
    """Return the delimiter if the first line is a header with a known column."""
    first = head.partition(b"\n")[0].decode("utf-8", errors="replace").strip()
    for delimiter in ("\t", ",", ";"):
        names = {name.strip(' "') for name in first.split(delimiter)}
        if len(names) > 1 and names & _KNOWN_COLUMNS and not first.startswith(("{", "[")):
            return delimiter
    return None


def split_table(stream: ByteStream, *, delimiter: str, longest: int) -> Iterator[Entry | Flaw]:
    first_line = stream.head.partition(b"\n")[0]
    if delimiter == "," and b"," not in first_line and b";" in first_line:
        delimiter = ";"  # as spreadsheets write it where the comma is the decimal mark
    names: list[str] | None = None
    for record in _read_rows(stream, delimiter=delimiter, longest=longest):
        if isinstance(record, Flaw):
            yield record
        elif names is None:
            line, names = record
            wrong = _explain_bad_header(names)
            if wrong:
                yield Flaw(line, "schema", wrong)
                return
        else:
            line, cells = record
            row = {name: open_cell(name, cell) for name, cell in zip(names, cells, strict=True)}
            yield Entry(line, orjson.dumps(row))


def _explain_bad_header(names: list[str]) -> str | None:
    if any(not name.strip() for name in names):
        nameless = [bool(name.strip()) for name in names].index(False)
        return f"the header has no name for column {nameless + 1}"
    if any(len(name) > _LONGEST_NAME or "\n" in name or name[0] in "{[" for name in names):
        return "the first line is not a header: it contains values, not column names"
    earlier: set[str] = set()
    for index, name in enumerate(names):
        if name in earlier:
            return f"the header repeats a name in column {index + 1}"
        earlier.add(name)
    return None


class _BeyondLimit(Exception):
    """A line, or the lines of one row together, exceed the limit."""

    def __init__(self, flaw: Flaw, *, is_held: bool) -> None:
        super().__init__(flaw.message)
        self.flaw = flaw
        self.is_held = is_held


class _Feed:
    """Lines of text for the csv module, which can take back a bad row.

    The lines of the current row are one piece of bytes: an open quote makes millions of lines one row, and
    as strings they would take fifty times as much memory.
    """

    def __init__(self, records: Iterator[Entry | Flaw], *, delimiter: str, longest: int) -> None:
        self.line = 0
        self.is_utf8 = True
        self._records = records
        self._delimiter = delimiter
        self._longest = longest
        self._patience = 4 * longest
        self._held = bytearray()
        self._place = 0
        self._first_line = 0
        self._second_begins = 0
        self._cells = 0

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        if self._place == len(self._held):
            record = next(self._records)
            if isinstance(record, Flaw):
                self.line += 1
                raise _BeyondLimit(record, is_held=False)
            self._held += record.data
        end = self._held.find(b"\n", self._place) + 1 or len(self._held)
        text = self._held[self._place : end].decode("utf-8", errors="surrogateescape")
        self._place = end
        self.line += 1
        self._second_begins = self._second_begins or end
        self._cells += text.count(self._delimiter)
        if self._place > self._longest:
            flaw = too_long(self._first_line, self._place, longest=self._longest)
            raise _BeyondLimit(flaw, is_held=True)
        if self._cells >= MOST_VALUES:
            reason = f"the row has {MOST_VALUES:,} cells or more"
            raise _BeyondLimit(Flaw(self._first_line, "parse_error", reason), is_held=True)
        self.is_utf8 = self.is_utf8 and (text.isascii() or _NO_UTF8.search(text) is None)
        return text

    def begin_row(self) -> None:
        del self._held[: self._place]
        self._place = self._second_begins = self._cells = 0
        self._first_line = self.line + 1
        self.is_utf8 = True

    def take_back(self) -> None:
        """Return to the line after the first of a bad row: a stray quote swallows good rows."""
        self._patience -= self._place
        if self._patience > 0 and self._second_begins:
            self._place = self._second_begins
            self.line = self._first_line


_NO_UTF8 = re.compile("[\ud800-\udfff]")
"""What bytes that are not UTF-8 become."""


def _read_rows(stream: ByteStream, *, delimiter: str, longest: int) -> Iterator[tuple[int, list[str]] | Flaw]:
    """Yield the cells of each row with the line that it begins on."""
    csv.field_size_limit(longest)
    # If the stream is damaged, without the line it broke in.
    lines = takewhile(
        lambda record: isinstance(record, Flaw) or not stream.damage or record.data.endswith(b"\n"),
        split_lines(stream, line=1, longest=longest),
    )
    feed = _Feed(lines, delimiter=delimiter, longest=longest)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    width = 0  # the header's, once it is read
    while True:
        feed.begin_row()
        line = feed.line + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if not (stream.damage and "end of data" in str(error)):
                yield Flaw(line, "parse_error", f"the row is not CSV: {error}")
            feed.take_back()
        except _BeyondLimit as error:
            yield error.flaw
            if error.is_held:
                feed.take_back()
        else:
            if cells is None:
                break
            if not feed.is_utf8:
                yield Flaw(line, "encoding", "the row is not UTF-8")
            elif cells and len(cells) == (width or len(cells)):
                width = len(cells)
                yield line, cells
            elif cells:
                text = f"the row has {len(cells)} cells, and the header names {width} columns"
                yield Flaw(line, "schema", text)
                feed.take_back()
            continue
        # The csv module keeps half a row after an error.
        reader = csv.reader(feed, delimiter=delimiter, strict=True)
    if stream.damage:
        yield Flaw(line, "parse_error", f"{stream.damage}; the rows before are read")


MAGIC = b"PAR1"
_LEAST_MEMORY = 512 << 20
_MEMORY_PER_BYTE = 64
"""Decoding may take this many times the file size in addition, and at most half of the machine's memory: a
page must be decoded whole, and writers put up to a thousand rows into one.
"""

_SAID: dict[bytes, tuple[FaultCode, str]] = {
    child.BAD_TEXT: ("encoding", "a value of the row is not UTF-8, or beyond what can be read"),
    child.BAD_VALUE: ("schema", "the row contains a value that is not text, a number, a list or an object"),
    child.TOO_MUCH: ("parse_error", f"the file unpacks to more than {MOST_GROWTH:,} times its size"),
    child.DAMAGED: ("parse_error", "the file is not valid Parquet from here on"),
}


def split_parquet(path: Path, *, longest: int) -> Iterator[Entry | Flaw]:
    size = path.stat().st_size
    memory = _LEAST_MEMORY + _MEMORY_PER_BYTE * size
    machine = machine_memory().get("limit")
    if machine is not None:
        memory = min(memory, max(_LEAST_MEMORY, int(machine * GIB / 2)))
    figures = (longest, memory, ALWAYS_UNPACKED + MOST_GROWTH * size)
    # -P: do not import a module of that name from the working folder.
    command = [sys.executable, "-P", "-m", child.__name__, str(path), *map(str, figures)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            # Other allocators reserve more addresses than they use, and addresses are limited.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "1",
            # Large blocks are returned to the system when they are freed.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
            "OMP_NUM_THREADS": "1",
        },
    ) as process:
        assert process.stdout is not None
        try:
            yield from _read_frames(process.stdout, memory=memory, longest=longest)
        finally:
            process.kill()


def _read_frames(source: IO[bytes], *, memory: int, longest: int) -> Iterator[Entry | Flaw]:
    number = 0
    while len(head := source.read(child.HEAD.size)) == child.HEAD.size:
        kind, number, length = child.HEAD.unpack(head)
        if kind == child.END:
            return
        data = source.read(length)
        if kind == child.ROW and len(data) == length:
            yield Entry(number, data)
        elif len(data) == length:
            yield _explain_exit(kind, number, data, memory=memory, longest=longest)
    yield Flaw(
        number + 1,
        "parse_error",
        f"the file cannot be decoded from here on: it is damaged, or takes more than {name_size(memory)}",
    )


def _explain_exit(kind: bytes, number: int, data: bytes, *, memory: int, longest: int) -> Flaw:
    if kind in _SAID:
        return Flaw(number, *_SAID[kind])
    if kind == child.LONG_ROW:
        return too_long(number, int(data), longest=longest)
    if kind == child.TOO_MANY_ROWS:
        return Flaw(number, "parse_error", f"the file claims {int(data):,} rows, more than its size can hold")
    what = "row" if kind == child.LARGE_ROW else "file from here on"
    text = f"decoding the {what} takes more than {name_size(memory)}"
    return Flaw(number, "parse_error", f"{text}; write it with smaller rows, pages and row groups")
