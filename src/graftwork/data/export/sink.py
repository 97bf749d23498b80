"""Where an export's rows go: files that are written line by line, and a count of all that went in.

In: values, under the name of the file that they belong to. Out: files in a folder, and for each the
number of its rows; the rows that a format cannot hold, counted by reason. Knows no format.
"""

from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import orjson

from graftwork.data.export.parquet_shards import ParquetShards, TableSize
from graftwork.records.base import Record
from graftwork.records.dataset import Row
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    import pyarrow as pa

NAMED = 20


class LeftOut(Record):
    """Rows that the format cannot hold, and the first of them by name."""

    why: str
    rows: int
    first: tuple[Origin, ...]


class Sink:
    """A folder that is being filled. A file appears with its first row."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, int] = {}
        self.added = 0
        self.weighted = 0
        self._tables: dict[str, ParquetShards] = {}
        self._handles: dict[str, IO[bytes]] = {}
        self._left_out: dict[str, tuple[int, list[Origin]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles.values():
            handle.close()
        for shards in self._tables.values():
            shards.close()

    def add_line(self, name: str, value: dict[str, Any]) -> None:
        """One more row of a JSONL file."""
        self._handle(name).write(orjson.dumps(value) + b"\n")
        self._count(name)

    def add_item(self, name: str, value: dict[str, Any]) -> None:
        """One more item of a file that is a JSON array; `close_arrays` ends it."""
        self._handle(name).write((b",\n" if name in self.rows else b"[\n") + orjson.dumps(value))
        self._count(name)

    def close_arrays(self) -> None:
        for name, handle in self._handles.items():
            if name.endswith(".json"):
                handle.write(b"\n]\n")

    def add_record(self, stem: str, value: dict[str, Any], *, schema: "pa.Schema") -> None:
        """One more row of the Parquet files that are called `stem`; `close_tables` names them."""
        if stem not in self._tables:
            self._tables[stem] = ParquetShards(self.folder, stem, schema=schema)
        self._tables[stem].add(value)
        self.added += 1

    def close_tables(self) -> dict[str, TableSize]:
        """The size of each table, and from now on its files under their last names."""
        sizes = {}
        for stem, shards in self._tables.items():
            for name, rows in shards.finish():
                self.rows[name] = rows
            sizes[stem] = shards.size()
        return sizes

    def _count(self, name: str) -> None:
        self.rows[name] = self.rows.get(name, 0) + 1
        self.added += 1

    def leave_out(self, row: Row, *, why: str) -> None:
        rows, first = self._left_out.get(why, (0, []))
        self._left_out[why] = (rows + 1, [*first, row.origin] if len(first) < NAMED else first)

    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(
            LeftOut(why=why, rows=rows, first=tuple(first))
            for why, (rows, first) in sorted(self._left_out.items())
        )

    def _handle(self, name: str) -> IO[bytes]:
        if name not in self._handles:
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handles[name] = path.open("wb")
        return self._handles[name]
