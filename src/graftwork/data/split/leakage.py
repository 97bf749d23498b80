"""Proves that held-out questions are not trained on.

Input: the split assignment and which rows are kept. Output: nothing, or an error that names two rows.
Compares the rows again with the same measures instead of trusting the grouping, so that correctly grouped
rows never fail.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from graftwork.data.dedup.fingerprints import CorpusColumns, find_first, unpack
from graftwork.data.dedup.questions import MOST_EMBEDDED, Embedder, Paraphrases, find_questions
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import (
    UNASSIGNED,
    SplitAssignment,
    pair_long_replies,
    pair_rare_grams,
    pair_rare_questions,
    pair_turns,
    read_turns,
)
from graftwork.records.dataset import SPLITS
from graftwork.records.errors import NegativeResult
from graftwork.text.similarity import Array

Kind = Literal[
    "same_turn",
    "same_line",
    "same_question",
    "same_conversation",
    "same_key",
    "alike_line",
    "paraphrase",
    "alike_turn",
    "rare_words",
    "long_reply",
]

_WHY: dict[Kind, str] = {
    "same_turn": "ask the same",
    "same_line": "ask the same in the line that asks",
    "same_question": "hold the same question",
    "same_conversation": "belong to one conversation",
    "same_key": "have the same key under data.split_by",
    "alike_line": "ask nearly the same",
    "alike_turn": "ask nearly the same",
    "paraphrase": "ask the same in other words",
    "long_reply": "have nearly the same long reply",
    "rare_words": "share long runs of words that hardly any other row has",
}
_NEVER = np.iinfo(np.int64).max


def find_leaks(
    corpus: CorpusColumns,
    assignment: SplitAssignment,
    kept: Array,
    *,
    settings: DataSettings,
    embedder: Embedder | None = None,
    earlier: SplitAssignment | None = None,
    most: int = 100,
) -> list[tuple[int, int, Kind]]:
    """Find training and held-out rows that ask the same: at most `most` of each kind, in order.

    `earlier` is an assignment of the first rows that was checked with the same settings: pairs of unchanged
    rows are then skipped.
    """
    passed = corpus.column("passed").astype(bool)
    # Rows that are new, changed their split, or were not kept when the others were checked.
    moved = np.ones(corpus.rows, dtype=bool)
    if earlier is not None:
        before = slice(earlier.rows)
        moved[before] = assignment.split[before] != earlier.split
        moved[before] |= (kept & passed)[before] & ~earlier.kept
    since = int(np.argmax(moved)) if moved.any() else corpus.rows
    if embedder is not None and earlier is not None and since < 2 * MOST_EMBEDDED:
        # Embeddings are not stored. All windows with embedded rows end before this row.
        earlier, since = None, 0
    # Rows for reinforcement learning are trained on too; their split comes after SPLITS.
    held_out = np.isin(assignment.split, [SPLITS.index("validation"), SPLITS.index("test")])
    assigned = assignment.split != UNASSIGNED
    sides = (kept & passed & assigned & ~held_out, kept & passed & held_out, assigned)
    turns = read_turns(corpus, passed=passed)
    threshold = settings.question_similarity
    leaks: list[tuple[int, int, Kind]] = []

    def note(kind: Kind, pairs: Iterator[tuple[int, int]]) -> None:
        new = sorted({(trained, held_out, kind) for trained, held_out in pairs})
        leaks.extend(new[:most])

    row_sides = _ClassSides(np.arange(corpus.rows), sides)
    turn_sides = _ClassSides(turns.first, sides)
    note("same_turn", turn_sides.in_both())
    for kind, name in _SHARED_KEYS:
        note(kind, _ClassSides(find_first(corpus.column(name), among=passed), sides).in_both())
    fresh = None if earlier is None else _spread_over(turns.first, moved)
    similar_pairs = pair_turns(
        corpus, turns, passed=passed, threshold=threshold, accept=turn_sides.are_parted, fresh=fresh
    )
    note("alike_turn", turn_sides.parted(similar_pairs))
    note("rare_words", turn_sides.parted(pair_rare_grams(corpus, turns, in_all=True, fresh=fresh)))
    fresh = None if earlier is None else moved
    note("long_reply", row_sides.parted(pair_long_replies(corpus, passed=passed, in_all=True, fresh=fresh)))
    paraphrases = Paraphrases(corpus, embedder) if embedder is not None else None
    for window_questions in find_questions(corpus, passed=passed, turns=turns.key, since=since):
        fresh = None if earlier is None else _spread_over(window_questions.first, moved)
        line_sides = _ClassSides(window_questions.first, sides)
        note("same_line", line_sides.in_both(since=window_questions.window.start))
        pairs = window_questions.pair_alike(threshold=threshold, accept=line_sides.are_parted, fresh=fresh)
        note("alike_line", line_sides.parted(pairs))
        if paraphrases is not None:
            paraphrased = paraphrases.pair(window_questions, accept=line_sides.are_parted)
            note("paraphrase", line_sides.parted(paraphrased))
        fresh = None if earlier is None else moved
        questions = pair_rare_questions(corpus, window_questions, passed=passed, fresh=fresh)
        note("same_question", row_sides.parted(questions))
    return leaks


def _spread_over(first: Array, moved: Array) -> Array:
    """Return the rows that ask the same as a row that moved: they may be compared in its place."""
    touched = np.zeros(len(first), dtype=bool)
    touched[first[moved[: len(first)]]] = True
    spread_over: Array = touched[first]
    return spread_over


_SHARED_KEYS: tuple[tuple[Kind, str], ...] = (("same_conversation", "opening"), ("same_key", "together"))


def require_no_leak(
    corpus: CorpusColumns,
    assignment: SplitAssignment,
    kept: Array,
    *,
    settings: DataSettings,
    embedder: Embedder | None = None,
    earlier: SplitAssignment | None = None,
) -> None:
    """Refuse a dataset with the same or nearly the same question in train and in a held-out split."""
    leaks = find_leaks(
        corpus, assignment, kept, settings=settings, embedder=embedder, earlier=earlier, most=1
    )
    if leaks:
        trained_row, held_out_row, kind = leaks[0]
        trained, held_out = corpus.origin(trained_row), corpus.origin(held_out_row)
        split = SPLITS[assignment.split[held_out_row]]
        raise NegativeResult(
            f"a question is in train and in {split}",
            why=f"{trained} and {held_out} {_WHY[kind]}: evaluating on it would measure memorization, "
            "not skill",
            fix="remove one of the two rows; rows that this program grouped itself never leak, so please "
            "report it if graft assigned these splits",
            where=str(held_out),
        )


class _ClassSides:
    """For each class of rows, named by its first row: the earliest and the latest row that is trained on,
    that is held out, and that is in any split, kept or not.
    """

    def __init__(self, first: Array, sides: tuple[Array, Array, Array]) -> None:
        rows = len(first)
        ranges = []
        for side in sides:
            members = np.flatnonzero(side[:rows])
            earliest, latest = np.full(rows, _NEVER), np.full(rows, -1)
            earliest[first[members[::-1]]] = members[::-1]
            latest[first[members]] = members
            ranges.append((earliest, latest))
        self._first = first
        self._trained, self._held_out, (self._assigned, _) = ranges

    def in_both(self, *, since: int = 0) -> Iterator[tuple[int, int]]:
        """Yield classes with rows on both sides, the later of them not before `since`."""
        (trained, last_trained), (held_out, last_held_out) = self._trained, self._held_out
        both = (last_trained >= 0) & (last_held_out >= 0)
        both &= np.maximum(last_trained, last_held_out) >= since
        for first_row in np.flatnonzero(both).tolist():
            yield int(trained[first_row]), int(held_out[first_row])

    def are_parted(self, later: Array, earlier: Array) -> Array:
        """Whether rows of the two classes are on different sides."""
        return self._is_parted(later, earlier, self._trained, self._held_out) | self._is_parted(
            later, earlier, self._held_out, self._trained
        )

    def parted(self, pairs: Array) -> Iterator[tuple[int, int]]:
        later, earlier = unpack(pairs)
        later_class, earlier_class = self._first[later], self._first[earlier]
        (trained, last_trained), (held_out, last_held_out) = self._trained, self._held_out
        for pair in np.flatnonzero(self._is_parted(later, earlier, self._trained, self._held_out)).tolist():
            yield int(last_trained[later_class[pair]]), int(held_out[earlier_class[pair]])
        for pair in np.flatnonzero(self._is_parted(later, earlier, self._held_out, self._trained)).tolist():
            yield int(trained[earlier_class[pair]]), int(last_held_out[later_class[pair]])

    def _is_parted(
        self, later: Array, earlier: Array, side: tuple[Array, Array], other_side: tuple[Array, Array]
    ) -> Array:
        """Count rows of the later row's class from that row on, and all rows of the other class if one came
        before the later row.
        """
        later_class, earlier_class = self._first[later], self._first[earlier]
        parted: Array = (side[1][later_class] >= later) & (other_side[1][earlier_class] >= 0)
        parted &= self._assigned[earlier_class] < later
        return parted
