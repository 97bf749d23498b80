"""What a row asks, apart from what every row of its log repeats.

In: the prints of the lines of each turn. Out: window by window, the line of each row that asks, and
pairs of rows whose lines ask the same in nearly the same words. Instructions that stand in many rows
("Answer in JSON.") ask nothing; which lines those are is learned from the rows before, not written
here. The line that asks in a conversation of several turns counts together with what the user says
later in it. The system prompt takes no part.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from graftwork.data.bands import (
    NO_PAIRS,
    Columns,
    are_few,
    find_first,
    join_ragged,
    merge_pairs,
    only_fresh,
    unpack,
)
from graftwork.data.ground import ASKS, Window, ground_places, learn_instructions, learn_weights, open_windows
from graftwork.data.instructions import find_instructions
from graftwork.data.rare_runs import (
    CONTAINED,
    Marked,
    find_sharing,
    leave_out_hopeless,
    propose_all,
    propose_sharing,
)
from graftwork.text.compare import NO_WEIGHTS, TOLERANCE, Array, Ragged, Weights, measure_pairs, spread

# A line that stands in another asks the same, unless it has only this part of the other's words.
CONTAINED_PART = 0.4

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

    def pair_alike(
        self, *, threshold: float, wanted: Wanted | None = None, fresh: Array | None = None
    ) -> Array:
        """Rows of the window with rows before them that ask the same in nearly the same words.

        Where some rows are marked as `fresh`, only pairs with one of them.
        """
        probes = self.probes()
        is_probe = np.zeros(len(self.key), dtype=bool)
        is_probe[probes] = True
        places = np.union1d(probes, self.firsts())
        if not len(probes) or (fresh is not None and not fresh[places].any()):
            return NO_PAIRS
        if fresh is not None and are_few(fresh):
            return self._look_up(places, is_probe, threshold=threshold, wanted=wanted, fresh=fresh)
        sets = self.runs_of(places)
        weighed = self.weights.of(sets.values)
        found = []
        for pairs in propose_all(sets, places, weighed=weighed, threshold=threshold, is_probe=is_probe):
            proposed = only_fresh(pairs, fresh)
            if wanted is not None:
                proposed = proposed[wanted(*unpack(proposed))]
            found.append(proposed[_are_alike(proposed, places, sets, weighed=weighed, threshold=threshold)])
        return merge_pairs(found)

    def _look_up(
        self, places: Array, is_probe: Array, *, threshold: float, wanted: Wanted | None, fresh: Array
    ) -> Array:
        own = places[fresh[places]]
        runs = self.runs_of(own)
        lines = _stream_runs(self._corpus, places, self.number)
        sharing = find_sharing(lines, runs.values, fresh=fresh, is_probe=is_probe)
        if wanted is not None:
            sharing = sharing.only(wanted(sharing.later, sharing.earlier))
        marked = Marked.of(runs, own, weighed=self.weights.of(runs.values), threshold=threshold)
        sharing = leave_out_hopeless(sharing, marked)
        places = sharing.rows()
        sets = self.runs_of(places)
        weighed = self.weights.of(sets.values)
        marked = Marked.of(sets, places, weighed=weighed, threshold=threshold)
        pairs = propose_sharing(sharing, marked)
        return pairs[_are_alike(pairs, places, sets, weighed=weighed, threshold=threshold)]


def find_asked(corpus: Columns, *, passed: Array, turns: Array, since: int = 0) -> Iterator[Asked]:
    """The asking lines, window by window, each on its own ground. `turns` are the keys of the turns.

    Windows with no row from `since` on are left out.
    """
    shown: Array | None = None
    for window in open_windows(corpus.rows):
        if window.high <= since:
            continue
        if shown is None:
            shown = find_instructions(corpus, passed=passed, turns=turns)
        ground = ground_places(window, passed=passed, turns=turns)
        instructions = learn_instructions(corpus, ground)
        key, numbers = _choose_lines(corpus, window.high, instructions, shown)
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


def _choose_lines(corpus: Columns, rows: int, instructions: Array, shown: Array) -> tuple[Array, Array]:
    """For each row the key of its asking line, and which of its last lines that is.

    The last line that is no instruction asks; where all are, the last. `shown` marks the lines that
    showed themselves to be instructions before their row came.
    """
    chosen_keys = np.zeros(rows, dtype=np.uint64)
    numbers = np.zeros(rows, dtype=np.uint8)
    behind = 0
    for first, flat, offsets in corpus.ragged("lines"):
        if first >= rows:
            break
        keys = flat & ~ASKS
        at = np.arange(len(keys))
        asks = ~np.isin(keys, instructions) & ~shown[behind : behind + len(keys)]
        behind += len(keys)
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
    # The same line asks something else in another conversation.
    later = corpus.column("later")[:rows]
    chosen_keys = np.where(later == 0, chosen_keys, spread(spread(chosen_keys) ^ later) & ~ASKS)
    return chosen_keys, numbers


def _read_runs(corpus: Columns, places: Array, numbers: Array) -> Ragged:
    """The runs of one line of each of these rows."""
    parts = [sets for _, sets in _stream_runs(corpus, places, numbers)]
    if not parts:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(places) + 1, dtype=np.int64))
    return join_ragged(parts)


def _stream_runs(corpus: Columns, places: Array, numbers: Array) -> Iterator[tuple[Array, Ragged]]:
    """The same, some rows at a time, with their places."""
    sizes_of, runs_of = corpus.ragged("line_sizes"), corpus.ragged("line_runs")
    for (first, sizes, line_offsets), (_, runs, _) in zip(sizes_of, runs_of, strict=True):
        low, high = np.searchsorted(places, [first, first + len(line_offsets) - 1])
        if low < high:
            some = places[low:high]
            local = some - first
            empty = line_offsets[local] == line_offsets[local + 1]
            lines = Ragged(runs, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64), [len(runs)])))
            # A row without lines takes the empty one behind the last.
            which = np.where(empty, len(sizes), line_offsets[local] + numbers[some])
            yield some, lines.take(which)
        if high == len(places):
            break
