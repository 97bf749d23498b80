"""Datasets of the same log for several bases, cut to the rows that all of them hold.

Input: dataset folders. Output: the same folders, or new ones without the rows that another base's tokenizer
or template refuses or shortens. Splits do not depend on the base, so what is left is the same in each.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from graftwork.data.render.dataset import PlacedShard, assemble
from graftwork.data.render.rows import RenderedShard
from graftwork.files.dataset import DROPS, read_manifest, scan_columns, write_table
from graftwork.files.disk import file_digest
from graftwork.records.dataset import Dataset, Split

RowKey = tuple[str, str, str]
"""The id, the messages and the reply of a row: a row that was shortened is another one."""
KEY = ("id", "messages", "reply")


def cut_to_common(folders: Sequence[Path], *, out: Path) -> list[tuple[Dataset, Path]]:
    """The dataset of each folder with the common rows, in their order; new ones are written below `out`."""
    datasets = [read_manifest(folder) for folder in folders]
    keys = [_read_keys(folder, dataset) for folder, dataset in zip(folders, datasets, strict=True)]
    common = {
        split: set.intersection(*(by_split.get(split, set()) for by_split in keys)) for split in keys[0]
    }
    return [
        (dataset, folder) if by_split == common else _cut(folder, dataset, common, out=out)
        for folder, dataset, by_split in zip(folders, datasets, keys, strict=True)
    ]


def _read_keys(folder: Path, dataset: Dataset) -> dict[Split, set[RowKey]]:
    keys: dict[Split, set[RowKey]] = {}
    for split, _, batch in scan_columns(folder, dataset, columns=KEY):
        keys.setdefault(split, set()).update(
            zip(*(batch.column(name).to_pylist() for name in KEY), strict=True)
        )
    return keys


def _cut(
    folder: Path, dataset: Dataset, common: Mapping[Split, Collection[RowKey]], *, out: Path
) -> tuple[Dataset, Path]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with TemporaryDirectory(dir=out, prefix=".part-") as scratch:
        placed = []
        for split, summary in dataset.splits.items():
            for number, shard in enumerate(summary.shards):
                table = pq.read_table(folder / shard.file)
                rows = zip(*(table.column(name).to_pylist() for name in KEY), strict=True)
                table = table.filter(pa.array([row in common.get(split, ()) for row in rows], pa.bool_()))
                if not table.num_rows:
                    continue
                path = Path(scratch) / f"{split}-{number:05d}.parquet"
                write_table(path, table, durable=False)
                lengths = np.array([len(tokens) for tokens in table.column("tokens").to_pylist()], np.int32)
                untrained = sum(table.column("trained_from").to_pylist())
                rendered = RenderedShard(
                    model=dataset.model,
                    split=split,
                    file=path.name,
                    sha256=file_digest(path),
                    trained_tokens=int(lengths.sum()) - untrained,
                    lengths=lengths,
                    numbers=np.arange(table.num_rows),
                )
                # The question groups are not in the files: rows that ask the same count as one.
                groups = [hash(messages) for messages in table.column("messages").to_pylist()]
                placed.append(PlacedShard(rendered, Path(scratch), np.array(groups, np.int64)))
        left = sum(len(entry.shard.lengths) for entry in placed)
        head = dataset.model_copy(
            update={
                "content_hash": "",
                "splits": {},
                "packing": None,
                "kept_after": {**dataset.kept_after, "other bases": left},
            }
        )
        return assemble(
            head,
            placed,
            drops=folder / DROPS,
            scratch=Path(scratch),
            out=out,
            pack_tokens=dataset.packing.length
            if dataset.packing is not None
            else dataset.splits["train"].longest,
        )
