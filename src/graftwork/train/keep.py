"""Which checkpoints stay: the newest few and the best one. Pure: the caller removes the rest.

In: the step and score of every checkpoint, and which one was just verified. Out: the steps that stay.
The verified one always does, so the last good checkpoint is never lost to tidiness.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as the policy sees it. Smaller scores are better; most have none."""

    step: int
    score: float | None = None


def steps_to_keep(found: Sequence[SavedCheckpoint], *, verified: int, newest: int) -> frozenset[int]:
    """The steps that stay once the checkpoint of step `verified` is known to be good.

    What lies beyond `verified` does not count: the run came back behind it because it is damaged.
    """
    past = [saved for saved in found if saved.step <= verified]
    recent = sorted({verified, *(saved.step for saved in past)})[-max(newest, 1) :]
    best = best_of(past)
    return frozenset(recent) | ({best.step} if best else frozenset())


def best_of(found: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """The one with the smallest score, the earliest of several; None where nobody looked."""
    looked = [saved for saved in found if is_score(saved.score)]
    return min(looked, key=lambda saved: (saved.score, saved.step), default=None)


def is_better(score: float | None, than: Sequence[SavedCheckpoint]) -> bool:
    """Whether a look found something better than every look before it."""
    if not is_score(score):
        return False
    best = best_of(than)
    return best is None or (score is not None and best.score is not None and score < best.score)


def is_score(score: float | None) -> bool:
    """A look that came to no number says nothing."""
    return score is not None and not math.isnan(score)
