"""Scores of a log: weights of training rows, and preference pairs.

In: the corpus, whose rows have scores of their own or apart from them, and the settings. Out: the score and
the weight of each row; for prompts with several scored replies the better and the worse one. Captured rows
have no score here: users' feedback has settings of its own.
"""

import numpy as np
import numpy.typing as npt

from graftwork.data.audit.row_checks import RATED_BAD
from graftwork.data.condition import list_fields
from graftwork.data.corpus.row_features import NOT_A_NUMBER
from graftwork.data.corpus.store import Corpus
from graftwork.data.ingest.dataset_formats import NO_SCORE
from graftwork.data.settings import DataSettings
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Origin

Scores = npt.NDArray[np.float64]


def read_scores(corpus: Corpus) -> Scores:
    """The score of each row; NaN where it has none."""
    scores: Scores = corpus.column("score").astype(np.float64)
    joined = sorted(corpus.joined)
    for place, row in corpus.rows_at(joined):
        if row.capture is None and row.reward is not None:
            scores[place] = row.reward
    return scores


def require_scores(corpus: Corpus, settings: DataSettings) -> None:
    """Refuse `data.score_weights` and `data.score_pairs` without scores, or where one is no number."""
    if not settings.score_weights and settings.score_pairs is None:
        return
    where = "data.score_weights" if settings.score_weights else "data.score_pairs"
    scores = read_scores(corpus)
    unreadable = np.flatnonzero(scores == NOT_A_NUMBER)
    faults = (fault for _, fault in corpus.faults() if NO_SCORE in fault.message)
    first: tuple[Origin, str] | None = next(((fault.origin, fault.message) for fault in faults), None)
    if len(unreadable):
        first = corpus.origin(int(unreadable[0])), "its score is text"
    if first is not None:
        raise UserMistake(
            "a score is no number",
            why=f"{first[0]}: {first[1]}",
            fix="correct the row, or name another field under data.mapping.reward",
            where=where,
        )
    if corpus.rows and np.isnan(scores).all():
        [(_, row)] = corpus.rows_at([0])
        named = settings.mapping.reward if settings.mapping else None
        missing = f"`{named}`" if named else "`reward`, `score` or `label`"
        raise UserMistake(
            "no row has a score",
            why=f"{row.origin} and all others lack {missing}",
            fix="name the field with the score: `data.mapping: {reward: FIELD}`; rows have "
            + (", ".join(sorted(list_fields(row))[:20]) or "no fields of their own"),
            where=where,
        )


def find_low_rated(corpus: Corpus, settings: DataSettings) -> npt.NDArray[np.int64]:
    """Rows that are no references for tests: those in the lower half of the scale of `score_weights`."""
    if not settings.score_weights:
        return np.zeros(0, dtype=np.int64)
    middle = (min(settings.score_weights) + max(settings.score_weights)) / 2
    return np.flatnonzero(read_scores(corpus) < middle)


def weigh_rows(corpus: Corpus, settings: DataSettings) -> Scores | None:
    """The weight of each row by its score, 1 for rows without one; None if scores weigh nothing."""
    if not settings.score_weights:
        return None
    scores = read_scores(corpus)
    named = sorted(settings.score_weights.items())
    weights = np.interp(scores, [score for score, _ in named], [weight for _, weight in named])
    return np.where(np.isnan(scores), 1.0, weights)


def find_scored_pairs(corpus: Corpus, settings: DataSettings) -> dict[int, int]:
    """The row with the best reply to a prompt, and the one with the worst: if their scores differ enough.

    Replies that were dropped because they are rated bad take part as the worse ones.
    """
    if settings.score_pairs is None:
        return {}
    scores, passed = read_scores(corpus), corpus.column("passed").astype(bool)
    faults = corpus.labels("fault")
    bad = np.isin(faults.numbers, [n for n, name in enumerate(faults.names) if name == RATED_BAD])
    bad[[place for place, reason in corpus.withdrawn.items() if reason.startswith(RATED_BAD)]] = True
    places = np.flatnonzero((passed | bad) & ~np.isnan(scores))
    prompt, reply = corpus.column("prompt"), corpus.column("reply")
    order = places[np.lexsort((places, scores[places], passed[places], prompt[places]))]
    starts = np.flatnonzero(np.concatenate(([True], prompt[order][1:] != prompt[order][:-1]))[: len(order)])
    ends = np.append(starts, len(order))[1:]
    pairs: dict[int, int] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        replies = order[start:end]
        better, worse = int(replies[-1]), int(replies[np.argmin(scores[replies])])
        gap = scores[better] - scores[worse]
        if passed[better] and gap >= settings.score_pairs and reply[better] != reply[worse]:
            pairs[better] = worse
    return pairs
