"""A corpus in memory, in blocks, for tests of what compares rows."""

from typing import NamedTuple

import numpy as np

from graftwork.data.dedup.fingerprints import compute_fingerprints


class Numbers(NamedTuple):
    numbers: np.ndarray


class ColumnsInMemory:
    def __init__(self, rows, *, settings, passed=None, block=7):
        self.pairs = {}
        self._rows = list(rows)
        self.rows = len(self._rows)
        self._passed = np.ones(self.rows, dtype=bool) if passed is None else np.array(passed, dtype=bool)
        self._blocks = [
            (
                first,
                compute_fingerprints(
                    [
                        row if self._passed[first + at] else None
                        for at, row in enumerate(self._rows[first : first + block])
                    ],
                    settings=settings,
                ),
            )
            for first in range(0, self.rows, block)
        ]

    def column(self, name):
        if name == "passed":
            return self._passed
        parts = [fixed[name] for _, (fixed, _) in self._blocks]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint64)

    def ragged(self, name):
        for first, (_, ragged) in self._blocks:
            yield first, *ragged[name]

    def labels(self, name):
        known = {}
        values = [getattr(row, name) for row in self._rows]
        return Numbers(np.array([-1 if v is None else known.setdefault(v, len(known)) for v in values]))

    def rows_at(self, places):
        assert list(places) == sorted(places)
        for place in places:
            yield place, self._rows[place]

    def origin(self, place):
        return self._rows[place].origin

    def remember(self, _name, _rows, make, *, store=True):
        return make()

    def grow(self, _name, make):
        return make(0, None)
