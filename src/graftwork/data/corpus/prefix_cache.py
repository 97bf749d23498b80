"""Arrays that only the first rows of the corpus determine, kept from one run to the next.

In: the name of what is computed, how many rows it depends on, and the function that computes it. Out: arrays.
A log that has grown has the same first rows: their weights and pairs are read instead of computed. A digest
of these rows is stored with the arrays. A missing or damaged file only costs time.
"""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graftwork.files.disk import write_atomic

Arrays = tuple["np.ndarray[Any, Any]", ...]
Identify = Callable[[int], str]
"""A digest of the first rows of the corpus: everything that is read of them."""
CACHE_FORM = 1
"""Incremented when the computations change: older files are then not used."""


class _Entry(NamedTuple):
    rows: int
    arrays: Arrays


class PrefixCache:
    """Holds the latest arrays of each name; `save` writes those that are new."""

    def __init__(self, folder: Path, identify: Identify) -> None:
        self._folder, self._identify = folder, identify
        self._held: dict[str, _Entry] = {}
        self._new: set[str] = set()
        self._looked: set[str] = set()
        self._stamps: dict[int, str] = {}

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays:
        """Arrays that the first `rows` rows determine; without `store`, for this process alone."""
        held = self._hold(name)
        if held is not None and held.rows == rows:
            return held.arrays
        return self._put(name, rows, make(), store=store)

    def grow(self, name: str, rows: int, make: Callable[[int, Arrays | None], Arrays]) -> Arrays:
        """Arrays of all `rows` rows; `make` gets how many rows those of the last run cover, and these."""
        held = self._hold(name)
        if held is None or held.rows > rows:
            return self._put(name, rows, make(0, None))
        arrays = make(held.rows, held.arrays)
        is_same = held.rows == rows and all(map(np.array_equal, arrays, held.arrays))
        return arrays if is_same else self._put(name, rows, arrays)

    def forget(self) -> None:
        """Drop what is held in memory."""
        self._held.clear()
        self._new.clear()
        self._looked.clear()
        self._stamps.clear()

    def save(self) -> None:
        """Write what was computed; not durably, since it can be computed again."""
        for name in sorted(self._new):
            entry, buffer = self._held[name], io.BytesIO()
            arrays = {f"array_{number}": array for number, array in enumerate(entry.arrays)}
            rows, of = np.array(entry.rows), np.array(self._stamp(entry.rows))
            np.savez(buffer, rows=rows, of=of, **arrays)  # type: ignore[arg-type]  # numpy has no type for them
            write_atomic(self._folder / f"{name}.npz", buffer.getvalue(), durable=False)
        self._new.clear()

    def _put(self, name: str, rows: int, arrays: Arrays, *, store: bool = True) -> Arrays:
        self._held[name] = _Entry(rows, arrays)
        if store:
            self._new.add(name)
        return arrays

    def _hold(self, name: str) -> _Entry | None:
        if name not in self._held and name not in self._looked:
            self._looked.add(name)
            found = self._read(name)
            if found is not None:
                self._held[name] = found
        return self._held.get(name)

    def _read(self, name: str) -> _Entry | None:
        try:
            with np.load(self._folder / f"{name}.npz", allow_pickle=False) as file:
                rows = int(file["rows"])
                if str(file["of"]) != self._stamp(rows):
                    return None
                return _Entry(rows, tuple(file[f"array_{number}"] for number in range(len(file.files) - 2)))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def _stamp(self, rows: int) -> str:
        if rows not in self._stamps:
            self._stamps[rows] = f"{CACHE_FORM} {self._identify(rows)}"
        return self._stamps[rows]
