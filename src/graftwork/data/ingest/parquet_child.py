"""The process that decodes one Parquet file, with limited memory.

Input, as arguments: a path, the most bytes of a row, the memory for decoding, the most bytes of all rows.
Out, on standard output: frames, each a header (`HEAD`: kind, row number, length) and a body; a row is JSON on
one line. The last frame is `END`: without it the process has died.

Only a separate process can bound the format: a page of a hundred bytes can decode to gigabytes, the sizes in
its footer are only claims, and the decoder is native code. Imports little, to start quickly.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from graftwork.process.worker import stop_with_parent
from graftwork.text.shape import has_too_many_values

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

# A reply may be JSON and must stay text.
TEXT_COLUMNS = frozenset(
    (
        *("prompt", "completion", "response", "question", "answer", "instruction", "input", "output"),
        *("system", "reply", "text", "content", "chosen", "rejected"),
    )
)
_MARKS_OF_STRUCTURE = {"role", "from", "choices", "body", "status_code"}


def open_cell(name: str, cell: str) -> Any:
    """Return the value of a table cell: None, JSON, or text."""
    if not cell:
        return None
    if cell[0] not in "{[" or cell.rstrip()[-1:] not in ("}", "]") or has_too_many_values(cell):
        return cell
    try:
        value = orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    if name not in TEXT_COLUMNS:
        return value
    parts = value if isinstance(value, list) else [value]
    is_structure = parts and all(isinstance(p, dict) and _MARKS_OF_STRUCTURE & p.keys() for p in parts)
    return value if is_structure else cell


HEAD = struct.Struct("!cQI")
ROW = b"r"
LONG_ROW = b"l"  # the body is its length
LARGE_ROW = b"b"  # its values do not fit into the memory
BAD_TEXT = b"t"
BAD_VALUE = b"v"  # JSON has no form for it
DAMAGED = b"d"  # from here on, as all that follow
TOO_LARGE = b"m"
TOO_MANY_ROWS = b"n"  # the body is the number that the file claims
TOO_MUCH = b"s"
END = b"e"

_ROWS_AT_ONCE = 256
_READ_AHEAD = 1 << 20
_LEAST_ROWS = 100_000
_ROWS_PER_BYTE = 64

Frame = tuple[bytes, int, bytes]


def main() -> None:
    path, longest, memory, most = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    stop_with_parent()
    import pyarrow.parquet  # noqa: F401  # before the limit: its libraries are not part of what decoding takes

    _limit_memory(memory)
    out = sys.stdout.buffer
    sent = 0
    for frame in decode(path, longest=longest):
        sent += len(frame[2])
        if sent > most:
            _write(out, (TOO_MUCH, frame[1], b""))
            break
        _write(out, frame)
    _write(out, (END, 0, b""))
    out.flush()


def decode(path: Path, *, longest: int) -> Iterator[Frame]:
    """Yield the frames of all rows; whatever stops the decoder is the last one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = 0
    try:
        with (
            path.open("rb") as handle,
            pq.ParquetFile(handle, pre_buffer=False, buffer_size=_READ_AHEAD) as file,
        ):
            if file.metadata.num_rows > _LEAST_ROWS + _ROWS_PER_BYTE * path.stat().st_size:
                yield TOO_MANY_ROWS, 1, str(file.metadata.num_rows).encode()
                return
            for group in range(file.num_row_groups):
                for frame in _decode_group(file, group, first=done + 1, longest=longest):
                    yield frame
                    done += 1
    except MemoryError:
        yield TOO_LARGE, done + 1, b""
    except (pa.ArrowException, OSError, ValueError):
        # The library reports a damaged page as OSError, and damaged names as ValueError.
        yield DAMAGED, done + 1, b""


def _decode_group(file: "pq.ParquetFile", group: int, *, first: int, longest: int) -> Iterator[Frame]:
    """Decode a row group in large batches; where they do not fit into memory, the rest row by row."""
    done = 0
    for size in (_ROWS_AT_ONCE, 1):
        passed = 0
        try:
            for batch in file.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
                remaining = batch.slice(max(0, done - passed))
                passed += batch.num_rows
                for row in _take_rows(remaining):
                    yield _to_frame(row, number=first + done, longest=longest)
                    done += 1
        except MemoryError:
            if size == 1:
                raise
        else:
            return


def _take_rows(batch: "pa.RecordBatch") -> "Iterator[dict[str, Any] | bytes]":
    """Yield the rows of a batch; for a value that Python cannot hold, a kind of frame."""
    try:
        rows: list[dict[str, Any] | bytes] = batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError, MemoryError):
        rows = []
    if len(rows) == batch.num_rows:
        yield from rows
        return
    for index in range(batch.num_rows):
        try:
            row: dict[str, Any] | bytes = batch.slice(index, 1).to_pylist(maps_as_pydicts="lossy")[0]
        except (ValueError, OverflowError):
            row = BAD_TEXT
        except MemoryError:
            row = LARGE_ROW
        yield row


def _to_frame(row: "dict[str, Any] | bytes", *, number: int, longest: int) -> Frame:
    if isinstance(row, bytes):
        return row, number, b""
    try:
        opened = {
            name: open_cell(name, value) if isinstance(value, str) and value else value
            for name, value in row.items()
        }
        data = orjson.dumps(opened, default=_write_value, option=orjson.OPT_NON_STR_KEYS)
    except MemoryError:
        return LARGE_ROW, number, b""
    except TypeError:
        return BAD_VALUE, number, b""
    return (ROW, number, data) if len(data) <= longest else (LONG_ROW, number, str(len(data)).encode())


def _write_value(value: Any) -> Any:
    """Write what JSON has no type for: decimals and similar as text, bytes if they are text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError("bytes") from None
    return str(value)


def _write(out: BinaryIO, frame: Frame) -> None:
    kind, number, data = frame
    out.write(HEAD.pack(kind, number, len(data)))
    out.write(data)


def _limit_memory(most: int) -> None:
    """Limit memory beyond what is mapped now. Effective on Linux."""
    import resource

    mapped = 0
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + most
    if allowed != resource.RLIM_INFINITY:
        limit = min(limit, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
