"""Rendered blocks to the folder of one model's dataset.

In: the shards that the blocks were rendered to, the list of dropped rows, the head of the manifest.
Out: `out/<content_hash>`, which appears whole or not at all, and its manifest. Shards are linked,
not copied. `content_hash` covers the manifest, and through the hashes in it every row.
"""

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftwork.data.pack import pack
from graftwork.data.render import ShardMade
from graftwork.files.dataset import DROPS, MANIFEST, hash_manifest, list_files, read_manifest, write_table
from graftwork.files.disk import (
    atomic_folder,
    explain_os_error,
    file_digest,
    make_folder,
    require_digest,
    write_atomic,
)
from graftwork.records.dataset import SPLITS, Dataset, Packing, Shard, Split, SplitSummary
from graftwork.records.errors import Damaged, GraftError

if TYPE_CHECKING:
    import pyarrow as pa

PACKS = "packs.parquet"


class Placed(NamedTuple):
    """A shard, the folder that it was rendered into, and the question group of each of its rows."""

    shard: ShardMade
    folder: Path
    groups: "np.ndarray[Any, np.dtype[np.int64]]"


def assemble(
    head: Dataset, placed: Sequence[Placed], *, drops: Path, scratch: Path, out: Path, pack_tokens: int
) -> tuple[Dataset, Path]:
    """`head` is the manifest without what is known only now: the splits, the packing, its name."""
    by_split: dict[Split, list[Placed]] = {split: [] for split in SPLITS}
    for one in placed:
        by_split.setdefault(one.shard.split, []).append(one)
    names = {
        one.folder / one.shard.file: f"{split}/{number:05d}.parquet"
        for split, members in by_split.items()
        for number, one in enumerate(members)
    }
    packs, packing = _pack([one.shard for one in by_split["train"]], length=pack_tokens)
    packed = scratch / f"{head.model}.{PACKS}"
    write_table(packed, packs, durable=False)
    unnamed = head.model_copy(
        update={
            "splits": {split: _summarise(members, names) for split, members in by_split.items()},
            "packing": packing.model_copy(update={"sha256": file_digest(packed)}),
        }
    )
    dataset = unnamed.model_copy(update={"content_hash": hash_manifest(unnamed)})
    folder = out / dataset.content_hash
    _put_away_if_damaged(folder, dataset)
    with atomic_folder(folder) as whole:
        for source, name in {**names, drops: DROPS, packed: PACKS}.items():
            _link(source, whole / name)
        write_atomic(whole / MANIFEST, dataset.to_json())
    return dataset, folder


def _put_away_if_damaged(folder: Path, dataset: Dataset) -> None:
    """A folder of this name that does not hold what its name says makes room for the new one."""
    if not folder.exists():
        return
    try:
        if read_manifest(folder) != dataset:
            raise Damaged("its manifest is another one")
        for shard in list_files(dataset):
            require_digest(folder / shard.file, shard.sha256)
    except GraftError:
        aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def write_drops(path: Path, tables: Iterable["pa.Table"]) -> tuple[Shard, dict[str, int]]:
    """Every dropped row in one file, table by table; and how many each step dropped."""
    import pyarrow.parquet as pq

    counts: Counter[str] = Counter()
    writer = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            counts.update(table.column("step").to_pylist())
        if writer is not None:
            writer.close()
    except OSError as error:
        raise explain_os_error(error, path) from error
    return Shard(file=DROPS, rows=counts.total(), sha256=file_digest(path)), dict(counts)


def _summarise(placed: Sequence[Placed], names: Mapping[Path, str]) -> SplitSummary:
    lengths: Counter[int] = Counter()
    for one in placed:
        lengths.update(one.shard.lengths.tolist())
    groups = np.unique(np.concatenate([one.groups for one in placed])) if placed else ()
    return SplitSummary(
        rows=lengths.total(),
        groups=len(groups),
        tokens=sum(length * rows for length, rows in lengths.items()),
        trained_tokens=sum(one.shard.trained_tokens for one in placed),
        longest=max(lengths, default=0),
        shards=tuple(
            Shard(
                file=names[one.folder / one.shard.file],
                rows=len(one.shard.lengths),
                sha256=one.shard.sha256,
            )
            for one in placed
        ),
        lengths=dict(sorted(lengths.items())),
    )


def _pack(shards: Sequence[ShardMade], *, length: int) -> tuple["pa.Table", Packing]:
    """Which training rows, by their numbers in the split, share a sequence."""
    import pyarrow as pa

    lengths = np.concatenate([shard.lengths for shard in shards] or [np.zeros(0, dtype=np.int32)])
    packed = pack(lengths, length=length)
    rows = pa.ListArray.from_arrays(
        pa.array(packed.boundaries, pa.int32()), pa.array(packed.order, pa.int32())
    )
    sequences = packed.sequences
    room = sequences * length
    fill = round(int(lengths.sum()) / room, 4) if room else 0.0
    packing = Packing(length=length, sequences=sequences, fill=fill, file=PACKS, sha256="")
    return pa.table({"rows": rows}), packing


def _link(source: Path, target: Path) -> None:
    """The same file under a second name; a copy where the disk knows no links."""
    make_folder(target.parent)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
