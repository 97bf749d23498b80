"""Duplicates, near-duplicates and contradictions.

Input: the corpus. Output: for each row to drop, the step that drops it and the row that stays instead.
Conflicts come first: of a reply that was given, corrected and given again, the last one stays. LSH proposes
near-duplicates; the weighted Jaccard similarity over runs of three words of the whole text decides. The
system prompt counts only where prompts must be identical.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from graftwork.data.dedup.fingerprints import (
    NEAR,
    NO_PAIRS,
    Arrays,
    CorpusColumns,
    find_first,
    join_ragged,
    measure_rows,
    merge_pairs,
    pair_neighbors,
    rows_of,
    unpack,
)
from graftwork.data.dedup.questions import find_questions, remember_weights, sample_before
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction
from graftwork.text.similarity import (
    NO_WEIGHTS,
    TOLERANCE,
    Array,
    Clusters,
    Ragged,
    RunWeights,
    as_sets,
    number_words,
    run_words,
    spread,
    weigh,
)
from graftwork.text.words import words

# Whole texts are large: their weights are learned from fewer rows than those of lines.
TEXT_SAMPLE_ROWS = 4096
_ROWS_AT_ONCE = 2000
# Characters of the pairs that are compared at once; their runs take about as many bytes.
_CHARACTERS_AT_ONCE = 40_000_000


def turns_text(row: Interaction) -> str:
    """Return everything before the reply except the system prompt."""
    return "\n".join(message.content for message in row.messages if message.role != "system")


class TextComparer:
    """Compares pairs window by window; windows must come in order."""

    def __init__(self, corpus: CorpusColumns, *, passed: Array, turns: Array) -> None:
        self._corpus = corpus
        self._passed = passed
        self._turns = turns
        self._lengths = corpus.column("length").astype(np.int64)
        self._held: dict[int, Array] = {}

    def choose(self, pairs: Array, *, window: range, threshold: float) -> Array:
        """Return the pairs that are similar. All have their later row in the window."""
        weights = remember_weights(self._corpus, "text_weights", window, lambda: self._learn(window))
        later, earlier = unpack(pairs)
        sizes = np.cumsum(self._lengths[later] + self._lengths[earlier]) // _CHARACTERS_AT_ONCE
        similar = []
        for batch in np.unique(sizes):
            part = pairs[sizes == batch]
            positions = rows_of(part)
            texts = [(whole, reply) for _, whole, reply in _read_sets(self._corpus, positions)]
            # Turns and reply together have to be similar, and the reply alone.
            for sets in map(join_ragged, zip(*texts, strict=True)):
                if len(part):
                    similarity, _ = measure_rows(part, positions, sets, weights)
                    part = part[similarity >= threshold - TOLERANCE]
            similar.append(part)
        return np.concatenate(similar)

    def _learn(self, window: range) -> RunWeights:
        positions = sample_before(window, passed=self._passed, turns=self._turns, most=TEXT_SAMPLE_ROWS)
        if not len(positions):
            return NO_WEIGHTS
        sample = set(positions.tolist())
        self._held = {position: values for position, values in self._held.items() if position in sample}
        missing = np.array(sorted(sample - self._held.keys()), dtype=np.int64)
        for batch, whole, _ in _read_sets(self._corpus, missing):
            for index, position in enumerate(batch.tolist()):
                self._held[position] = whole.values[whole.offsets[index] : whole.offsets[index + 1]]
        sets = [self._held[position] for position in positions.tolist()]
        offsets = np.concatenate(([0], np.cumsum([len(values) for values in sets])))
        return weigh(Ragged(np.concatenate(sets), offsets))


def _read_sets(corpus: CorpusColumns, positions: Array) -> Iterator[tuple[Array, Ragged, Ragged]]:
    """Yield some of the rows with the runs of their turns and reply together, and of the reply alone."""
    for start in range(0, len(positions), _ROWS_AT_ONCE):
        batch = positions[start : start + _ROWS_AT_ONCE]
        wholes, replies = [], []
        for _, row in corpus.rows_at(batch.tolist()):
            reply = words(row.reply)
            wholes.append(words(turns_text(row)) + reply)
            replies.append(reply)
        yield batch, _as_sets(wholes), _as_sets(replies)


def _as_sets(texts: list[list[str]]) -> Ragged:
    offsets = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    return as_sets(
        run_words(Ragged(number_words([word for text in texts for word in text]), offsets), size=3)
    )


CONFLICT, DUPLICATE, NEAR_DUPLICATE = 1, 2, 3


class Repeats(NamedTuple):
    """For each row, the row that stays instead (-1: it stays) and the step: conflict 1, duplicate 2,
    near-duplicate 3.

    Where all replies to a prompt are dropped because they contradict each other, `instead` names the last
    of them, which is dropped too. `worse` has, for rows that stay, the one with the worse reply to their
    prompt.
    """

    instead: Array
    step: Array
    worse: dict[int, int]


def find_repeats(corpus: CorpusColumns, *, settings: DataSettings) -> Repeats:
    """Find conflicts, then exact duplicates, then near-duplicates."""
    passed = corpus.column("passed").astype(bool)
    repeats = Repeats(np.full(corpus.rows, -1, dtype=np.int64), np.zeros(corpus.rows, dtype=np.uint8), {})
    prompt, reply = corpus.column("prompt"), corpus.column("reply")
    unconfirmed = corpus.column("unconfirmed") != 0
    wins = np.zeros(corpus.rows, dtype=bool)
    wins[list(corpus.pairs)] = True
    _drop_conflicts(
        repeats, prompt, reply, passed=passed, unconfirmed=unconfirmed, wins=wins, rule=settings.conflicts
    )
    exchange = spread(prompt) + reply
    # The worse reply is not a row of its own, however often it was logged.
    winners = {int(exchange[worse]): better for better, worse in corpus.pairs.items()}
    lost = np.flatnonzero(passed & np.isin(exchange, np.array(list(winners), dtype=exchange.dtype)))
    for position in lost.tolist():
        repeats.instead[position], repeats.step[position] = winners[int(exchange[position])], CONFLICT
    del prompt, reply
    # An unconfirmed reply of a model never replaces another row.
    ranks = _rank(corpus, settings.keep_duplicate) + np.where(unconfirmed, 4 * corpus.rows, 0)
    alive = passed & (repeats.instead < 0)
    stays = _choose_one(find_first(exchange, among=alive), ranks)
    _drop(repeats, np.flatnonzero(alive & (stays != np.arange(corpus.rows))), stays, DUPLICATE)
    first = find_first(exchange, among=passed)
    del exchange
    # Near-duplicates are searched among the first rows of each content, whichever of its rows stays: the
    # pairs compared must not depend on later rows.
    standing = np.full(corpus.rows, -1, dtype=np.int64)
    remaining = np.flatnonzero(passed & (repeats.instead < 0))
    standing[first[remaining]] = remaining
    pairs = find_near_pairs(corpus, first=first, passed=passed, standing=standing >= 0, settings=settings)
    clusters = Clusters(corpus.rows)
    for later, earlier in zip(*(standing[side].tolist() for side in unpack(pairs)), strict=True):
        clusters.join(later, earlier)
    stays = _choose_one(clusters.names(), ranks)
    _drop(repeats, remaining[stays[remaining] != remaining], stays, NEAR_DUPLICATE)
    # The row that stays may itself have been dropped in a later step.
    while len(gone := np.flatnonzero(repeats.instead >= 0)):
        onward = repeats.instead[repeats.instead[gone]]
        gone = gone[(onward >= 0) & (onward != repeats.instead[gone])]
        if not len(gone):
            break
        repeats.instead[gone] = repeats.instead[repeats.instead[gone]]
    for better, worse in corpus.pairs.items():
        position = better if repeats.instead[better] < 0 else int(repeats.instead[better])
        # The same exchange may occur elsewhere; what is nearly the same has a different prompt.
        if all(corpus.column(name)[position] == corpus.column(name)[better] for name in ("prompt", "reply")):
            repeats.worse[position] = worse
    return repeats


def find_near_pairs(
    corpus: CorpusColumns, *, first: Array, passed: Array, standing: Array, settings: DataSettings
) -> Array:
    """Find rows whose whole text, question and reply are all similar, among those that stand.

    Long sources that two questions share would make the whole text similar, and a refusal is the same reply
    to everything. Paraphrased questions are kept; they are grouped later, so that they stay in one split.
    """
    firsts = np.flatnonzero(passed & (first == np.arange(corpus.rows)))

    def propose(since: int, earlier_pairs: Arrays | None) -> Arrays:
        # Rows that share a band, whatever comes later. The earlier pairs are those of rows before `since`.
        if earlier_pairs is not None and since == corpus.rows:
            return earlier_pairs
        fresh = np.arange(corpus.rows) >= since if earlier_pairs is not None else None
        pairs = earlier_pairs[0] if earlier_pairs is not None else NO_PAIRS
        for name in NEAR:
            pairs = merge_pairs([pairs, pair_neighbors(corpus.column(name)[firsts], firsts, fresh=fresh)])
        return (pairs,)

    (proposed,) = corpus.grow("near_proposed", propose)
    later, earlier = unpack(proposed)
    candidates = proposed[standing[later] & standing[earlier]]

    def judge(_since: int, earlier_pairs: Arrays | None) -> Arrays:
        # A pair is judged by rows before it: what was judged once stays so.
        judged, similar_pairs = earlier_pairs if earlier_pairs is not None else (NO_PAIRS, NO_PAIRS)
        new = candidates[~np.isin(candidates, judged)]
        compared = _compare(corpus, new, passed=passed, threshold=settings.near_duplicate)
        return merge_pairs([judged, new]), merge_pairs([similar_pairs, *compared])

    _, alike = corpus.grow(f"near_judged_{settings.near_duplicate:g}", judge)
    near_pairs: Array = candidates[np.isin(candidates, alike)]
    return near_pairs


def _compare(corpus: CorpusColumns, pairs: Array, *, passed: Array, threshold: float) -> Iterator[Array]:
    """Yield those of the pairs that are similar."""
    if not len(pairs):
        return
    turns, rows = corpus.column("turn"), unpack(pairs)[0]
    comparer = TextComparer(corpus, passed=passed, turns=turns)
    for questions in find_questions(corpus, passed=passed, turns=turns, since=int(rows[0])):
        window_pairs = pairs[slice(*np.searchsorted(rows, [questions.window.start, questions.window.stop]))]
        if len(window_pairs):
            positions = rows_of(window_pairs)
            similarity, _ = measure_rows(
                window_pairs, positions, questions.runs_of(positions), questions.weights
            )
            window_pairs = window_pairs[similarity >= threshold - TOLERANCE]
        if len(window_pairs):
            yield comparer.choose(window_pairs, window=questions.window, threshold=threshold)


def _drop_conflicts(
    repeats: Repeats,
    prompt: Array,
    reply: Array,
    *,
    passed: Array,
    unconfirmed: Array,
    wins: Array,
    rule: str,
) -> None:
    """Of different replies to the same prompt, keep the one logged last, or none; with scores, the best.
    Unconfirmed replies of a model do not conflict with other replies: they are dropped if they differ.
    """
    if rule == "keep_all":
        return
    positions = np.flatnonzero(passed)
    order = positions[np.lexsort((positions, ~unconfirmed[positions], wins[positions], prompt[positions]))]
    starts = np.flatnonzero(np.concatenate(([True], prompt[order][1:] != prompt[order][:-1]))[: len(order)])
    lengths = np.diff(np.append(starts, len(order)))
    last = np.repeat(order[starts + lengths - 1], lengths)
    gone = reply[order] != reply[last]
    if rule == "drop_all" and len(starts):
        among_equals = gone & (unconfirmed[order] == unconfirmed[last]) & ~wins[last]
        gone = gone | np.repeat(np.logical_or.reduceat(among_equals, starts), lengths)
    repeats.instead[order[gone]] = last[gone]
    repeats.step[order[gone]] = CONFLICT


def _rank(corpus: CorpusColumns, rule: str) -> Array:
    """Rank the rows: the lowest rank of a cluster stays."""
    positions = np.arange(corpus.rows, dtype=np.int64)
    if rule == "first":
        return positions
    if rule == "last":
        return -positions
    order = np.lexsort((positions, -corpus.column("length").astype(np.int64)))
    ranks = np.empty(corpus.rows, dtype=np.int64)
    ranks[order] = positions
    return ranks


def _choose_one(members_of: Array, ranks: Array) -> Array:
    """Return, for each row, the row of its cluster that stays."""
    rows = len(members_of)
    best = np.full(rows, np.iinfo(np.int64).max)
    np.minimum.at(best, members_of, ranks)
    winners = np.arange(rows, dtype=np.int64)
    is_best = ranks == best[members_of]
    winners[members_of[is_best]] = np.flatnonzero(is_best)
    return winners[members_of]


def _drop(repeats: Repeats, gone: Array, stays: Array, step: int) -> None:
    repeats.instead[gone] = stays[gone]
    repeats.step[gone] = step
