"""Rows and drops of a dataset as keys of eight bytes, to compare millions of them in memory.

In: the folder of a dataset. Out: arrays with one entry a row, and one a drop by step. A key stands for
the id of a row, or for the line of a drop. Does not know what is compared with what.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from graftwork.files.dataset import scan_columns, scan_drops
from graftwork.records.dataset import Dataset, Split

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

SPLIT_CODES: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class RowKeys:
    """One entry a row, sorted by key: its split, its number there and a hash of what is trained on."""

    key: "NDArray[np.uint64]"
    split: "NDArray[np.uint8]"
    number: "NDArray[np.int64]"
    content: "NDArray[np.uint64]"


def read_row_keys(folder: Path, dataset: Dataset) -> RowKeys:
    import numpy as np

    keys, splits, numbers, contents = [], [], [], []
    for columns in scan_columns(folder, dataset, columns=("id", "tokens", "trained_from", "weight")):
        batch, size = columns.batch, columns.batch.num_rows
        keys.append(_hash_texts(batch.column("id").to_pylist()))
        splits.append(np.full(size, SPLIT_CODES.index(columns.split), dtype=np.uint8))
        numbers.append(np.arange(columns.first, columns.first + size, dtype=np.int64))
        contents.append(_hash_tokens(batch))
    if not keys:
        nothing = np.zeros(0, dtype=np.uint64)
        return RowKeys(nothing, nothing.astype(np.uint8), nothing.astype(np.int64), nothing)
    key = _tell_repeats_apart(np.concatenate(keys))
    order = np.argsort(key, kind="stable")
    return RowKeys(
        key[order],
        np.concatenate(splits)[order],
        np.concatenate(numbers)[order],
        np.concatenate(contents)[order],
    )


def _hash_texts(texts: list[str]) -> "NDArray[np.uint64]":
    import numpy as np

    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return np.frombuffer(digests, dtype=np.uint64)


def _hash_tokens(batch: "pa.RecordBatch") -> "NDArray[np.uint64]":
    """Of all that training sees of a row."""
    import numpy as np

    lists = batch.column("tokens")
    values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
    rest = zip(batch.column("trained_from").to_pylist(), batch.column("weight").to_pylist(), strict=True)
    digests = bytearray()
    for place, (trained_from, weight) in enumerate(rest):
        seen = hashlib.blake2b(f"{trained_from} {weight}\n".encode(), digest_size=8)
        seen.update(values[ends[place] : ends[place + 1]].tobytes())
        digests += seen.digest()
    return np.frombuffer(bytes(digests), dtype=np.uint64)


def _tell_repeats_apart(key: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Logs may use an id twice: the second row of an id gets a key of its own, and so on."""
    import numpy as np

    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(starts, len(ordered)))
    rank = np.arange(len(ordered)) - np.repeat(starts, sizes)
    told = np.empty_like(key)
    told[order] = ordered ^ (rank.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return told


def read_drop_keys(folder: Path, dataset: Dataset) -> "dict[str, NDArray[np.uint64]]":
    import numpy as np

    found: dict[str, list[str]] = {}
    keys: dict[str, list[NDArray[np.uint64]]] = {}
    for batch in scan_drops(folder, dataset, columns=("file", "line", "step")):
        found.clear()
        values = (batch.column(name).to_pylist() for name in ("file", "line", "step"))
        for file, line, step in zip(*values, strict=True):
            found.setdefault(step, []).append(f"{file}:{line}")
        for step, texts in found.items():
            keys.setdefault(step, []).append(_hash_texts(texts))
    return {step: _tell_repeats_apart(np.concatenate(parts)) for step, parts in keys.items()}
