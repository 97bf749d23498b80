"""Compares two datasets: settings, base, inputs, rows, drops and tokens that differ.

In: the folders of two datasets. Out: a `DatasetDiff`. Rows are identified by their id; only eight bytes per
row are in memory, so that datasets of millions of rows can be compared.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Split
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


SPLIT_CODES: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True)
class RowKeys:
    """One entry per row, sorted by key: its split, its number there and a hash of what is trained on."""

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
    key = _number_repeated_keys(np.concatenate(keys))
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
    """Hash everything that training sees of a row."""
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


def _number_repeated_keys(key: "NDArray[np.uint64]") -> "NDArray[np.uint64]":
    """Logs may use an id twice: repeated ids get keys of their own."""
    import numpy as np

    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    sizes = np.diff(np.append(starts, len(ordered)))
    rank = np.arange(len(ordered)) - np.repeat(starts, sizes)
    distinct = np.empty_like(key)
    distinct[order] = ordered ^ (rank.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return distinct


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
    return {step: _number_repeated_keys(np.concatenate(parts)) for step, parts in keys.items()}


NAMED = 20
"""Rows named per kind; the rest is counted."""
NOWHERE = 255
"""The code for no split."""


class ValueChange(Record):
    """A value that differs; None where it is missing."""

    key: str
    before: Any
    after: Any


class NamedRow(Record):
    """A row, with its split before and after."""

    id: str
    origin: Origin
    before: Split | None
    after: Split | None


class RowChanges(Record):
    """`changed` rows are in the same split and rendered differently. The first of each kind are named."""

    same: int
    added: int
    removed: int
    moved: int
    changed: int
    named: dict[str, tuple[NamedRow, ...]] = {}


class InputChanges(Record):
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


class DropChanges(Record):
    """The drops of one step."""

    before: int
    after: int
    appeared: int
    vanished: int


class SplitTotals(Record):
    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0


class SplitChange(Record):
    before: SplitTotals
    after: SplitTotals


class DatasetDiff(Record):
    before: str
    after: str
    same: bool
    made_for: tuple[ValueChange, ...]
    settings: tuple[ValueChange, ...]
    inputs: InputChanges
    rows: RowChanges
    drops: dict[str, DropChanges]
    splits: dict[Split, SplitChange]


def diff_datasets(before: Path, after: Path) -> DatasetDiff:
    old, new = read_manifest(before), read_manifest(after)
    return DatasetDiff(
        before=old.content_hash,
        after=new.content_hash,
        same=old.content_hash == new.content_hash,
        made_for=_diff_values(_made_for(old), _made_for(new)),
        settings=_diff_values(dict(_flatten(old.settings)), dict(_flatten(new.settings))),
        inputs=_diff_inputs(old, new),
        rows=_diff_rows(before, old, after, new),
        drops=_diff_drops(before, old, after, new),
        splits={
            split: SplitChange(before=_totals(old, split), after=_totals(new, split))
            for split in SPLIT_CODES
            if split in old.splits or split in new.splits
        },
    )


def _made_for(dataset: Dataset) -> dict[str, Any]:
    keys = ("model", "base", "base_fingerprint", "template_fingerprint", "tokenizer_fingerprint")
    return {key: getattr(dataset, key) for key in keys}


def _flatten(value: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten nested settings to dotted keys."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def _diff_values(before: dict[str, Any], after: dict[str, Any]) -> tuple[ValueChange, ...]:
    return tuple(
        ValueChange(key=key, before=before.get(key), after=after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def _diff_inputs(before: Dataset, after: Dataset) -> InputChanges:
    old = {file.file: file.sha256 for file in before.inputs}
    new = {file.file: file.sha256 for file in after.inputs}
    return InputChanges(
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(sorted(file for file in old.keys() & new.keys() if old[file] != new[file])),
    )


def _totals(dataset: Dataset, split: Split) -> SplitTotals:
    summary = dataset.splits.get(split)
    if summary is None:
        return SplitTotals()
    return SplitTotals(rows=summary.rows, tokens=summary.tokens, trained_tokens=summary.trained_tokens)


def _diff_rows(before: Path, old: Dataset, after: Path, new: Dataset) -> RowChanges:
    import numpy as np

    was, now = read_row_keys(before, old), read_row_keys(after, new)
    _, in_was, in_now = np.intersect1d(was.key, now.key, assume_unique=True, return_indices=True)
    has_moved = was.split[in_was] != now.split[in_now]
    has_changed = ~has_moved & (was.content[in_was] != now.content[in_now])
    is_removed = np.ones(len(was.key), dtype=bool)
    is_removed[in_was] = False
    is_added = np.ones(len(now.key), dtype=bool)
    is_added[in_now] = False
    stood = np.full(len(now.key), NOWHERE, dtype=np.uint8)
    stood[in_now] = was.split[in_was]
    gone = np.full(len(was.key), NOWHERE, dtype=np.uint8)
    named = {
        "moved": _name(after, new, now, in_now[has_moved], before=stood, after=now.split),
        "changed": _name(after, new, now, in_now[has_changed], before=stood, after=now.split),
        "added": _name(after, new, now, np.flatnonzero(is_added), before=stood, after=now.split),
        "removed": _name(before, old, was, np.flatnonzero(is_removed), before=was.split, after=gone),
    }
    return RowChanges(
        same=int(len(in_was) - has_moved.sum() - has_changed.sum()),
        added=int(is_added.sum()),
        removed=int(is_removed.sum()),
        moved=int(has_moved.sum()),
        changed=int(has_changed.sum()),
        named={kind: rows for kind, rows in named.items() if rows},
    )


def _name(
    folder: Path,
    dataset: Dataset,
    keys: RowKeys,
    places: "NDArray[np.int64]",
    *,
    before: "NDArray[np.uint8]",
    after: "NDArray[np.uint8]",
) -> tuple[NamedRow, ...]:
    """Read id and origin of the first of these rows from their dataset."""
    import numpy as np

    first = places[np.lexsort((keys.number[places], keys.split[places]))][:NAMED]
    stand = [(SPLIT_CODES[keys.split[place]], int(keys.number[place])) for place in first]
    wanted: dict[Split, list[int]] = {}
    for split, number in stand:
        wanted.setdefault(split, []).append(number)
    rows = fetch_rows(folder, dataset, places=wanted)
    return tuple(
        NamedRow(
            id=rows[at].id, origin=rows[at].origin, before=_split(before[place]), after=_split(after[place])
        )
        for at, place in zip(stand, first, strict=True)
    )


def _split(code: "np.uint8") -> Split | None:
    return None if code == NOWHERE else SPLIT_CODES[code]


def _diff_drops(before: Path, old: Dataset, after: Path, new: Dataset) -> dict[str, DropChanges]:
    import numpy as np

    was, now = read_drop_keys(before, old), read_drop_keys(after, new)
    nothing = np.zeros(0, dtype=np.uint64)
    return {
        step: DropChanges(
            before=len(was.get(step, nothing)),
            after=len(now.get(step, nothing)),
            appeared=len(np.setdiff1d(now.get(step, nothing), was.get(step, nothing), assume_unique=True)),
            vanished=len(np.setdiff1d(was.get(step, nothing), now.get(step, nothing), assume_unique=True)),
        )
        for step in dict.fromkeys((*was, *now))
    }
