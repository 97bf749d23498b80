"""Arrays that only the first rows of the corpus determine, kept from one run to the next.

In: the name of what is computed, how many rows it depends on, and the function that computes it. Out: arrays.
A log that has grown has the same first rows: their weights and pairs are read instead of computed. A digest
of these rows is stored with the arrays. A missing or damaged file only costs time.
"""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graftwork.files.disk import write_atomic

Arrays = tuple["np.ndarray[Any, Any]", ...]
Identify = Callable[[int], str]
"""A digest of the first rows of the corpus: everything that is read of them."""
CACHE_FORM = 1
"""Incremented when the computations change: older files are then not used."""


def write_arrays(path: Path, arrays: dict[str, "np.ndarray[Any, Any]"], *, durable: bool = True) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]  # numpy has no type for named arrays
    write_atomic(path, buffer.getvalue(), durable=durable)


def read_arrays(path: Path, names: tuple[str, ...]) -> dict[str, "np.ndarray[Any, Any]"]:
    """Read arrays by their names; none where the file is missing or damaged, or lacks one of these."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
    return arrays if arrays.keys() >= set(names) else {}


class PrefixCache:
    """Holds the latest arrays of each name; `save` writes those that are new."""

    def __init__(self, folder: Path, identify: Identify) -> None:
        self._folder, self._identify = folder, identify
        self._held: dict[str, tuple[int, Arrays]] = {}
        """By name: how many rows the arrays depend on, and these."""
        self._new: set[str] = set()
        self._looked: set[str] = set()
        self._stamps: dict[int, str] = {}

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays:
        """Arrays that the first `rows` rows determine; without `store`, for this process alone."""
        held = self._hold(name)
        if held is not None and held[0] == rows:
            return held[1]
        return self._put(name, rows, make(), store=store)

    def grow(self, name: str, rows: int, make: Callable[[int, Arrays | None], Arrays]) -> Arrays:
        """Arrays of all `rows` rows; `make` gets how many rows those of the last run cover, and these."""
        held = self._hold(name)
        if held is None or held[0] > rows:
            return self._put(name, rows, make(0, None))
        known, of_known = held
        arrays = make(known, of_known)
        is_same = known == rows and all(map(np.array_equal, arrays, of_known))
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
            rows, arrays = self._held[name]
            named = {f"array_{number}": array for number, array in enumerate(arrays)}
            named |= {"rows": np.array(rows), "of": np.array(self._stamp(rows))}
            write_arrays(self._folder / f"{name}.npz", named, durable=False)
        self._new.clear()

    def _put(self, name: str, rows: int, arrays: Arrays, *, store: bool = True) -> Arrays:
        self._held[name] = rows, arrays
        if store:
            self._new.add(name)
        return arrays

    def _hold(self, name: str) -> tuple[int, Arrays] | None:
        if name not in self._held and name not in self._looked:
            self._looked.add(name)
            stored = read_arrays(self._folder / f"{name}.npz", ("rows", "of"))
            rows = int(stored["rows"]) if stored else 0
            if stored and str(stored["of"]) == self._stamp(rows):
                self._held[name] = rows, tuple(stored[f"array_{n}"] for n in range(len(stored) - 2))
        return self._held.get(name)

    def _stamp(self, rows: int) -> str:
        if rows not in self._stamps:
            self._stamps[rows] = f"{CACHE_FORM} {self._identify(rows)}"
        return self._stamps[rows]
