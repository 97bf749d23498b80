"""Single columns and single rows of a dataset, without reading the rest.

In: the folder of a dataset. Out: columns batch by batch, or the rows at given places. A row's number
is its place in its split, counted from 0 in the order of the shards. Every shard that is touched is
proven to be the one that was prepared. Does not know what the rows are wanted for.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.files.dataset_folder import ROWS_AT_ONCE, row_from_values
from graftwork.files.digest import require_digest
from graftwork.files.whole import explain_os_error
from graftwork.records.dataset import Dataset, Row, Shard, Split
from graftwork.records.errors import Damaged

if TYPE_CHECKING:
    import pyarrow as pa

BATCH = ROWS_AT_ONCE * 16


class Columns(NamedTuple):
    """Some columns of consecutive rows; `first` is the number of the first of them."""

    split: Split
    first: int
    batch: "pa.RecordBatch"


def scan_columns(
    folder: Path, dataset: Dataset, *, columns: Sequence[str], splits: Collection[Split] | None = None
) -> Iterator[Columns]:
    """The named columns of all rows, split by split, in the order of the rows."""
    for split, summary in dataset.splits.items():
        if splits is not None and split not in splits:
            continue
        first = 0
        for shard in summary.shards:
            for batch in _scan_shard(folder, shard, columns=columns):
                yield Columns(split, first, batch)
                first += batch.num_rows


def scan_drops(folder: Path, dataset: Dataset, *, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """The named columns of the rows that were left out."""
    if dataset.drops is not None:
        yield from _scan_shard(folder, dataset.drops, columns=columns)


def fetch_rows(
    folder: Path, dataset: Dataset, *, places: Mapping[Split, Collection[int]]
) -> dict[tuple[Split, int], Row]:
    """The rows at these places. Only the parts of the shards that hold them are read."""
    found: dict[tuple[Split, int], Row] = {}
    for split, numbers in places.items():
        first = 0
        for shard in dataset.splits[split].shards if split in dataset.splits else ():
            inside = sorted({number - first for number in numbers if first <= number < first + shard.rows})
            for number, row in _fetch_from_shard(folder, shard, numbers=inside):
                found[split, first + number] = row
            first += shard.rows
    return found


def _scan_shard(folder: Path, shard: Shard, *, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / shard.file
    require_digest(path, shard.sha256)
    try:
        with pq.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH, columns=list(columns))
    except OSError as error:
        raise explain_os_error(error, path) from error
    except pa.ArrowException as error:
        raise _damaged(path) from error


def _fetch_from_shard(folder: Path, shard: Shard, *, numbers: Sequence[int]) -> Iterator[tuple[int, Row]]:
    if not numbers:
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / shard.file
    require_digest(path, shard.sha256)
    try:
        with pq.ParquetFile(path) as file:
            first = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                inside = [number for number in numbers if first <= number < first + size]
                if inside:
                    wanted = pa.array([number - first for number in inside])
                    values: list[dict[str, Any]] = file.read_row_group(group).take(wanted).to_pylist()
                    for number, value in zip(inside, values, strict=True):
                        yield number, row_from_values(value)
                first += size
    except OSError as error:
        raise explain_os_error(error, path) from error
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise _damaged(path) from error


def _damaged(path: Path) -> Damaged:
    return Damaged(
        f"{path.name} is damaged",
        why="it does not read as rows",
        fix="run `graft data prepare` again",
        where=str(path),
    )
