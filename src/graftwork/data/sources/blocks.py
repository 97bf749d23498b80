"""One file, or standard input, into blocks of JSON lines, whatever container it has.

In: a name as the user gave it. Out: blocks in order, a damaged container as a fault on the block
where it broke. What cannot be opened or holds nothing is an error. Does not parse rows.
"""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from graftwork.data.sources.array import looks_like_array, looks_like_objects, split_array
from graftwork.data.sources.block import BLOCK_SIZE, MAX_LINE, Block, gather_blocks
from graftwork.data.sources.lines import cut_lines
from graftwork.data.sources.parquet import MAGIC, split_parquet
from graftwork.data.sources.stream import Stream
from graftwork.data.sources.table import guess_delimiter, split_table
from graftwork.files.disk import explain_os_error
from graftwork.records.errors import UserMistake

__all__ = ["BLOCK_SIZE", "MAX_LINE", "STANDARD_INPUT", "Block", "cut_blocks"]

STANDARD_INPUT = "-"
_JSON = (".jsonl", ".ndjson", ".json")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def cut_blocks(name: str, *, root: Path, size: int = BLOCK_SIZE, longest: int = MAX_LINE) -> Iterator[Block]:
    """The blocks of one source. `longest` bounds one row; a longer one is a fault, and is never held."""
    path = root / name
    is_empty = True
    try:
        for index, block in enumerate(_cut(name, path, size=size, longest=longest)):
            is_empty = is_empty and not block.faults and not block.data.strip()
            yield block._replace(index=index)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if is_empty:
        raise UserMistake(
            "the file is empty",
            why="there is nothing to learn from",
            fix="name a file with one JSON object a line",
            where=name,
        )


def _cut(name: str, path: Path, *, size: int, longest: int) -> Iterator[Block]:
    if name == STANDARD_INPUT:
        stream = Stream(sys.stdin.buffer, size=None)
        delimiter = guess_delimiter(stream.head)
        yield from _cut_stream(stream, file="stdin", delimiter=delimiter, size=size, longest=longest)
        return
    with path.open("rb") as handle:
        stream = Stream(handle, size=_size_now(handle))
        if stream.head.startswith(MAGIC) and _is_plain(handle):
            yield from gather_blocks(split_parquet(path, longest=longest), file=name, size=size)
        else:
            ending = inner_ending(name)
            delimiter = None if ending in _JSON else _DELIMITERS.get(ending) or guess_delimiter(stream.head)
            yield from _cut_stream(stream, file=name, delimiter=delimiter, size=size, longest=longest)


def inner_ending(name: str) -> str:
    """The ending that names the container: `.csv` of `log.csv.gz`."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


def _cut_stream(
    stream: Stream, *, file: str, delimiter: str | None, size: int, longest: int
) -> Iterator[Block]:
    if stream.head.startswith(MAGIC):
        raise UserMistake(
            "Parquet must be read from a file",
            why="its table of contents stands at its end",
            fix="save it as a file, not packed, and name that",
            where=file,
        )
    elif delimiter:
        rows = split_table(stream, delimiter=delimiter, longest=longest)
        yield from gather_blocks(rows, file=file, size=size)
    elif looks_like_array(stream.head):
        yield from gather_blocks(split_array(stream, longest=longest), file=file, size=size)
    elif looks_like_objects(stream.head):
        rows = split_array(stream, longest=longest, has_brackets=False)
        yield from gather_blocks(rows, file=file, size=size)
    else:
        yield from cut_lines(stream, file=file, size=size, longest=longest)


def _size_now(handle: IO[bytes]) -> int | None:
    """Where to stop reading a file that may grow meanwhile; a pipe has no size."""
    state = os.fstat(handle.fileno())
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def _is_plain(handle: IO[bytes]) -> bool:
    """Whether the file itself begins as Parquet does, rather than what is packed in it."""
    return handle.seekable() and os.pread(handle.fileno(), len(MAGIC), 0) == MAGIC
