"""Finds log files and cuts each into blocks of JSON lines, whatever its container.

In: files, folders, globs or `-` as the user named them. Out: file names in order, and blocks; a damaged
container is a fault of the block where it broke. Does not parse rows.
"""

import errno
import logging
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from graftwork.data.ingest.blocks import (
    BLOCK_SIZE,
    MAX_LINE,
    ByteStream,
    LogBlock,
    cut_lines,
    gather_blocks,
)
from graftwork.data.ingest.containers import (
    MAGIC,
    guess_delimiter,
    split_array,
    split_parquet,
    split_table,
)
from graftwork.data.ingest.transcripts import cut_transcript, find_transcript
from graftwork.files.disk import explain_os_error
from graftwork.records.errors import UserMistake

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
    found: dict[str, str] = {}
    for path in paths:
        for name in _find(path, root=root):
            found.setdefault(os.path.normpath(root / name), name)
    if not found:
        raise UserMistake(
            "no log file is named",
            why="a dataset is made from logs",
            fix="name files, folders or globs under data.logs in graft.yaml, or give a path",
        )
    return tuple(found.values())


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
        raise UserMistake("this is no path", why="it holds a NUL character", fix="check data.logs") from None
    if stat.S_ISDIR(mode):
        return _walk(path, root=root)
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and path.startswith(_SHELL_PIPES)):
        raise UserMistake(
            "this is no file",
            why="it is a pipe, a socket or a device, and logs are read more than once",
            fix="write it to a file first, or give it to standard input and name `-`",
            where=path,
        )
    return [path]


def _find_by_pattern(pattern: str, *, root: Path) -> list[str]:
    # `**` at the end matches only folders in Python before 3.13.
    wanted = f"{pattern}/*" if pattern.endswith("**") else pattern
    path = Path(wanted)
    base = Path(path.anchor) if path.is_absolute() else root
    try:
        matches = list(base.glob(str(path.relative_to(path.anchor)) if path.is_absolute() else wanted))
    except (ValueError, NotImplementedError, re.error) as error:
        raise UserMistake(
            f"this pattern cannot be read: {error}", fix="check data.logs", where=pattern
        ) from None
    files = [match for match in matches if match.is_file()]
    names = [str(file if path.is_absolute() else file.relative_to(root)) for file in files]
    hidden_wanted = "/." in f"/{pattern}"
    names = sorted(name for name in names if hidden_wanted or "/." not in f"/{name}")
    if not names:
        raise UserMistake("no file matches this pattern", fix="check data.logs", where=pattern)
    return names


def _walk(folder: str, *, root: Path) -> list[str]:
    """Return the logs below a folder. Links to folders are not followed, so there are no loops."""
    names: list[str] = []
    others: list[str] = []

    def refuse(error: OSError) -> None:
        raise _explain(error, Path(error.filename or root / folder)) from error

    for parent, folders, files in os.walk(root / folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [str(Path(parent, name)) for name in files if _is_log(name) and _is_file(Path(parent, name))]
        others += [
            name
            for name in files
            if not name.startswith(".") and not _is_log(name) and os.access(Path(parent, name), os.F_OK)
        ]
    if names and others:
        _name_unread(root / folder, tuple(sorted(others)))
    if not names:
        raise UserMistake(
            "the folder holds no log",
            why=f"no file in it ends in {_LISTED}",
            fix="name another folder, or its files one by one",
            where=folder,
        )
    # As the user names them.
    return sorted(str(Path(folder) / Path(name).relative_to(root / folder)) for name in names)


_MOST_NAMED = 3


@cache  # once a process: a command looks for its logs several times
def _name_unread(folder: Path, names: tuple[str, ...]) -> None:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    listed = ", ".join(names[:_MOST_NAMED])
    log.warning("%s: not read, by their names: %s%s; logs end in %s", folder, listed, more, _LISTED)


def _is_file(path: Path) -> bool:
    """Whether this is a file, or a link to one. A broken link is skipped."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise _explain(error, path) from error
        log.warning("%s is passed over: the link leads to no file", path)
        return False


def _is_log(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _explain(error: OSError, path: Path) -> Exception:
    if error.errno == errno.ELOOP:
        return UserMistake(
            "this is a symbolic link that leads to itself",
            why="there is no file at its end",
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
        raise UserMistake(
            "the file is empty",
            why="there is nothing to learn from",
            fix="name a file with one JSON object a line",
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
        raise UserMistake(
            "Parquet must be read from a file",
            why="its table of contents is at its end",
            fix="save it as a file, not packed, and name that",
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
