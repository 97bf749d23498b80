"""The folder of a dataset: `manifest.json`, shards of rows per split, dropped rows.

Input: rows, or the folder of a dataset. Output: Parquet files, or rows and manifest that are proven to be the
ones that were prepared. Shared by the stage that writes it and those that read it; needs pyarrow only when
rows are touched.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import ValidationError

from graftwork.files.disk import explain_os_error, require_digest, write_atomic
from graftwork.records.base import Record, fingerprint
from graftwork.records.dataset import Dataset, Drop, Row, Shard, Split
from graftwork.records.errors import Corrupted
from graftwork.records.interaction import (
    CORRECTED_FIELDS,
    AnswerOrigin,
    CallUsage,
    CaptureOrigin,
    Message,
    Origin,
)

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

MANIFEST = "manifest.json"
DROPS = "drops.parquet"
ROWS_AT_ONCE = 512


def hash_manifest(dataset: Dataset) -> str:
    """The hash that names a dataset: of all its manifest says but the name itself."""
    return fingerprint(dataset.model_dump(mode="json", exclude={"content_hash"}))


def read_manifest(folder: Path) -> Dataset:
    path = folder / MANIFEST
    try:
        dataset = Dataset.from_json(path.read_bytes())
    except OSError as error:
        raise explain_os_error(error, path) from error
    except ValidationError as error:
        raise _damaged(path, "it is not a valid manifest") from error
    if hash_manifest(dataset) != dataset.content_hash:
        raise _damaged(path, "its content does not have the hash that it states")
    return dataset


def list_files(dataset: Dataset) -> Iterator[Shard]:
    """Every file that a manifest names, with its hash."""
    for summary in dataset.splits.values():
        yield from summary.shards
    if dataset.drops is not None:
        yield dataset.drops
    if dataset.packing is not None:
        packing = dataset.packing
        yield Shard(file=packing.file, rows=packing.sequences, sha256=packing.sha256)


def read_rows(folder: Path, split: Split) -> list[Row]:
    """The rows of one split, whole and unchanged, or an error."""
    return list(iterate_rows(folder, split))


def iterate_rows(folder: Path, split: Split) -> Iterator[Row]:
    """The rows of one split one after the other; each shard is checked before its first row."""
    summary = read_manifest(folder).splits.get(split)
    for shard in summary.shards if summary else ():
        for values in _iterate_values(folder, shard):
            try:
                yield row_from_values(values)
            except (ValidationError, ValueError, KeyError) as error:
                raise _damaged(folder / shard.file, "a row cannot be read") from error


def iterate_drops(folder: Path) -> Iterator[Drop]:
    """Every row that was left out, in the order of the logs."""
    shard = read_manifest(folder).drops
    for values in _iterate_values(folder, shard) if shard else ():
        origin = Origin(file=values["file"], line=values["line"])
        yield Drop(
            origin=origin, step=values["step"], reason=values["reason"], input_hash=values["input_hash"]
        )


OPTIONAL: dict[str, type[Record]] = {"capture": CaptureOrigin, "answered": AnswerOrigin, "usage": CallUsage}
"""Columns that a shard has only where one of its rows has a value, as JSON."""


def encode_optional(values: Mapping[str, Sequence[Record | None]]) -> dict[str, list[str | None]]:
    """The optional columns that hold anything."""
    return {
        name: [None if value is None else _encode_record(value) for value in values[name]]
        for name in OPTIONAL
        if any(value is not None for value in values[name])
    }


def _encode_record(record: Record) -> str:
    """Shards with captures that were not corrected keep their bytes."""
    unknown = {name for name in CORRECTED_FIELDS if getattr(record, name, "") is None}
    return record.model_dump_json(exclude=unknown)


def encode_messages(messages: Iterable[Message]) -> str:
    """The column `messages` of a row."""
    return orjson.dumps([{"role": turn.role, "content": turn.content} for turn in messages]).decode()


def row_schema(*, optional: Sequence[str] = ()) -> "pa.Schema":
    """The columns of a shard. Shards of logs without what is `optional` keep their bytes."""
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        [
            ("id", text),
            ("file", text),
            ("line", pa.int64()),
            ("input_hash", text),
            ("messages", text),
            ("reply", text),
            ("tokens", pa.list_(pa.int32())),
            ("trained_from", pa.int32()),
            ("group", text),
            ("domain", text),
            ("session", text),
            ("stage", pa.int32()),
            ("weight", pa.float64()),
            ("duration_ms", pa.float64()),
            ("rejected", text),
            ("reward", pa.float64()),
            *((name, text) for name in optional),
        ]
    )


def drops_table(drops: Iterable[Drop]) -> "pa.Table":
    import pyarrow as pa

    listed = list(drops)
    return pa.table(
        {
            "file": pa.array([drop.origin.file for drop in listed], pa.string()),
            "line": pa.array([drop.origin.line for drop in listed], pa.int64()),
            "input_hash": pa.array([drop.input_hash for drop in listed], pa.string()),
            "step": pa.array([drop.step for drop in listed], pa.string()),
            "reason": pa.array([drop.reason for drop in listed], pa.string()),
        }
    )


def write_table(path: Path, table: "pa.Table", *, durable: bool = True) -> None:
    """One Parquet file, whole or not at all. Tokens and text compress well and read fast in zstd."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", compression_level=1, row_group_size=ROWS_AT_ONCE * 4)
    write_atomic(path, sink.getvalue().to_pybytes(), durable=durable)


@contextmanager
def _open_shard(folder: Path, shard: Shard, *, otherwise: str) -> "Iterator[pq.ParquetFile]":
    """The file, once it has the bytes that the manifest names; `otherwise` is what is wrong with it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / shard.file
    require_digest(path, shard.sha256)
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except OSError as error:
        raise explain_os_error(error, path) from error
    except (pa.ArrowException, ValueError, KeyError) as error:
        raise _damaged(path, otherwise) from error


def _iterate_values(folder: Path, shard: Shard) -> Iterator[dict[str, Any]]:
    with _open_shard(folder, shard, otherwise="it does not read as Parquet") as file:
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
            yield from batch.to_pylist()


def row_from_values(values: dict[str, Any]) -> Row:
    """A row of the table as the record that it was made of."""
    optional = {name: values.pop(name, None) for name in OPTIONAL}
    return Row.model_validate(
        {name: None if text is None else OPTIONAL[name].from_json(text) for name, text in optional.items()}
        | {
            "origin": Origin(file=values.pop("file"), line=values.pop("line")),
            "messages": tuple(Message(**message) for message in orjson.loads(values.pop("messages"))),
            "tokens": tuple(values.pop("tokens")),
            **values,
        }
    )


def _damaged(path: Path, why: str) -> Corrupted:
    return Corrupted(
        f"{path.name} is damaged", why=why, fix="run `graft data prepare` again", where=str(path)
    )


BATCH = ROWS_AT_ONCE * 16


def scan_columns(
    folder: Path, dataset: Dataset, *, columns: Sequence[str], splits: Collection[Split] | None = None
) -> Iterator[tuple[Split, int, "pa.RecordBatch"]]:
    """The named columns of all rows, split by split, in the order of the rows; each batch with its split and
    the number of its first row there."""
    for split, summary in dataset.splits.items():
        if splits is not None and split not in splits:
            continue
        first = 0
        for shard in summary.shards:
            for batch in _scan_shard(folder, shard, columns=columns):
                yield split, first, batch
                first += batch.num_rows


def scan_drops(folder: Path, dataset: Dataset, *, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    """The named columns of the rows that were left out."""
    if dataset.drops is not None:
        yield from _scan_shard(folder, dataset.drops, columns=columns)


def fetch_rows(
    folder: Path, dataset: Dataset, *, places: Mapping[Split, Collection[int]]
) -> dict[tuple[Split, int], Row]:
    """The rows at these places. Only the parts of the shards that hold them are read."""
    rows: dict[tuple[Split, int], Row] = {}
    for split, numbers in places.items():
        first = 0
        for shard in dataset.splits[split].shards if split in dataset.splits else ():
            inside = sorted({number - first for number in numbers if first <= number < first + shard.rows})
            for number, row in _fetch_from_shard(folder, shard, numbers=inside):
                rows[split, first + number] = row
            first += shard.rows
    return rows


def _scan_shard(folder: Path, shard: Shard, *, columns: Sequence[str]) -> Iterator["pa.RecordBatch"]:
    with _open_shard(folder, shard, otherwise="it does not read as rows") as file:
        yield from file.iter_batches(batch_size=BATCH, columns=list(columns))


def _fetch_from_shard(folder: Path, shard: Shard, *, numbers: Sequence[int]) -> Iterator[tuple[int, Row]]:
    if not numbers:
        return
    import pyarrow as pa

    with _open_shard(folder, shard, otherwise="it does not read as rows") as file:
        first = 0
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).num_rows
            inside = [number for number in numbers if first <= number < first + size]
            if inside:
                indices = pa.array([number - first for number in inside])
                values: list[dict[str, Any]] = file.read_row_group(group).take(indices).to_pylist()
                for number, value in zip(inside, values, strict=True):
                    yield number, row_from_values(value)
            first += size
