"""The process that decodes one Parquet file, under a limit on its memory.

In, as arguments: a path, the bytes that one row may have, the memory that decoding may take, the bytes that
all rows may have. Out, on standard output: frames, each a head (`HEAD`: kind, number of the row, length) and
a body; a row is JSON on one line. The last frame is of the kind `END`: without it the process has died.

A process of its own, since nothing else bounds what the format can do: a page of a hundred bytes decodes to
gigabytes by its encoding alone, sizes in its footer are only claims, and the decoder is native code.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from graftwork.data.sources.cell import open_cell
from graftwork.process.worker import stop_with_parent

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

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
_ROWS_A_BYTE = 64

Frame = tuple[bytes, int, bytes]


def main() -> None:
    path, longest, memory, most = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    stop_with_parent()
    import pyarrow.parquet  # noqa: F401  # before the limit: its libraries are no part of what decoding takes

    _limit_memory(memory)
    out = sys.stdout.buffer
    given = 0
    for frame in decode(path, longest=longest):
        given += len(frame[2])
        if given > most:
            _write(out, (TOO_MUCH, frame[1], b""))
            break
        _write(out, frame)
    _write(out, (END, 0, b""))
    out.flush()


def decode(path: Path, *, longest: int) -> Iterator[Frame]:
    """The frames of all rows; what stops the decoder is the last of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done = 0
    try:
        with (
            path.open("rb") as handle,
            pq.ParquetFile(handle, pre_buffer=False, buffer_size=_READ_AHEAD) as file,
        ):
            if file.metadata.num_rows > _LEAST_ROWS + _ROWS_A_BYTE * path.stat().st_size:
                yield TOO_MANY_ROWS, 1, str(file.metadata.num_rows).encode()
                return
            for group in range(file.num_row_groups):
                for frame in _decode_group(file, group, first=done + 1, longest=longest):
                    yield frame
                    done += 1
    except MemoryError:
        yield TOO_LARGE, done + 1, b""
    except (pa.ArrowException, OSError, ValueError):
        # The library reports a damaged page as an error of the system, damaged names as one of text.
        yield DAMAGED, done + 1, b""


def _decode_group(file: "pq.ParquetFile", group: int, *, first: int, longest: int) -> Iterator[Frame]:
    """A row group in batches of many rows; where they do not fit into memory, the rest row by row."""
    done = 0
    for size in (_ROWS_AT_ONCE, 1):
        passed = 0
        try:
            for batch in file.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
                left = batch.slice(max(0, done - passed))
                passed += batch.num_rows
                for row in _take_rows(left):
                    yield _to_frame(row, number=first + done, longest=longest)
                    done += 1
        except MemoryError:
            if size == 1:
                raise
        else:
            return


def _take_rows(batch: "pa.RecordBatch") -> "Iterator[dict[str, Any] | bytes]":
    """The rows of a batch; a kind of frame for one with a value that Python cannot hold."""
    try:
        rows: list[dict[str, Any] | bytes] = batch.to_pylist()
    except (ValueError, OverflowError, MemoryError):
        rows = []
    if len(rows) == batch.num_rows:
        yield from rows
        return
    for place in range(batch.num_rows):
        try:
            row: dict[str, Any] | bytes = batch.slice(place, 1).to_pylist()[0]
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
        data = orjson.dumps(opened, default=_write_value)
    except MemoryError:
        return LARGE_ROW, number, b""
    except TypeError:
        return BAD_VALUE, number, b""
    return (ROW, number, data) if len(data) <= longest else (LONG_ROW, number, str(len(data)).encode())


def _write_value(value: Any) -> Any:
    """What JSON has no word for: decimals and the like as text, bytes where they are text."""
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
    """Beyond what is mapped now. Not every system keeps to it; Linux does."""
    import resource

    mapped = 0
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    wanted = mapped + most
    if allowed != resource.RLIM_INFINITY:
        wanted = min(wanted, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, wanted))


if __name__ == "__main__":
    main()
