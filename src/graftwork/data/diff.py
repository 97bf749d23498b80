"""What differs between two datasets.

In: the folders of two datasets. Out: settings, base, inputs, rows, drops and tokens that differ. Rows
are told apart by their id; only a key of eight bytes a row is held in memory, so that two datasets of
millions of rows can be compared. Does not know which of the two is better.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.data.row_keys import SPLIT_CODES, RowKeys, read_drop_keys, read_row_keys
from graftwork.files.dataset import fetch_rows, read_manifest
from graftwork.records.base import Record
from graftwork.records.dataset import Dataset, Split
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NAMED = 20
"""So many rows of a kind are named; the rest is counted."""
NOWHERE = 255
"""The code of no split."""


class Change(Record):
    """A value that differs; None where it is missing."""

    key: str
    before: Any
    after: Any


class NamedRow(Record):
    """A row by name, with the split that it stands in before and after."""

    id: str
    origin: Origin
    before: Split | None
    after: Split | None


class RowChanges(Record):
    """`changed` rows stand where they stood and are rendered otherwise. The first of each are named."""

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
    made_for: tuple[Change, ...]
    settings: tuple[Change, ...]
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
    """Nested settings by dotted keys."""
    for key, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from _flatten(inner, f"{path}{key}.")
        else:
            yield f"{path}{key}", inner


def _diff_values(before: dict[str, Any], after: dict[str, Any]) -> tuple[Change, ...]:
    return tuple(
        Change(key=key, before=before.get(key), after=after.get(key))
        for key in dict.fromkeys((*before, *after))
        if before.get(key) != after.get(key)
    )


def _diff_inputs(before: Dataset, after: Dataset) -> InputChanges:
    old = {one.file: one.sha256 for one in before.inputs}
    new = {one.file: one.sha256 for one in after.inputs}
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
    """The first of these rows by id and origin, fetched from the folder that holds them."""
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
