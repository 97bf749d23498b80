"""Rows to Parquet files of a bounded size, one after the other.

In: rows as dictionaries, and a schema. Out: `stem-00000-of-00003.parquet` and so on; how many there
are is known at the end, when they get their names.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ROWS_AT_ONCE = 1024
ROWS_A_FILE = 200_000


class TableSize(NamedTuple):
    """`in_memory` is what the rows take as Arrow, `on_disk` what the files take."""

    rows: int
    in_memory: int
    on_disk: int


class ParquetShards:
    """One table that is being written."""

    def __init__(
        self, folder: Path, stem: str, *, schema: "pa.Schema", rows_a_file: int = ROWS_A_FILE
    ) -> None:
        self._folder = folder
        self._stem = stem
        self._schema = schema
        self._rows_a_file = rows_a_file
        self._waiting: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[int] = []
        self._in_memory = 0
        self._on_disk = 0

    def add(self, value: dict[str, Any]) -> None:
        self._waiting.append(value)
        if len(self._waiting) >= min(ROWS_AT_ONCE, self._rows_a_file):
            self._flush()

    def finish(self) -> list[tuple[str, int]]:
        """The last rows, and the files by their last names with their rows."""
        self._flush()
        self.close()
        named = []
        for number, rows in enumerate(self._rows):
            name = f"{self._stem}-{number:05d}-of-{len(self._rows):05d}.parquet"
            path = self._path(number).replace(self._folder / name)
            self._on_disk += path.stat().st_size
            named.append((name, rows))
        return named

    def size(self) -> TableSize:
        return TableSize(sum(self._rows), self._in_memory, self._on_disk)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.Table.from_pylist(self._waiting, schema=self._schema)
        self._waiting = []
        if self._rows and self._rows[-1] >= self._rows_a_file:
            self.close()
        if self._writer is None:
            path = self._path(len(self._rows))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
            self._rows.append(0)
        self._writer.write_table(table)
        self._rows[-1] += table.num_rows
        self._in_memory += table.nbytes

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:05d}.parquet"
