"""Pairs of rows judged on their whole text.

In: pairs that the prints propose. Out: those that are really alike, as a whole and in the reply, by
the weighted Jaccard measure over runs of three words. Texts are fetched in the order of the corpus,
some at a time. The system prompt takes no part.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from graftwork.data.bands import Columns, join_ragged, unpack
from graftwork.data.ground import Window, ground_places
from graftwork.records.interaction import Interaction
from graftwork.text.compare import (
    NO_WEIGHTS,
    TOLERANCE,
    Array,
    Ragged,
    Weights,
    as_sets,
    measure_pairs,
    number_words,
    run_words,
    weigh,
)
from graftwork.text.normalise import words

# Whole texts are large: their ground is learned from fewer rows than that of lines.
GROUND_ROWS = 4096
_ROWS_AT_ONCE = 2000
# Characters of both sides of the pairs that are judged at once; their runs take about as many bytes.
_CHARACTERS_AT_ONCE = 40_000_000


def turns_text(row: Interaction) -> str:
    """All that stood before the reply but the system prompt."""
    return "\n".join(message.content for message in row.messages if message.role != "system")


class _Sets(NamedTuple):
    """The runs of some rows: turns and reply together, and the reply alone."""

    whole: Ragged
    reply: Ragged


class TextJudge:
    """Judges pairs window by window; windows must come in order."""

    def __init__(self, corpus: Columns, *, passed: Array, turns: Array) -> None:
        self._corpus = corpus
        self._passed = passed
        self._turns = turns
        self._lengths = corpus.column("length").astype(np.int64)
        self._held: dict[int, Array] = {}

    def choose(self, pairs: Array, *, window: Window, threshold: float) -> Array:
        """The pairs (all with their later row in the window) that are alike."""
        weights = self._learn(window)
        later, earlier = unpack(pairs)
        sizes = np.cumsum(self._lengths[later] + self._lengths[earlier]) // _CHARACTERS_AT_ONCE
        chosen = []
        for batch in np.unique(sizes):
            part = pairs[sizes == batch]
            chosen.append(part[self._are_alike(part, weights=weights, threshold=threshold)])
        return np.concatenate(chosen)

    def _are_alike(self, pairs: Array, *, weights: Weights, threshold: float) -> Array:
        later, earlier = unpack(pairs)
        places = np.unique(np.concatenate((later, earlier)))
        sets = _join([part for _, part in _read_sets(self._corpus, places)])
        one, other = np.searchsorted(places, later), np.searchsorted(places, earlier)
        least = threshold - TOLERANCE
        alike = np.ones(len(pairs), dtype=bool)
        for part in sets:
            alike &= measure_pairs(part, one, other, weighed=weights.of(part.values)).likeness >= least
        return alike

    def _learn(self, window: Window) -> Weights:
        places = ground_places(window, passed=self._passed, turns=self._turns, most=GROUND_ROWS)
        if not len(places):
            return NO_WEIGHTS
        wanted = set(places.tolist())
        self._held = {place: values for place, values in self._held.items() if place in wanted}
        missing = np.array(sorted(wanted - self._held.keys()), dtype=np.int64)
        for some, sets in _read_sets(self._corpus, missing):
            for at, place in enumerate(some.tolist()):
                self._held[place] = sets.whole.values[sets.whole.offsets[at] : sets.whole.offsets[at + 1]]
        held = [self._held[place] for place in places.tolist()]
        offsets = np.concatenate(([0], np.cumsum([len(values) for values in held])))
        return weigh(Ragged(np.concatenate(held), offsets))


def _read_sets(corpus: Columns, places: Array) -> Iterator[tuple[Array, _Sets]]:
    for start in range(0, len(places), _ROWS_AT_ONCE):
        some = places[start : start + _ROWS_AT_ONCE]
        wholes, replies = [], []
        for _, row in corpus.rows_at(some.tolist()):
            reply = words(row.reply)
            wholes.append(words(turns_text(row)) + reply)
            replies.append(reply)
        yield some, _Sets(_as_sets(wholes), _as_sets(replies))


def _as_sets(texts: list[list[str]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    return as_sets(
        run_words(Ragged(number_words([word for text in texts for word in text]), offsets), size=3)
    )


def _join(parts: list[_Sets]) -> _Sets:
    return _Sets(join_ragged([part.whole for part in parts]), join_ragged([part.reply for part in parts]))
