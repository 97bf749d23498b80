"""Columns of numbers over all rows, kept from one run to the next.

In: the blocks or segments that a column is made of, and a function that reads one of them. Out: the column as
an array. What the last run read is taken from a file per column as far as the parts are the same, so that a
log which has grown costs its new blocks alone. A damaged file is read again from the blocks.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from graftwork.files.disk import write_atomic

PartKey = tuple[str, int, int]
"""The feature file, whose name is that of its content, and the rows of it."""
INDEX = "index.json"


class KeptColumn(NamedTuple):
    """All values, and how many there are of each part."""

    values: "np.ndarray[Any, Any]"
    sizes: list[int]


class ColumnCache:
    """Files are replaced, never changed: another process may read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = _read_index(folder / INDEX)
        self._changed = False

    def get(
        self, name: str, parts: Sequence[PartKey], read: Callable[[int], "np.ndarray[Any, Any]"]
    ) -> KeptColumn:
        """The column of these parts; `read` gives that of the part of this number."""
        asked = [list(part) for part in parts]
        kept = self._kept(name, asked)
        if len(kept.sizes) == len(asked):
            return kept
        new = [read(number) for number in range(len(kept.sizes), len(asked))]
        values = np.concatenate([kept.values, *new] if kept.sizes else new)
        whole = KeptColumn(values, [*kept.sizes, *map(len, new)])
        data = values.tobytes()
        write_atomic(self._folder / f"{name}.bin", data, durable=False)
        self._index[name] = {
            "dtype": values.dtype.str,
            "crc": zlib.crc32(data),
            "parts": asked,
            "sizes": whole.sizes,
        }
        self._changed = True
        return whole

    def labels(
        self,
        name: str,
        parts: Sequence[PartKey],
        read: Callable[[int], tuple["np.ndarray[Any, Any]", list[str]]],
    ) -> tuple["np.ndarray[Any, np.dtype[np.int32]]", list[str]]:
        """A column of names as numbers in the order in which they first occur, and the names."""
        key = f"{name}.labels"
        kept = self._kept(key, [list(part) for part in parts]).values
        last = int(kept.max()) + 1 if len(kept) else 0
        # Those of parts that are no longer there come last, and are left out.
        known = {label: number for number, label in enumerate(self._names(key)[:last])}

        def number_part(number: int) -> "np.ndarray[Any, Any]":
            numbers, names = read(number)
            lookup = [known.setdefault(label, len(known)) for label in names]
            coded: np.ndarray[Any, Any] = np.array([*lookup, -1], dtype=np.int32)[numbers]
            return coded

        column = self.get(key, parts, number_part)
        if self._index[key].get("names") != list(known):
            self._index[key]["names"] = list(known)
            self._changed = True
        return column.values.astype(np.int32, copy=False), list(known)

    def _names(self, key: str) -> list[str]:
        names: list[str] = self._index.get(key, {}).get("names", [])
        return names

    def save(self) -> None:
        """Write which parts the files cover."""
        if self._changed:
            write_atomic(self._folder / INDEX, orjson.dumps(self._index), durable=False)
            self._changed = False

    def _kept(self, name: str, asked: list[list[Any]]) -> KeptColumn:
        """What the file has of the first parts; nothing if it is damaged."""
        none = KeptColumn(np.zeros(0, dtype=np.uint64), [])
        try:
            entry = self._index[name]
            same = 0
            for old, new in zip(entry["parts"], asked, strict=False):
                if old != new:
                    break
                same += 1
            sizes = entry["sizes"][:same]
            if not same:
                return none
            values = np.fromfile(self._folder / f"{name}.bin", dtype=np.dtype(entry["dtype"]))
            if zlib.crc32(values.data) != entry["crc"] or len(values) != sum(entry["sizes"]):
                return none
        except (KeyError, OSError, TypeError, ValueError):
            return none
        return KeptColumn(values[: sum(sizes)], sizes)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
