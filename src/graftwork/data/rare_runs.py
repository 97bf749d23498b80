"""Lines that may be alike, proposed by the rare runs of words that they share.

In: the runs of words of lines, and what they weigh. Out: pairs of rows, to be measured. Two lines can
only be alike to the threshold if they share one of the rarest runs of each, up to the part of its
weight that may differ. Either all rows of a window are looked at, by sorting all runs, or only what
concerns some fresh rows, by looking up their few runs among those of all others; both propose the
same pairs of a fresh row. Does not measure.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from graftwork.data.bands import BEFORE, Entries, Few, Spill, merge_pairs, pack
from graftwork.text.compare import Array, Ragged, distinct

# "Please look up X" holds "X": a line whose words stand in another to this degree asks the same.
CONTAINED = 0.9
# Marks of a run of words in the index: among the rarest of its line, for likeness and for containment.
_RARE = np.uint8(1)
_RAREST = np.uint8(2)
# A run that stands in so many lines before is not rare any more: the few of them that a line would
# be compared with are hardly ever the right ones.
_RARE_ROWS = 64
_ROWS_AT_ONCE = 25_000
_ENTRIES_AT_ONCE = 1_000_000
_HALF = np.uint64(32)


def propose_all(
    sets: Ragged, places: Array, *, weighed: Array, threshold: float, is_probe: Array
) -> Iterator[Array]:
    """Probes with rows before them, portion by portion."""
    with Spill(len(sets.values)) as spill:
        for start in range(0, len(places), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(places))
            part = sets.take(np.arange(start, stop))
            weights = weighed[sets.offsets[start] : sets.offsets[stop]]
            marks = _mark_rare(part, weights, threshold=threshold)
            spill.add(part.values.astype(np.uint64), places[start:stop][part.owners()], marks)
        for entries in spill.portions():
            parts, ranks = [], entries.ranks()
            for step in range(1, BEFORE + 1):
                later, earlier = entries.pair(step)
                rare = entries.marks[later] | (entries.marks[earlier] & _RAREST)
                proposed = (rare > 0) & is_probe[entries.places[later]] & (ranks[later] < _RARE_ROWS)
                parts.append(pack(entries.places[later[proposed]], entries.places[earlier[proposed]]))
            yield merge_pairs(parts)


class Marked(NamedTuple):
    """The lines of some rows, and for each of their runs whether it is among the rarest."""

    places: Array
    keys: Array
    marks: Array

    @classmethod
    def of(cls, sets: Ragged, places: Array, *, weighed: Array, threshold: float) -> "Marked":
        keys = sets.owners().astype(np.uint64) << _HALF | sets.values.astype(np.uint64)
        return cls(places, keys, _mark_rare(sets, weighed, threshold=threshold))

    def marks_of(self, rows: Array, values: Array) -> Array:
        """The marks of runs that stand in the lines of these rows."""
        owners = np.searchsorted(self.places, rows).astype(np.uint64)
        found: Array = self.marks[np.searchsorted(self.keys, owners << _HALF | values.astype(np.uint64))]
        return found


class Sharing(NamedTuple):
    """Pairs of rows that share a run which is rare up to the later one, and that run."""

    value: Array
    later: Array
    earlier: Array

    def only(self, which: Array) -> "Sharing":
        return Sharing(self.value[which], self.later[which], self.earlier[which])

    def rows(self) -> Array:
        return distinct(np.concatenate((self.later, self.earlier)))


def find_sharing(
    lines: Iterable[tuple[Array, Ragged]], runs: Array, *, fresh: Array, is_probe: Array
) -> Sharing:
    """Probes with rows before them, one of the two fresh. `runs` are those of all fresh lines.

    `lines` are the lines of all rows, some at a time, in order.
    """
    runs = distinct(runs)
    entries = _find_entries(lines, runs, fresh=fresh)
    ranks, found = entries.ranks(), []
    for later, earlier in map(entries.pair, range(1, BEFORE + 1)):
        pairs = Sharing(runs[entries.values[later]], entries.places[later], entries.places[earlier])
        pairs = pairs.only(ranks[later] < _RARE_ROWS)
        found.append(pairs.only(is_probe[pairs.later] & (fresh[pairs.later] | fresh[pairs.earlier])))
    return Sharing(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _find_entries(lines: Iterable[tuple[Array, Ragged]], runs: Array, *, fresh: Array) -> Entries:
    """Where the runs stand that are still rare when the first fresh row with them comes."""
    seen, concerned = np.zeros(len(runs), dtype=np.int64), np.zeros(len(runs), dtype=bool)
    number, place = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
    waiting: list[tuple[Array, Array]] = []
    for some, sets in lines:
        open_runs = np.flatnonzero(seen < _RARE_ROWS).astype(np.int32)
        there, which = Few(runs[open_runs]).find(sets.values)
        numbers, places = open_runs[which], some[sets.owners()[there]]
        seen += np.bincount(numbers, minlength=len(runs))
        concerned[numbers[fresh[places]]] = True
        waiting.append((numbers, places.astype(np.int32)))
        # Most runs are rare no more long before a fresh row comes.
        if sum(len(part) for part, _ in waiting) > _ENTRIES_AT_ONCE:
            number, place = _gather(number, place, waiting, useful=concerned | (seen < _RARE_ROWS))
            waiting = []
    number, place = _gather(number, place, waiting, useful=concerned)
    order = np.argsort(number, kind="stable")
    return Entries(number[order], place[order].astype(np.int64), np.zeros(len(order), dtype=np.uint8))


def _gather(
    number: Array, place: Array, waiting: list[tuple[Array, Array]], *, useful: Array
) -> tuple[Array, Array]:
    number = np.concatenate([number, *(numbers for numbers, _ in waiting)])
    place = np.concatenate([place, *(places for _, places in waiting)])
    kept = useful[number]
    return number[kept], place[kept]


def leave_out_hopeless(sharing: Sharing, lines: Marked) -> Sharing:
    """Without runs of two words that are not among the rarest of the later line, where that is known."""
    known = np.isin(sharing.later, lines.places)
    hopeless = known & ((sharing.value & np.uint32(1)) == 1)
    hopeless[hopeless] = lines.marks_of(sharing.later[hopeless], sharing.value[hopeless]) == 0
    return sharing.only(~hopeless)


def propose_sharing(sharing: Sharing, lines: Marked) -> Array:
    """Those that share a run which is among the rarest of one of the two. `lines` are those of all."""
    rare = lines.marks_of(sharing.later, sharing.value)
    rare |= lines.marks_of(sharing.earlier, sharing.value) & _RAREST
    return merge_pairs([pack(sharing.later[rare > 0], sharing.earlier[rare > 0])])


def _mark_rare(sets: Ragged, weighed: Array, *, threshold: float) -> Array:
    """For each run whether it is among the rarest of its line."""
    owners = sets.owners()
    # By line, then from the heaviest to the lightest: weights are positive, and such floats sort like
    # the integers of the same bits. One key sorts ten times as fast as several.
    lighter = np.uint32(2**32 - 1) - weighed.astype(np.float32).view(np.uint32)
    order = np.argsort(owners.astype(np.uint64) << _HALF | lighter.astype(np.uint64), kind="stable")
    weights = weighed[order].astype(np.float64)
    is_word = (sets.values[order] & np.uint32(1)) == 0
    rare = _share_before(weights, sets, owners) < 1 - threshold + 1e-6
    rarest = _share_before(np.where(is_word, weights, 0.0), sets, owners) < 1 - CONTAINED + 1e-6
    marks = np.empty(len(order), dtype=np.uint8)
    marks[order] = rare.astype(np.uint8) * _RARE | (rarest & is_word).astype(np.uint8) * _RAREST
    return marks


def _share_before(weighed: Array, sets: Ragged, owners: Array) -> Array:
    """For each value, which part of its set's weight stands before it."""
    behind = np.cumsum(weighed) - weighed
    bases = np.append(behind, 0.0)[sets.offsets[:-1]]
    totals = np.bincount(owners, weighed, minlength=len(bases))
    share: Array = (behind - bases[owners]) / totals[owners]
    return share
