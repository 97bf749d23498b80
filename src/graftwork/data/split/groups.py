"""Rows whose turns are similar beyond the question line: as a whole, or by long runs of rare words.

In: fingerprints of the turns. Out: pairs of rows that must be in the same split. Only the first row with a
turn is compared; the others follow it. 13-grams that occur in many rows are boilerplate or shared sources
and pair nothing.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from graftwork.data.dedup.fingerprints import TURN, TURN_RUNS
from graftwork.data.dedup.lsh import (
    NO_PAIRS,
    CorpusColumns,
    ExternalSort,
    ValueLookup,
    find_first,
    is_worth_looking_up,
    measure_rows,
    merge_pairs,
    only_fresh,
    pack,
    pair_neighbours,
    read_rows,
    rows_of,
    stream_rows,
    unpack,
)
from graftwork.data.dedup.questions import (
    IS_QUESTION,
    PairFilter,
    Questions,
    Window,
    learn_weights,
    open_windows,
    remember_weights,
    sample_before,
)
from graftwork.text.similarity import TOLERANCE, Array, RunWeights, distinct

# A 13-gram or a question in more rows than this is boilerplate, a shared source or a habit.
RARE_ROWS = 5
# A long reply in more rows than this is canned, such as a refusal; generated paraphrases come by the handful.
RARE_REPLIES = 10
# A line of four words has this many runs of one and two words, unless it repeats itself.
QUESTION_RUNS = 7
# Turns ask the same when they share this share of the 13-grams of the shorter one, and these are rare.
RARE_SHARE = 0.5
_PAIRS_AT_ONCE = 100_000
# This many 13-grams of fresh rows may occur in every other row: boilerplate.
_GRAMS_LOOKED_UP = 8


class UserTurns(NamedTuple):
    """The keys of the turns, the first row with each, and the rows that are the first with theirs."""

    key: Array
    first: Array
    own: Array


def read_turns(corpus: CorpusColumns, *, passed: Array) -> UserTurns:
    key = corpus.column("turn")
    first = find_first(key, among=passed)
    own = np.flatnonzero(passed & (key != 0) & (first == np.arange(len(key))))
    return UserTurns(key, first, own)


def pair_turns(
    corpus: CorpusColumns,
    turns: UserTurns,
    *,
    passed: Array,
    threshold: float,
    wanted: PairFilter | None = None,
    fresh: Array | None = None,
) -> Array:
    """Pair turns that are similar as a whole: LSH proposes, the weighted similarity decides.

    With `fresh`, here and below, return only pairs that contain a row marked there.
    """
    pairs = NO_PAIRS
    if fresh is not None and not fresh.any():
        return pairs
    for name in TURN:
        proposed = pair_neighbours(corpus.column(name)[turns.own], turns.own, fresh=fresh)
        if wanted is not None:
            proposed = proposed[wanted(*unpack(proposed))]
        pairs = merge_pairs([pairs, proposed])
    found = []
    for window in open_windows(corpus.rows):
        low, high = np.searchsorted(unpack(pairs)[0], [window.low, window.high])
        if low == high:
            continue
        learn = partial(_learn_weights, corpus, window, turns, passed)
        weights = remember_weights(corpus, "turn_weights", window, learn)
        for start in range(low, high, _PAIRS_AT_ONCE):
            part = pairs[start : min(start + _PAIRS_AT_ONCE, high)]
            places = rows_of(part)
            sets = read_rows(corpus, "turn_runs", places)
            measures = measure_rows(part, places, sets, weights, sampled=TURN_RUNS)
            found.append(part[measures.likeness >= threshold - TOLERANCE])
    return merge_pairs(found)


def _learn_weights(corpus: CorpusColumns, window: Window, turns: UserTurns, passed: Array) -> RunWeights:
    sample = sample_before(window, passed=passed, turns=turns.key)
    return learn_weights(read_rows(corpus, "turn_runs", sample), turns.key[sample])


def pair_rare_questions(
    corpus: CorpusColumns, asked: Questions, *, passed: Array, fresh: Array | None = None
) -> Array:
    """Pair rows of the window with earlier rows that contain the same line ending as a question.

    The question line is not always recognized, least among the first rows of a log. So every question near
    the end of a turn counts if it is rare up to the later row.
    """
    low, high = asked.window.low, asked.window.high
    few = _fresh_values(corpus, "lines", np.flatnonzero(passed[:high]), fresh)
    found = []
    with ExternalSort(high) as spill:
        lines_of, sizes_of = corpus.ragged("lines"), corpus.ragged("line_sizes")
        for (first, lines, offsets), (_, sizes, _) in zip(lines_of, sizes_of, strict=True):
            if first >= high:
                break
            places = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
            asks = (lines & IS_QUESTION == IS_QUESTION) & (sizes >= QUESTION_RUNS) & (places < high)
            asks[asks] = passed[places[asks]] & ~np.isin(lines[asks] & ~IS_QUESTION, asked.boilerplate)
            chosen = _find_values(few, lines, asks)
            spill.add(lines[chosen], places[chosen])
        for entries in spill.partitions():
            rare = (entries.ranks() < RARE_ROWS) & (entries.places >= low)
            for later, earlier in map(entries.pair, range(1, RARE_ROWS)):
                found.append(pack(entries.places[later[rare[later]]], entries.places[earlier[rare[later]]]))
    return only_fresh(merge_pairs(found), fresh)


def pair_rare_grams(
    corpus: CorpusColumns, turns: UserTurns, *, in_all: bool = False, fresh: Array | None = None
) -> Array:
    """Pair turns that share many rare 13-grams.

    A 13-gram is rare for a row if it occurs in few rows up to that one; with `in_all`, in few of all rows.
    """
    return _pair_grams(corpus, "grams", turns.own, rare_rows=RARE_ROWS, in_all=in_all, fresh=fresh)


def pair_long_replies(
    corpus: CorpusColumns, *, passed: Array, in_all: bool = False, fresh: Array | None = None
) -> Array:
    """Pair rows with nearly the same long reply: their questions ask the same in other words."""
    own = np.flatnonzero(passed)
    return _pair_grams(corpus, "reply_grams", own, rare_rows=RARE_REPLIES, in_all=in_all, fresh=fresh)


def _pair_grams(
    corpus: CorpusColumns, name: str, own: Array, *, rare_rows: int, in_all: bool, fresh: Array | None
) -> Array:
    if fresh is not None and not fresh.any():
        return NO_PAIRS
    is_own = np.zeros(corpus.rows, dtype=bool)
    is_own[own] = True
    few = _fresh_values(corpus, name, own, fresh)
    shared: list[tuple[Array, Array]] = []
    if few is not None:
        expected = _GRAMS_LOOKED_UP * corpus.rows
    else:
        expected = sum(int(offsets[-1]) for *_, offsets in corpus.ragged(name))
    with ExternalSort(expected) as spill:
        for first, flat, offsets in corpus.ragged(name):
            places = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
            inside = _find_values(few, flat, is_own[places])
            spill.add(flat[inside], places[inside])
        for entries in spill.partitions():
            ranks = entries.ranks()
            rare = ranks < rare_rows
            if in_all:
                lengths = np.diff(np.append(np.flatnonzero(ranks == 0), len(ranks)))
                rare &= np.repeat(lengths, lengths) <= rare_rows
            pairs = [
                pack(entries.places[later[rare[later]]], entries.places[earlier[rare[later]]])
                for later, earlier in map(entries.pair, range(1, RARE_ROWS))
            ]
            shared.append(_count_pairs(only_fresh(np.concatenate(pairs), fresh), None))
            if len(shared) > 16:
                shared = [_join_counts(shared)]
    if not shared:
        return NO_PAIRS
    pairs_found, times = _join_counts(shared)
    places = rows_of(pairs_found)
    counts = [np.zeros(0, dtype=np.int64)]
    for rows in stream_rows(corpus, name, places):
        owners = rows.owners()
        values = rows.values[np.lexsort((rows.values, owners))]
        once = np.ones(len(values), dtype=bool)
        once[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
        counts.append(np.bincount(owners[once], minlength=len(rows.offsets) - 1))
    sizes = np.concatenate(counts)
    fewer = np.minimum(*(sizes[np.searchsorted(places, side)] for side in unpack(pairs_found)))
    enough: Array = pairs_found[times >= RARE_SHARE * fewer]
    return enough


def _fresh_values(corpus: CorpusColumns, name: str, places: Array, fresh: Array | None) -> ValueLookup | None:
    """Return the values of the fresh ones of these rows; None where those of all rows are needed."""
    if fresh is None or not is_worth_looking_up(fresh):
        return None
    return ValueLookup(distinct(read_rows(corpus, name, places[fresh[places]]).values))


def _find_values(few: ValueLookup | None, values: Array, inside: Array) -> Array:
    """Return the positions of the values that are looked for."""
    chosen: Array = np.flatnonzero(inside)
    return chosen if few is None else chosen[few.find(values[chosen])[0]]


def _count_pairs(pairs: Array, times: Array | None) -> tuple[Array, Array]:
    """Return each pair once, with how often it occurs."""
    order = np.argsort(pairs, kind="stable")
    ordered = pairs[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    added = np.ones(len(pairs), dtype=np.int64) if times is None else times[order]
    sums = np.add.reduceat(added, starts) if len(starts) else np.zeros(0, dtype=np.int64)
    return ordered[starts], sums


def _join_counts(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    return _count_pairs(
        np.concatenate([pairs for pairs, _ in parts]), np.concatenate([times for _, times in parts])
    )
