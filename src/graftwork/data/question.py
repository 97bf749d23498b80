"""What a row asks, apart from what every row of its log repeats.

In: the prints of the lines of each turn. Out: window by window, the line of each row that asks, and
pairs of rows whose lines ask the same in nearly the same words. Instructions that stand in many rows
("Answer in JSON.") ask nothing; which lines those are is learned from the rows before, not written
here. The system prompt takes no part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from graftwork.data.bands import BEFORE, NO_PAIRS, Columns, Spill, find_first, merge_pairs, pack, unpack
from graftwork.data.ground import ASKS, Window, ground_places, learn_instructions, learn_weights, open_windows
from graftwork.text.compare import NO_WEIGHTS, TOLERANCE, Array, Ragged, Weights, measure_pairs

# "Please look up X" holds "X": a line whose words stand in another to this degree asks the same,
# unless it has only this part of the other's words.
CONTAINED = 0.9
CONTAINED_PART = 0.4
# Marks of a run of words in the index: among the rarest of its line, for likeness and for containment.
_RARE = np.uint8(1)
_RAREST = np.uint8(2)
# A run that stands in so many lines before is not rare any more: the few of them that a line would
# be compared with are hardly ever the right ones.
_RARE_ROWS = 64
_ROWS_AT_ONCE = 25_000

Wanted = Callable[[Array, Array], Array]
"""Which of the pairs (later rows, earlier rows) need to be judged at all."""


@dataclass(frozen=True)
class Asked:
    """The asking lines of all rows before `window.high`, as seen on the ground of that window.

    `key` is 0 where a row asks nothing; `first` is the first row with the same line; `instructions`
    are the sorted keys of lines that ask nothing; `number` counts the lines behind the asking one.
    """

    window: Window
    key: Array
    first: Array
    weights: Weights
    instructions: Array
    number: Array
    _corpus: Columns
    _passed: Array

    def runs_of(self, places: Array) -> Ragged:
        """The runs of words of the asking lines of these rows, which must ascend."""
        return _read_runs(self._corpus, places, self.number)

    def firsts(self) -> Array:
        """The rows that are the first of all with their line."""
        rows = np.arange(len(self.key))
        return np.flatnonzero(self._passed & (self.key != 0) & (self.first == rows))

    def probes(self) -> Array:
        """The rows of the window that are the first in it with their line."""
        rows = np.arange(len(self.key))
        inside = self._passed & (rows >= self.window.low) & (self.key != 0)
        return np.flatnonzero(inside & (find_first(self.key, among=inside) == rows))

    def pair_alike(self, *, threshold: float, wanted: Wanted | None = None) -> Array:
        """Rows of the window with rows before them that ask the same in nearly the same words."""
        probes = self.probes()
        if not len(probes):
            return NO_PAIRS
        is_probe = np.zeros(len(self.key), dtype=bool)
        is_probe[probes] = True
        places = np.union1d(probes, self.firsts())
        sets = self.runs_of(places)
        weighed = self.weights.of(sets.values)
        found = []
        with Spill(len(sets.values)) as spill:
            _index_rare_runs(spill, sets, places, weighed=weighed, threshold=threshold)
            for entries in spill.portions():
                parts, ranks = [], entries.ranks()
                for step in range(1, BEFORE + 1):
                    later, earlier = entries.pair(step)
                    rare = entries.marks[later] | (entries.marks[earlier] & _RAREST)
                    proposed = (rare > 0) & is_probe[entries.places[later]] & (ranks[later] < _RARE_ROWS)
                    parts.append(pack(entries.places[later[proposed]], entries.places[earlier[proposed]]))
                pairs = merge_pairs(parts)
                if wanted is not None:
                    pairs = pairs[wanted(*unpack(pairs))]
                found.append(pairs[_are_alike(pairs, places, sets, weighed=weighed, threshold=threshold)])
        return merge_pairs(found)


def find_asked(corpus: Columns, *, passed: Array, turns: Array) -> Iterator[Asked]:
    """The asking lines, window by window, each on its own ground. `turns` are the keys of the turns."""
    for window in open_windows(corpus.rows):
        ground = ground_places(window, passed=passed, turns=turns)
        instructions = learn_instructions(corpus, ground)
        key, numbers = _choose_lines(corpus, window.high, instructions)
        weights = NO_WEIGHTS
        if len(ground):
            weights = learn_weights(_read_runs(corpus, ground, numbers), key[ground])
        inside = passed[: window.high]
        yield Asked(
            window=window,
            key=key,
            first=find_first(key, among=inside),
            weights=weights,
            instructions=instructions,
            number=numbers,
            _corpus=corpus,
            _passed=inside,
        )


def _are_alike(pairs: Array, places: Array, sets: Ragged, *, weighed: Array, threshold: float) -> Array:
    later, earlier = (np.searchsorted(places, side) for side in unpack(pairs))
    measures = measure_pairs(sets, later, earlier, weighed=weighed)
    held = np.flatnonzero(measures.containment >= max(CONTAINED, threshold) - TOLERANCE)
    one, other = (_count_words(sets, side[held]) for side in (later, earlier))
    alike: Array = measures.likeness >= threshold - TOLERANCE
    alike[held] |= np.minimum(one, other) >= CONTAINED_PART * np.maximum(one, other)
    return alike


def _count_words(sets: Ragged, items: Array) -> Array:
    taken = sets.take(items)
    return np.bincount(taken.owners(), (taken.values & np.uint32(1)) == 0, minlength=len(items))


def _choose_lines(corpus: Columns, rows: int, instructions: Array) -> tuple[Array, Array]:
    """For each row the key of its asking line, and which of its last lines that is.

    The last line that is no instruction asks; where all are, the last.
    """
    chosen_keys = np.zeros(rows, dtype=np.uint64)
    numbers = np.zeros(rows, dtype=np.uint8)
    for first, flat, offsets in corpus.ragged("lines"):
        if first >= rows:
            break
        keys = flat & ~ASKS
        at = np.arange(len(keys))
        asks = ~np.isin(keys, instructions)
        full = np.flatnonzero(offsets[1:] > offsets[:-1])
        if not len(full):
            continue
        starts = offsets[:-1][full]
        chosen = np.minimum.reduceat(np.where(asks, at, len(keys)), starts)
        chosen = np.where(chosen < offsets[1:][full], chosen, starts)
        inside = full + first < rows
        places = full[inside] + first
        chosen_keys[places] = keys[chosen[inside]]
        numbers[places] = (chosen - starts)[inside]
    return chosen_keys, numbers


def _read_runs(corpus: Columns, places: Array, numbers: Array) -> Ragged:
    """The runs of one line of each of these rows."""
    values, lengths = [], []
    sizes_of, runs_of = corpus.ragged("line_sizes"), corpus.ragged("line_runs")
    for (first, sizes, line_offsets), (_, runs, _) in zip(sizes_of, runs_of, strict=True):
        low, high = np.searchsorted(places, [first, first + len(line_offsets) - 1])
        if low < high:
            local = places[low:high] - first
            empty = line_offsets[local] == line_offsets[local + 1]
            lines = Ragged(runs, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64), [len(runs)])))
            # A row without lines takes the empty one behind the last.
            which = np.where(empty, len(sizes), line_offsets[local] + numbers[places[low:high]])
            taken = lines.take(which)
            values.append(taken.values)
            lengths.append(np.diff(taken.offsets))
        if high == len(places):
            break
    if not values:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(places) + 1, dtype=np.int64))
    return Ragged(np.concatenate(values), np.concatenate(([0], np.cumsum(np.concatenate(lengths)))))


def _index_rare_runs(spill: Spill, sets: Ragged, places: Array, *, weighed: Array, threshold: float) -> None:
    """Put the runs of all lines into the index, with marks for the rarest of each line.

    Two lines can only be alike to the threshold if they share one of the rarest runs of each, up to
    the part of its weight that may differ.
    """
    for start in range(0, len(places), _ROWS_AT_ONCE):
        items = np.arange(start, min(start + _ROWS_AT_ONCE, len(places)))
        part = sets.take(items)
        owners, weights = part.owners(), weighed[sets.offsets[start] : sets.offsets[items[-1] + 1]]
        order = np.lexsort((part.values, -weights, owners))
        values, weights = part.values[order], weights[order].astype(np.float64)
        is_word = (values & np.uint32(1)) == 0
        rare = _share_before(weights, part, owners) < 1 - threshold + 1e-6
        rarest = _share_before(np.where(is_word, weights, 0.0), part, owners) < 1 - CONTAINED + 1e-6
        marks = rare.astype(np.uint8) * _RARE | (rarest & is_word).astype(np.uint8) * _RAREST
        spill.add(values.astype(np.uint64), places[items][owners], marks)


def _share_before(weighed: Array, sets: Ragged, owners: Array) -> Array:
    """For each value, which part of its set's weight stands before it."""
    behind = np.cumsum(weighed) - weighed
    bases = np.append(behind, 0.0)[sets.offsets[:-1]]
    totals = np.bincount(owners, weighed, minlength=len(bases))
    share: Array = (behind - bases[owners]) / totals[owners]
    return share
