"""Compares two datasets: settings, base, inputs, rows, drops and tokens that differ.

In: the folders of two datasets. Out: a `DatasetDiff`. Rows are identified by their id; of each row its split,
its number there and a hash of what is trained on are in memory.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from graftwork.files.dataset import fetch_rows, read_manifest, scan_columns, scan_drops
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Split
from graftwork.records.interaction import Origin

SPLITS: tuple[Split, ...] = get_args(Split)
RowKey = tuple[str, int]
"""The id, and which row with this id it is: logs may use one twice."""


class SeenRow(NamedTuple):
    split: Split
    number: int
    content: bytes


def read_row_keys(folder: Path, dataset: Dataset) -> dict[RowKey, SeenRow]:
    rows: dict[RowKey, SeenRow] = {}
    repeats: Counter[str] = Counter()
    names = ("id", "tokens", "trained_from", "weight")
    for split, first, batch in scan_columns(folder, dataset, columns=names):
        lists = batch.column("tokens")
        values, ends = lists.values.to_numpy(), lists.offsets.to_numpy()
        rest = (batch.column(name).to_pylist() for name in ("id", "trained_from", "weight"))
        for place, (row_id, trained_from, weight) in enumerate(zip(*rest, strict=True)):
            seen = hashlib.blake2b(f"{trained_from} {weight}\n".encode(), digest_size=8)
            seen.update(values[ends[place] : ends[place + 1]].tobytes())
            rows[row_id, repeats[row_id]] = SeenRow(split, first + place, seen.digest())
            repeats[row_id] += 1
    return rows


def read_drops(folder: Path, dataset: Dataset) -> dict[str, Counter[tuple[str, int]]]:
    """The dropped lines by the step that drops them."""
    drops: dict[str, Counter[tuple[str, int]]] = {}
    for batch in scan_drops(folder, dataset, columns=("file", "line", "step")):
        values = (batch.column(name).to_pylist() for name in ("file", "line", "step"))
        for file, line, step in zip(*values, strict=True):
            drops.setdefault(step, Counter())[file, line] += 1
    return drops


NAMED = 20
"""Rows named per kind; the rest is counted."""


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


_MADE_FOR = ("model", "base", "base_fingerprint", "template_fingerprint", "tokenizer_fingerprint")


def diff_datasets(before: Path, after: Path) -> DatasetDiff:
    old, new = read_manifest(before), read_manifest(after)
    old_files, new_files = ({file.file: file.sha256 for file in dataset.inputs} for dataset in (old, new))
    old_drops, new_drops = read_drops(before, old), read_drops(after, new)
    nothing: Counter[tuple[str, int]] = Counter()
    drops = {}
    for step in dict.fromkeys((*old_drops, *new_drops)):
        was, now = old_drops.get(step, nothing), new_drops.get(step, nothing)
        drops[step] = DropChanges(
            before=was.total(),
            after=now.total(),
            appeared=(now - was).total(),
            vanished=(was - now).total(),
        )
    return DatasetDiff(
        before=old.content_hash,
        after=new.content_hash,
        same=old.content_hash == new.content_hash,
        made_for=_diff_values(*({key: getattr(dataset, key) for key in _MADE_FOR} for dataset in (old, new))),
        settings=_diff_values(dict(_flatten(old.settings)), dict(_flatten(new.settings))),
        inputs=InputChanges(
            added=tuple(sorted(new_files.keys() - old_files.keys())),
            removed=tuple(sorted(old_files.keys() - new_files.keys())),
            changed=tuple(
                sorted(
                    file for file in old_files.keys() & new_files.keys() if old_files[file] != new_files[file]
                )
            ),
        ),
        rows=_diff_rows(before, old, after, new),
        drops=drops,
        splits={
            split: SplitChange(before=_totals(old, split), after=_totals(new, split))
            for split in SPLITS
            if split in old.splits or split in new.splits
        },
    )


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


def _totals(dataset: Dataset, split: Split) -> SplitTotals:
    summary = dataset.splits.get(split)
    if summary is None:
        return SplitTotals()
    return SplitTotals(rows=summary.rows, tokens=summary.tokens, trained_tokens=summary.trained_tokens)


def _diff_rows(before: Path, old: Dataset, after: Path, new: Dataset) -> RowChanges:
    was, now = read_row_keys(before, old), read_row_keys(after, new)
    common = [key for key in now if key in was]
    moved = [key for key in common if was[key].split != now[key].split]
    changed = [
        key for key in common if was[key].split == now[key].split and was[key].content != now[key].content
    ]
    added, removed = [key for key in now if key not in was], [key for key in was if key not in now]
    named = {
        "moved": _name(after, new, moved, now, was=was, now=now),
        "changed": _name(after, new, changed, now, was=was, now=now),
        "added": _name(after, new, added, now, was=was, now=now),
        "removed": _name(before, old, removed, was, was=was, now=now),
    }
    return RowChanges(
        same=len(common) - len(moved) - len(changed),
        added=len(added),
        removed=len(removed),
        moved=len(moved),
        changed=len(changed),
        named={kind: rows for kind, rows in named.items() if rows},
    )


def _name(
    folder: Path,
    dataset: Dataset,
    keys: Sequence[RowKey],
    stand: dict[RowKey, SeenRow],
    *,
    was: dict[RowKey, SeenRow],
    now: dict[RowKey, SeenRow],
) -> tuple[NamedRow, ...]:
    """Read id and origin of the first of these rows from their dataset, where they `stand`."""
    first = sorted(keys, key=lambda key: (SPLITS.index(stand[key].split), stand[key].number))[:NAMED]
    wanted: dict[Split, list[int]] = {}
    for key in first:
        wanted.setdefault(stand[key].split, []).append(stand[key].number)
    rows = fetch_rows(folder, dataset, places=wanted)
    named = []
    for key in first:
        row = rows[stand[key].split, stand[key].number]
        before, after = (seen[key].split if key in seen else None for seen in (was, now))
        named.append(NamedRow(id=row.id, origin=row.origin, before=before, after=after))
    return tuple(named)
