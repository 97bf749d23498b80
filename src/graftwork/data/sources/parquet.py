"""Parquet: each row as a JSON object, its number as the line.

In: the path of a file, since the format is read from its end. Out: entries and flaws. Does not
know what a column means.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from graftwork.data.sources.block import Entry
from graftwork.data.sources.fault import Flaw, too_long
from graftwork.data.sources.table import open_cell

if TYPE_CHECKING:
    import pyarrow as pa

MAGIC = b"PAR1"
_ROWS_AT_ONCE = 256


def split_parquet(path: Path, *, longest: int) -> Iterator[Entry | Flaw]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 1
    with path.open("rb") as handle:
        try:
            with pq.ParquetFile(handle) as file:
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, use_threads=False):
                    for row in _take_rows(batch):
                        yield _to_entry(row, line=number, longest=longest)
                        number += 1
        except (pa.ArrowException, OSError, ValueError):
            # The library reports a damaged page as an error of the system, damaged names as one of text.
            yield Flaw(number, "parse_error", "the file is no sound Parquet from here on")


def _take_rows(batch: "pa.RecordBatch") -> Iterator[dict[str, Any] | None]:
    """The rows of a batch; None for one with a value that Python cannot hold."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        for place in range(batch.num_rows):
            try:
                yield batch.slice(place, 1).to_pylist()[0]
            except (ValueError, OverflowError):
                yield None


def _to_entry(row: dict[str, Any] | None, *, line: int, longest: int) -> Entry | Flaw:
    if row is None:
        return Flaw(line, "encoding", "a value of the row is no UTF-8, or beyond what can be read")
    opened = {
        name: open_cell(name, value) if isinstance(value, str) and value else value
        for name, value in row.items()
    }
    try:
        data = orjson.dumps(opened, default=_write_value)
    except TypeError:
        return Flaw(line, "schema", "the row holds a value that is neither text, number, list nor object")
    return Entry(line, data) if len(data) <= longest else too_long(line, len(data), longest=longest)


def _write_value(value: Any) -> Any:
    """What JSON has no word for: decimals and the like as text, bytes where they are text."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise TypeError("bytes") from None
    return str(value)
