"""Split assignment: groups rows that ask the same and assigns each group to a split.

Input: the corpus. Output: for each row that passed its split and the first row of its group, or the two rows
it conflicts with. Rows are assigned in row order, each by the rows before it, so later rows never move one. A
group goes to the split that the hash of its question and the seed select, corrected within a role or domain
when a split would be more than one group off its share. Groups are never divided. An unconfirmed captured
reply starts a group only in train.

Rows whose turns are similar beyond the question line, as a whole or by long runs of rare words, are in one
group too. `SplitState` stores which split each row had, so that it keeps it: settings that change the split
start over, and missing or damaged files only cost time.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftwork.data.corpus.build import FEATURES_FORM, Keys, find_places
from graftwork.data.corpus.store import Corpus, read_arrays, write_arrays
from graftwork.data.dedup.fingerprints import (
    NO_PAIRS,
    TURN,
    TURN_RUNS,
    CorpusColumns,
    ExternalSort,
    ValueLookup,
    find_first,
    is_worth_looking_up,
    measure_rows,
    merge_pairs,
    only_fresh,
    pack,
    pair_neighbors,
    read_rows,
    rows_of,
    stream_rows,
    unpack,
)
from graftwork.data.dedup.questions import (
    IS_QUESTION,
    MOST_EMBEDDED,
    Embedder,
    PairFilter,
    Paraphrases,
    Questions,
    find_questions,
    learn_weights,
    open_windows,
    remember_weights,
    sample_before,
)
from graftwork.data.settings import DataSettings
from graftwork.records.base import fingerprint
from graftwork.records.dataset import SPLITS
from graftwork.text.similarity import TOLERANCE, Array, Clusters, RunWeights, distinct, number_text, spread
from graftwork.version import __version__

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
    """The keys of the turns, the first row with each key, and which rows are those first rows."""

    key: Array
    first: Array
    own: Array


def read_turns(corpus: CorpusColumns, *, passed: Array) -> UserTurns:
    key = corpus.column("turn")
    first = find_first(key, among=passed)
    firsts = np.flatnonzero(passed & (key != 0) & (first == np.arange(len(key))))
    return UserTurns(key, first, firsts)


def pair_turns(
    corpus: CorpusColumns,
    turns: UserTurns,
    *,
    passed: Array,
    threshold: float,
    accept: PairFilter | None = None,
    fresh: Array | None = None,
) -> Array:
    """Pair turns that are similar as a whole: LSH proposes, the weighted similarity decides.

    With `fresh`, here and below, return only pairs that contain a row marked there.
    """
    pairs = NO_PAIRS
    if fresh is not None and not fresh.any():
        return pairs
    for name in TURN:
        proposed = pair_neighbors(corpus.column(name)[turns.own], turns.own, fresh=fresh)
        if accept is not None:
            proposed = proposed[accept(*unpack(proposed))]
        pairs = merge_pairs([pairs, proposed])
    similar = []
    for window in open_windows(corpus.rows):
        low, high = np.searchsorted(unpack(pairs)[0], [window.start, window.stop])
        if low == high:
            continue
        learn = partial(_learn_weights, corpus, window, turns, passed)
        weights = remember_weights(corpus, "turn_weights", window, learn)
        for start in range(low, high, _PAIRS_AT_ONCE):
            part = pairs[start : min(start + _PAIRS_AT_ONCE, high)]
            positions = rows_of(part)
            sets = read_rows(corpus, "turn_runs", positions)
            similarity, _ = measure_rows(part, positions, sets, weights, sampled=TURN_RUNS)
            similar.append(part[similarity >= threshold - TOLERANCE])
    return merge_pairs(similar)


def _learn_weights(corpus: CorpusColumns, window: range, turns: UserTurns, passed: Array) -> RunWeights:
    sample = sample_before(window, passed=passed, turns=turns.key)
    return learn_weights(read_rows(corpus, "turn_runs", sample), turns.key[sample])


def pair_rare_questions(
    corpus: CorpusColumns, questions: Questions, *, passed: Array, fresh: Array | None = None
) -> Array:
    """Pair rows of the window with earlier rows that contain the same line ending as a question.

    The question line is not always recognized, least among the first rows of a log. So every question near
    the end of a turn counts if it is rare up to the later row.
    """
    low, high = questions.window.start, questions.window.stop
    few = _fresh_values(corpus, "lines", np.flatnonzero(passed[:high]), fresh)
    pairs = []
    with ExternalSort(high) as spill:
        lines_of, sizes_of = corpus.ragged("lines"), corpus.ragged("line_sizes")
        for (first, lines, offsets), (_, sizes, _) in zip(lines_of, sizes_of, strict=True):
            if first >= high:
                break
            positions = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
            asks = (lines & IS_QUESTION == IS_QUESTION) & (sizes >= QUESTION_RUNS) & (positions < high)
            asks[asks] = passed[positions[asks]] & ~np.isin(lines[asks] & ~IS_QUESTION, questions.boilerplate)
            selected = _find_values(few, lines, asks)
            spill.add(lines[selected], positions[selected])
        for entries in spill.partitions():
            rare = (entries.ranks() < RARE_ROWS) & (entries.positions >= low)
            for later, earlier in map(entries.pair, range(1, RARE_ROWS)):
                pairs.append(
                    pack(entries.positions[later[rare[later]]], entries.positions[earlier[rare[later]]])
                )
    return only_fresh(merge_pairs(pairs), fresh)


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
    positions = np.flatnonzero(passed)
    return _pair_grams(corpus, "reply_grams", positions, rare_rows=RARE_REPLIES, in_all=in_all, fresh=fresh)


def _pair_grams(
    corpus: CorpusColumns, name: str, members: Array, *, rare_rows: int, in_all: bool, fresh: Array | None
) -> Array:
    if fresh is not None and not fresh.any():
        return NO_PAIRS
    is_own = np.zeros(corpus.rows, dtype=bool)
    is_own[members] = True
    few = _fresh_values(corpus, name, members, fresh)
    shared: list[tuple[Array, Array]] = []
    if few is not None:
        expected = _GRAMS_LOOKED_UP * corpus.rows
    else:
        expected = sum(int(offsets[-1]) for *_, offsets in corpus.ragged(name))
    with ExternalSort(expected) as spill:
        for first, flat, offsets in corpus.ragged(name):
            positions = np.repeat(np.arange(first, first + len(offsets) - 1), np.diff(offsets))
            inside = _find_values(few, flat, is_own[positions])
            spill.add(flat[inside], positions[inside])
        for entries in spill.partitions():
            ranks = entries.ranks()
            rare = ranks < rare_rows
            if in_all:
                lengths = np.diff(np.append(np.flatnonzero(ranks == 0), len(ranks)))
                rare &= np.repeat(lengths, lengths) <= rare_rows
            pairs = [
                pack(entries.positions[later[rare[later]]], entries.positions[earlier[rare[later]]])
                for later, earlier in map(entries.pair, range(1, RARE_ROWS))
            ]
            shared.append(_count_pairs(only_fresh(np.concatenate(pairs), fresh), None))
            if len(shared) > 16:
                shared = [_join_counts(shared)]
    if not shared:
        return NO_PAIRS
    pairs_found, times = _join_counts(shared)
    positions = rows_of(pairs_found)
    counts = [np.zeros(0, dtype=np.int64)]
    for rows in stream_rows(corpus, name, positions):
        owners = rows.owners()
        values = rows.values[np.lexsort((rows.values, owners))]
        once = np.ones(len(values), dtype=bool)
        once[1:] = (values[1:] != values[:-1]) | (owners[1:] != owners[:-1])
        counts.append(np.bincount(owners[once], minlength=len(rows.offsets) - 1))
    sizes = np.concatenate(counts)
    fewer = np.minimum(*(sizes[np.searchsorted(positions, side)] for side in unpack(pairs_found)))
    enough: Array = pairs_found[times >= RARE_SHARE * fewer]
    return enough


def _fresh_values(
    corpus: CorpusColumns, name: str, positions: Array, fresh: Array | None
) -> ValueLookup | None:
    """Return the values of the fresh ones of these rows; None if those of all rows are needed."""
    if fresh is None or not is_worth_looking_up(fresh):
        return None
    return ValueLookup(distinct(read_rows(corpus, name, positions[fresh[positions]]).values))


def _find_values(few: ValueLookup | None, values: Array, inside: Array) -> Array:
    """Return the positions of the values that are looked for."""
    candidates: Array = np.flatnonzero(inside)
    return candidates if few is None else candidates[few.find(values[candidates])[0]]


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


_LABELS = {"role": "group", "domain": "domain"}
_ROUNDING = 1e-9


def draw(keys: Array, *, seed: int) -> Array:
    """Draw a number in [0, 1) for each key, differently per seed."""
    salt = np.uint64(number_text(f"seed {seed}"))
    drawn: Array = (spread(spread(keys) ^ salt) >> np.uint64(11)) / 2.0**53
    return drawn


class SplitShares:
    """Chooses the split of new groups, and counts groups by stratum."""

    def __init__(self, corpus: CorpusColumns, *, settings: DataSettings) -> None:
        group_keys = corpus.column("together")
        self._drawn = draw(np.where(group_keys != 0, group_keys, corpus.column("turn")), seed=settings.seed)
        self._strata: Array | None = None
        if settings.stratify != "nothing":
            self._strata = corpus.labels(_LABELS[settings.stratify])[0]
        held_out = {"validation": settings.validation, "test": settings.test}
        self._shares = [held_out.get(split, 1 - settings.validation - settings.test) for split in SPLITS]
        self._founded: dict[int, list[int]] = {}
        self.founders: list[int] = []

    def resume(self, founders: Array, split: Array) -> None:
        """Count the groups of an earlier assignment."""
        self.founders += founders.tolist()
        if self._strata is None or not len(founders):
            return
        cells = self._strata[founders].astype(np.int64) * len(SPLITS) + split[founders]
        for cell, count in zip(
            *(part.tolist() for part in np.unique(cells, return_counts=True)), strict=True
        ):
            stratum, assigned = divmod(cell, len(SPLITS))
            self._founded.setdefault(stratum, [0] * len(SPLITS))[assigned] += count

    def count(self, founder: int, split: int) -> int:
        """Count a group whose split is given."""
        self.founders.append(founder)
        if self._strata is not None:
            self._founded.setdefault(int(self._strata[founder]), [0] * len(SPLITS))[split] += 1
        return split

    def assign_group(self, founder: int) -> int:
        """Choose the split of a new group, as an index into SPLITS."""
        self.founders.append(founder)
        drawn = float(self._drawn[founder])
        if self._strata is None:
            return _pick(drawn, self._shares)
        founded = self._founded.setdefault(int(self._strata[founder]), [0] * len(SPLITS))
        total = sum(founded) + 1
        # What each split lacks of its share, this group included. The sum is 1, and none was more than 1 off
        # before: at most one split lacks more than a group, and at least one has room.
        lacking = [share * total - count for share, count in zip(self._shares, founded, strict=True)]
        most = max(range(len(SPLITS)), key=lacking.__getitem__)
        if lacking[most] >= 1 - _ROUNDING:
            split = most
        else:
            split = _pick(
                drawn,
                [
                    share if lack >= -_ROUNDING else 0.0
                    for share, lack in zip(self._shares, lacking, strict=True)
                ],
            )
        founded[split] += 1
        return split


def _pick(drawn: float, shares: list[float]) -> int:
    """Return the share that `drawn` falls into, held-out splits first."""
    point = drawn * sum(shares)
    for split in reversed(range(1, len(shares))):
        if point < shares[split]:
            return split
        point -= shares[split]
    return 0 if shares[0] > 0 else max(range(len(shares)), key=shares.__getitem__)


UNASSIGNED = 255
TRAIN = SPLITS.index("train")
_ROWS_AT_ONCE = 50_000


class SplitAssignment(NamedTuple):
    """`split` indexes SPLITS, 255 for a row in none; `group` is the first row of the group, or -1.

    `excluded` holds rows that ask the same as two rows in different splits, with those two rows. `founders`
    are the rows that were similar to none before them. Unconfirmed captured rows may follow others into a
    held-out split: see `find_unfit_references`. `kept` marks those that were kept when nothing leaked; before
    that is known, it is empty.
    """

    split: Array
    group: Array
    excluded: dict[int, tuple[int, int]]
    founders: Array
    kept: Array = np.zeros(0, dtype=bool)

    @property
    def rows(self) -> int:
        return len(self.split)


def find_unfit_references(corpus: CorpusColumns, assignment: SplitAssignment) -> Array:
    """Return the rows in held-out splits with unconfirmed replies of a model."""
    held_out = (assignment.split != UNASSIGNED) & (assignment.split != TRAIN)
    positions: Array = np.flatnonzero((corpus.column("unconfirmed") != 0) & held_out)
    return positions


def assign_splits(
    corpus: CorpusColumns,
    *,
    settings: DataSettings,
    embedder: Embedder | None = None,
    earlier: SplitAssignment | None = None,
    previous: Array | None = None,
) -> SplitAssignment:
    """Assign every row that passed to a split, or exclude it. An embedder also groups paraphrases.

    `previous` is the earlier split of each row, 255 for none: the row keeps it, even if the rows it was
    grouped with are gone.

    `earlier` is the assignment of the first rows by the same settings: then only later rows are compared,
    with the same result.
    """
    if embedder is not None and earlier is not None and earlier.rows < MOST_EMBEDDED:
        # Lines are embedded as first spelled: all are embedded again, in order.
        earlier = None
    since = earlier.rows if earlier is not None else 0
    fresh = np.arange(corpus.rows) >= since if earlier is not None else None
    passed = corpus.column("passed").astype(bool)
    turns = read_turns(corpus, passed=passed)
    threshold = settings.question_similarity
    turn_pairs = merge_pairs(
        [
            pair_turns(corpus, turns, passed=passed, threshold=threshold, fresh=fresh),
            pair_rare_grams(corpus, turns, fresh=fresh),
        ]
    )
    replies = pair_long_replies(corpus, passed=passed, fresh=fresh)
    paraphrases = Paraphrases(corpus, embedder) if embedder is not None else None
    table = _Assigner(corpus, turns_first=turns.first, passed=passed, settings=settings)
    if previous is not None:
        table.set_previous(previous)
    if earlier is not None:
        table.resume(earlier)
    for window_questions in find_questions(corpus, passed=passed, turns=turns.key, since=since):
        start, stop = max(window_questions.window.start, since), window_questions.window.stop
        table.open_window(window_questions, until=start)
        lines = window_questions.pair_alike(threshold=threshold, fresh=fresh)
        if paraphrases is not None and start < MOST_EMBEDDED:
            lines = merge_pairs([lines, paraphrases.pair(window_questions)])
        questions = merge_pairs(
            [pair_rare_questions(corpus, window_questions, passed=passed, fresh=fresh), replies]
        )
        for low in range(start, stop, _ROWS_AT_ONCE):
            high = min(low + _ROWS_AT_ONCE, stop)
            table.assign_rows(
                low,
                high,
                lines=_by_row(lines, low, high),
                turns=_by_row(turn_pairs, low, high),
                questions=_by_row(questions, low, high),
            )
    return table.result()


SimilarRows = dict[int, list[int]]


class _Assigner:
    """Tracks the first row of each split with each turn, line, conversation and key."""

    def __init__(
        self, corpus: CorpusColumns, *, turns_first: Array, passed: Array, settings: DataSettings
    ) -> None:
        rows = corpus.rows
        self._passed = passed
        self._split = array("B", bytes([UNASSIGNED])) * rows
        self._clusters = Clusters(rows)
        self._previous = array("B", bytes([UNASSIGNED])) * rows
        self._excluded: dict[int, tuple[int, int]] = {}
        self._unconfirmed = corpus.column("unconfirmed") != 0
        self._shares = SplitShares(corpus, settings=settings)
        # By the first row of a class: its first assigned row. All assigned rows of a class are in one split.
        keys = (corpus.column(name) for name in ("opening", "together"))
        shared = (find_first(key, among=passed) for key in keys if key.any())
        self._classes = [(first, _no_rows(rows)) for first in (turns_first, *shared)]
        self._excluded_turns: dict[int, tuple[int, int]] = {}
        self._excluded_lines: dict[int, tuple[int, int]] = {}
        self._line_first: Array = np.zeros(0, dtype=np.int64)
        self._is_probe: Array = np.zeros(0, dtype=bool)
        self._line_rows: list[array[int]] = []

    def set_previous(self, previous: Array) -> None:
        np.frombuffer(self._previous, dtype=np.uint8)[:] = previous

    def resume(self, earlier: SplitAssignment) -> None:
        """Restore the assignment of the first rows."""
        np.frombuffer(self._split, dtype=np.uint8)[: earlier.rows] = earlier.split
        for position in np.flatnonzero(
            (earlier.group >= 0) & (earlier.group != np.arange(earlier.rows))
        ).tolist():
            self._clusters.join(int(earlier.group[position]), position)
        self._excluded = dict(earlier.excluded)
        self._shares.resume(earlier.founders, earlier.split)
        assigned = np.flatnonzero(earlier.split != UNASSIGNED)
        for first, first_rows in self._classes:
            _place_first(first_rows, first, assigned)
        turns_first = self._classes[0][0]
        self._excluded_turns = {
            position: pair for position, pair in earlier.excluded.items() if turns_first[position] == position
        }

    def open_window(self, questions: Questions, *, until: int) -> None:
        """Index the rows assigned before `until` by the question lines of this window."""
        low, high = questions.window.start, questions.window.stop
        self._line_first = questions.first
        self._is_probe = np.zeros(high, dtype=bool)
        self._is_probe[questions.probes()] = True
        self._line_rows = [_no_rows(high) for _ in SPLITS]
        splits = np.frombuffer(self._split, dtype=np.uint8)[:until]
        for split, first_rows in enumerate(self._line_rows):
            _place_first(first_rows, questions.first, np.flatnonzero(splits == split))
        self._excluded_lines = {
            int(questions.first[position]): pair
            for position, pair in self._excluded.items()
            if low <= position < until and self._is_probe[position]
        }

    def assign_rows(
        self, low: int, high: int, *, lines: SimilarRows, turns: SimilarRows, questions: SimilarRows
    ) -> None:
        """Assign these rows, given the earlier rows that each has a similar line, a similar turn, or a rare
        question or long reply in common with.
        """
        passed = self._passed[low:high].tolist()
        probes = self._is_probe[low:high].tolist()
        line_of = self._line_first[low:high].tolist()
        classes_of = [first[low:high].tolist() for first, _ in self._classes]
        for index, position in enumerate(range(low, high)):
            if not passed[index]:
                continue
            classes = [of[index] for of in classes_of]
            line, turn = line_of[index], classes[0]
            conflicting = self._excluded_lines.get(line) or self._excluded_turns.get(turn)
            neighbors: list[int] = []
            if not conflicting:
                similar = (lines.get(position, ()), turns.get(position, ()), questions.get(position, ()))
                neighbors = self._neighbors(line, classes, *similar)
            conflict = conflicting or self._find_conflict(position, neighbors)
            if conflict:
                self._excluded[position] = conflict
                # Rows with exactly the same question follow the first of them.
                if turn == position:
                    self._excluded_turns[turn] = conflict
                if probes[index]:
                    self._excluded_lines[line] = conflict
            else:
                self._assign(position, line, classes, neighbors)

    def _neighbors(
        self,
        line: int,
        classes: list[int],
        lines: Sequence[int],
        turns: Sequence[int],
        questions: Sequence[int],
    ) -> list[int]:
        """Return assigned rows before this one that must be in the same split."""
        neighbors = [first_rows[line] for first_rows in self._line_rows]
        for row in lines:
            line_first = int(self._line_first[row])
            neighbors += [first_rows[line_first] for first_rows in self._line_rows]
        neighbors += [first_rows[of] for of, (_, first_rows) in zip(classes, self._classes, strict=True)]
        first, first_rows = self._classes[0]
        neighbors += [first_rows[int(first[row])] for row in turns]
        neighbors += [row for row in questions if self._split[row] != UNASSIGNED]
        return [row for row in neighbors if row >= 0]

    def _find_conflict(self, position: int, neighbors: list[int]) -> tuple[int, int] | None:
        for neighbor in neighbors[1:]:
            if self._split[neighbor] != self._split[neighbors[0]]:
                low, high = sorted((neighbors[0], neighbor))
                return low, high
        if neighbors and self._previous[position] not in (UNASSIGNED, self._split[neighbors[0]]):
            # It was in another split before, and now turns out to belong to these rows.
            return neighbors[0], position
        return None

    def _assign(self, position: int, line: int, classes: list[int], neighbors: list[int]) -> None:
        if neighbors:
            split = self._split[neighbors[0]]
        elif self._previous[position] != UNASSIGNED:
            split = self._shares.count(position, self._previous[position])
        elif self._unconfirmed[position]:
            # An unconfirmed reply cannot be held out, and takes no share from other rows.
            split = TRAIN
        else:
            split = self._shares.assign_group(position)
        self._split[position] = split
        for neighbor in neighbors:
            self._clusters.join(neighbor, position)
        if self._line_rows[split][line] < 0:
            self._line_rows[split][line] = position
        for of, (_, first_rows) in zip(classes, self._classes, strict=True):
            if first_rows[of] < 0:
                first_rows[of] = position

    def result(self) -> SplitAssignment:
        split = np.array(self._split, dtype=np.uint8)
        group = np.where(split == UNASSIGNED, -1, self._clusters.names())
        founders = np.array(self._shares.founders, dtype=np.int64)
        return SplitAssignment(split, group, self._excluded, founders)


def _no_rows(size: int) -> "array[int]":
    return array("i", [-1]) * size


def _place_first(first_rows: "array[int]", class_of: Array, positions: Array) -> None:
    """Set the first of these ascending rows for each class."""
    # From the last to the first, so that the first one remains.
    np.frombuffer(first_rows, dtype=np.int32)[class_of[positions[::-1]]] = positions[::-1]


def _by_row(pairs: Array, low: int, high: int) -> SimilarRows:
    """Return the earlier rows of each later row from `low` to before `high`."""
    start, stop = np.searchsorted(pairs, np.array([low, high], dtype=np.uint64) << np.uint64(32))
    earlier_rows: dict[int, list[int]] = {}
    for later, earlier in zip(*(side.tolist() for side in unpack(pairs[start:stop])), strict=True):
        earlier_rows.setdefault(later, []).append(earlier)
    return earlier_rows


SPLITS_FORM = 1
SPLIT_SETTINGS = ("seed", "validation", "test", "split_by", "stratify", "question_similarity", "paraphrases")


def write_previous_splits(path: Path, *, keys: Keys, split: Array, settings: DataSettings) -> None:
    """Store these splits, and those of rows that are absent this time: they may come back."""
    old_keys, old_split = _read_splits(path, settings=settings)
    stood = find_places(keys, old_keys)
    before = np.where(stood >= 0, np.append(old_split, UNASSIGNED)[stood], UNASSIGNED)
    now = np.where(split == UNASSIGNED, before, split)
    away = find_places(old_keys, keys) < 0
    arrays = {
        "dealt_by": np.array(_fingerprint_split_settings(settings)),
        "keys": np.concatenate((keys, old_keys[away])).astype(np.uint64),
        "split": np.concatenate((now, old_split[away])).astype(np.uint8),
    }
    write_arrays(path, arrays)


def read_previous_splits(path: Path, *, keys: Keys, settings: DataSettings) -> Array:
    """Return the previous split of each of these rows; 255 for none."""
    stored_keys, split = _read_splits(path, settings=settings)
    positions = find_places(keys, stored_keys)
    previous: Array = np.where(positions >= 0, np.append(split, UNASSIGNED)[positions], UNASSIGNED)
    return previous.astype(np.uint8)


def _read_splits(path: Path, *, settings: DataSettings) -> tuple[Keys, Array]:
    """Read the keys and the splits stored under the same settings."""
    stored = read_arrays(path, ("dealt_by", "keys", "split"))
    if stored and str(stored["dealt_by"]) == _fingerprint_split_settings(settings):
        return stored["keys"], stored["split"]
    return np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint8)


def _fingerprint_split_settings(settings: DataSettings) -> str:
    return fingerprint([SPLITS_FORM, settings.model_dump(mode="json", include=set(SPLIT_SETTINGS))])


ASSIGNMENT_FORM = 1


Identify = Callable[[int], str]
"""A digest of the first rows of the corpus: everything that was read of them."""


def write_assignment(
    path: Path, decided: SplitAssignment, *, settings: DataSettings, identify: Identify, embedded: bool
) -> None:
    """Store the assignment. `embedded` says whether an embedder was used."""
    founded = np.zeros(decided.rows, dtype=bool)
    founded[decided.founders] = True
    excluded = [(position, *pair) for position, pair in decided.excluded.items()]
    made_by = _fingerprint_assignment(settings, embedded=embedded, rows=identify(decided.rows))
    arrays = {
        "made_by": np.array(made_by),
        "split": decided.split.astype(np.uint8),
        "group": decided.group.astype(np.int32),
        "aside": np.array(excluded, dtype=np.int64).reshape(-1, 3),
        "founded": np.packbits(founded),
        "kept": np.packbits(decided.kept.astype(bool)),
    }
    # Not durable: after a power cut it is computed again.
    write_arrays(path, arrays, durable=False)


def read_assignment(
    path: Path, *, rows: int, settings: DataSettings, identify: Identify, embedded: bool
) -> SplitAssignment | None:
    """Read the assignment of the first of these `rows`, if it still holds."""
    stored = read_arrays(path, ("made_by", "split", "group", "aside", "founded", "kept"))
    covered = len(stored["split"]) if stored else rows + 1
    if covered > rows or str(stored["made_by"]) != _fingerprint_assignment(
        settings, embedded=embedded, rows=identify(covered)
    ):
        return None
    return SplitAssignment(
        split=stored["split"],
        group=stored["group"].astype(np.int64),
        excluded={position: (first, second) for position, first, second in stored["aside"].tolist()},
        founders=np.flatnonzero(np.unpackbits(stored["founded"], count=covered)),
        kept=np.unpackbits(stored["kept"], count=covered).astype(bool),
    )


def _fingerprint_assignment(settings: DataSettings, *, embedded: bool, rows: str) -> str:
    # Log files may come and go: the rows themselves identify the input.
    dumped = settings.model_dump(mode="json", exclude={"logs", "repair"})
    return fingerprint([ASSIGNMENT_FORM, __version__, dumped, embedded, rows])


ASSIGNMENT_FILE, SPLITS_FILE = "decided.npz", "pins.npz"


class SplitState:
    """`previous` is the previous split of each row; `earlier` the full assignment of the first rows."""

    def __init__(self, folder: Path, corpus: Corpus, *, settings: DataSettings) -> None:
        self._folder, self._settings = folder, settings
        self._keys = corpus.column("line_key")
        self._passed = corpus.column("passed").astype(bool)
        self.previous: Array = read_previous_splits(folder / SPLITS_FILE, keys=self._keys, settings=settings)
        self.earlier: SplitAssignment | None = read_assignment(
            folder / ASSIGNMENT_FILE,
            rows=corpus.rows,
            settings=settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    def store(self, assignment: SplitAssignment, kept: Array) -> None:
        write_previous_splits(
            self._folder / SPLITS_FILE, keys=self._keys, split=assignment.split, settings=self._settings
        )
        write_assignment(
            self._folder / ASSIGNMENT_FILE,
            assignment._replace(kept=kept),
            settings=self._settings,
            identify=self._identify,
            embedded=self._embedded,
        )

    @property
    def _embedded(self) -> bool:
        return self._settings.paraphrases != "off"

    def _identify(self, rows: int) -> str:
        digest = hashlib.sha256(str(FEATURES_FORM).encode())
        digest.update(self._keys[:rows].tobytes())
        digest.update(self._passed[:rows].tobytes())
        return digest.hexdigest()
