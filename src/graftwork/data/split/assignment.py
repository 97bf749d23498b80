"""Split assignment: groups rows that ask the same and assigns each group to a split.

In: the corpus. Out: for each row that passed its split and the first row of its group, or the two rows it
conflicts with. Rows are assigned in row order, each by the rows before it, so later rows move none. A group
goes to the split that the hash of its question and the seed select, corrected within a role or domain when
a split would be more than one group off its share. Groups are never divided. An unconfirmed captured reply
starts a group only in train.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graftwork.data.dedup.lsh import CorpusColumns, find_first, merge_pairs, unpack
from graftwork.data.dedup.paraphrases import MOST_ROWS, Embedder, Paraphrases
from graftwork.data.dedup.questions import Questions, find_questions
from graftwork.data.settings import DataSettings
from graftwork.data.split.groups import (
    pair_long_replies,
    pair_rare_grams,
    pair_rare_questions,
    pair_turns,
    read_turns,
)
from graftwork.records.dataset import SPLITS
from graftwork.text.similarity import Array, Clusters, number_text, spread

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
        together = corpus.column("together")
        self._drawn = draw(np.where(together != 0, together, corpus.column("turn")), seed=settings.seed)
        self._strata: Array | None = None
        if settings.stratify != "nothing":
            self._strata = corpus.labels(_LABELS[settings.stratify]).numbers
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
    at = drawn * sum(shares)
    for split in reversed(range(1, len(shares))):
        if at < shares[split]:
            return split
        at -= shares[split]
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
    found: Array = np.flatnonzero((corpus.column("unconfirmed") != 0) & held_out)
    return found


def assign_splits(
    corpus: CorpusColumns,
    *,
    settings: DataSettings,
    embedder: Embedder | None = None,
    known: SplitAssignment | None = None,
    previous: Array | None = None,
) -> SplitAssignment:
    """Assign every row that passed to a split, or exclude it. An embedder also groups paraphrases.

    `previous` is the earlier split of each row, 255 for none: the row keeps it, even if the rows it was
    grouped with are gone.

    `known` is the assignment of the first rows by the same settings: then only later rows are compared,
    with the same result.
    """
    if embedder is not None and known is not None and known.rows < MOST_ROWS:
        # Lines are embedded as first spelled: all are embedded again, in order.
        known = None
    since = known.rows if known is not None else 0
    fresh = np.arange(corpus.rows) >= since if known is not None else None
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
    if known is not None:
        table.resume(known)
    for asked in find_questions(corpus, passed=passed, turns=turns.key, since=since):
        start, stop = max(asked.window.low, since), asked.window.high
        table.open_window(asked, until=start)
        lines = asked.pair_alike(threshold=threshold, fresh=fresh)
        if paraphrases is not None and start < MOST_ROWS:
            lines = merge_pairs([lines, paraphrases.pair(asked)])
        questions = merge_pairs([pair_rare_questions(corpus, asked, passed=passed, fresh=fresh), replies])
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

    def resume(self, known: SplitAssignment) -> None:
        """Restore the assignment of the first rows."""
        np.frombuffer(self._split, dtype=np.uint8)[: known.rows] = known.split
        for place in np.flatnonzero((known.group >= 0) & (known.group != np.arange(known.rows))).tolist():
            self._clusters.join(int(known.group[place]), place)
        self._excluded = dict(known.excluded)
        self._shares.resume(known.founders, known.split)
        assigned = np.flatnonzero(known.split != UNASSIGNED)
        for first, first_rows in self._classes:
            _place_first(first_rows, first, assigned)
        turns_first = self._classes[0][0]
        self._excluded_turns = {
            place: pair for place, pair in known.excluded.items() if turns_first[place] == place
        }

    def open_window(self, asked: Questions, *, until: int) -> None:
        """Index the rows assigned before `until` by the question lines of this window."""
        low, high = asked.window.low, asked.window.high
        self._line_first = asked.first
        self._is_probe = np.zeros(high, dtype=bool)
        self._is_probe[asked.probes()] = True
        self._line_rows = [_no_rows(high) for _ in SPLITS]
        splits = np.frombuffer(self._split, dtype=np.uint8)[:until]
        for split, first_rows in enumerate(self._line_rows):
            _place_first(first_rows, asked.first, np.flatnonzero(splits == split))
        self._excluded_lines = {
            int(asked.first[place]): pair
            for place, pair in self._excluded.items()
            if low <= place < until and self._is_probe[place]
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
        for at, place in enumerate(range(low, high)):
            if not passed[at]:
                continue
            classes = [of[at] for of in classes_of]
            line, turn = line_of[at], classes[0]
            conflicting = self._excluded_lines.get(line) or self._excluded_turns.get(turn)
            neighbours: list[int] = []
            if not conflicting:
                similar = (lines.get(place, ()), turns.get(place, ()), questions.get(place, ()))
                neighbours = self._neighbours(line, classes, *similar)
            conflict = conflicting or self._find_conflict(place, neighbours)
            if conflict:
                self._excluded[place] = conflict
                # Rows with exactly the same question follow the first of them.
                if turn == place:
                    self._excluded_turns[turn] = conflict
                if probes[at]:
                    self._excluded_lines[line] = conflict
            else:
                self._assign(place, line, classes, neighbours)

    def _neighbours(
        self,
        line: int,
        classes: list[int],
        lines: Sequence[int],
        turns: Sequence[int],
        questions: Sequence[int],
    ) -> list[int]:
        """Return assigned rows before this one that must be in the same split."""
        found = [first_rows[line] for first_rows in self._line_rows]
        for other in lines:
            there = int(self._line_first[other])
            found += [first_rows[there] for first_rows in self._line_rows]
        found += [first_rows[of] for of, (_, first_rows) in zip(classes, self._classes, strict=True)]
        first, first_rows = self._classes[0]
        found += [first_rows[int(first[other])] for other in turns]
        found += [other for other in questions if self._split[other] != UNASSIGNED]
        return [other for other in found if other >= 0]

    def _find_conflict(self, place: int, neighbours: list[int]) -> tuple[int, int] | None:
        for other in neighbours[1:]:
            if self._split[other] != self._split[neighbours[0]]:
                low, high = sorted((neighbours[0], other))
                return low, high
        if neighbours and self._previous[place] not in (UNASSIGNED, self._split[neighbours[0]]):
            # It was in another split before, and now turns out to belong to these rows.
            return neighbours[0], place
        return None

    def _assign(self, place: int, line: int, classes: list[int], neighbours: list[int]) -> None:
        if neighbours:
            split = self._split[neighbours[0]]
        elif self._previous[place] != UNASSIGNED:
            split = self._shares.count(place, self._previous[place])
        elif self._unconfirmed[place]:
            # An unconfirmed reply cannot be held out, and takes no share from other rows.
            split = TRAIN
        else:
            split = self._shares.assign_group(place)
        self._split[place] = split
        for other in neighbours:
            self._clusters.join(other, place)
        if self._line_rows[split][line] < 0:
            self._line_rows[split][line] = place
        for of, (_, first_rows) in zip(classes, self._classes, strict=True):
            if first_rows[of] < 0:
                first_rows[of] = place

    def result(self) -> SplitAssignment:
        split = np.array(self._split, dtype=np.uint8)
        group = np.where(split == UNASSIGNED, -1, self._clusters.names())
        founders = np.array(self._shares.founders, dtype=np.int64)
        return SplitAssignment(split, group, self._excluded, founders)


def _no_rows(size: int) -> "array[int]":
    return array("i", [-1]) * size


def _place_first(first_rows: "array[int]", class_of: Array, places: Array) -> None:
    """Set the first of these ascending rows for each class."""
    # From the last to the first, so that the first one remains.
    np.frombuffer(first_rows, dtype=np.int32)[class_of[places[::-1]]] = places[::-1]


def _by_row(pairs: Array, low: int, high: int) -> SimilarRows:
    """Return the earlier rows of each later row from `low` to before `high`."""
    start, stop = np.searchsorted(pairs, np.array([low, high], dtype=np.uint64) << np.uint64(32))
    found: dict[int, list[int]] = {}
    for later, earlier in zip(*(side.tolist() for side in unpack(pairs[start:stop])), strict=True):
        found.setdefault(later, []).append(earlier)
    return found
