"""What the looks of a run add up to: which was the best, and how long ago that was.

In: looks one after the other, or the folder of a run. Out: each look judged against those before
it. Pure but for the reading; does not know how a look is taken.
"""

import math
from pathlib import Path
from typing import Any

from graftwork.files.disk import Journal
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.train.files import LOOKS

RESERVE = 0.8


class Course:
    """The looks so far. Only looks over the same number of cases are compared; a tie is not better."""

    def __init__(self, *, smaller_is_better: bool) -> None:
        self._sign = 1.0 if smaller_is_better else -1.0
        self.cases: int | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0

    def judge(self, look: TrainingEvaluation) -> TrainingEvaluation:
        """The look with its place among the others; the first one says over how many cases."""
        if self.cases is None:
            self.cases = look.cases
        compared = look.cases == self.cases and math.isfinite(look.value)
        better = compared and (self.best is None or self.fold(look.value) < self.fold(self.best))
        if better:
            self.best, self.best_step, self.since = look.value, look.step, 0
        elif compared:
            self.since += 1
        return look.model_copy(update={"compared": compared, "better": better})

    def fold(self, value: float) -> float:
        """Smaller is better, whatever the metric."""
        return self._sign * value

    def state(self) -> dict[str, Any]:
        return {"cases": self.cases, "best": self.best, "best_step": self.best_step, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        self.cases, self.best = state.get("cases"), state.get("best")
        self.best_step, self.since = state.get("best_step"), state.get("since", 0)


def count_cases(finished: int, *, asked: int, common: int | None) -> int:
    """Over how many of the finished cases a look counts.

    Once a measure is set, over no more than that. A first look that the time cut short sets four
    fifths of what it managed: a later one, at a busier moment, then still gets that far.
    """
    if common is not None:
        return min(finished, common)
    return finished if finished == asked else max(int(RESERVE * finished), 1)


def log_look(folder: Path, look: TrainingEvaluation, step: TrainStep) -> None:
    """On the disk before anything follows from it."""
    line = {"look": look.model_dump(), "loss": step.loss, "weights": step.weights}
    Journal(folder / LOOKS).append(line, durable=True)


def find_look(folder: Path, step: TrainStep) -> TrainingEvaluation | None:
    """The look at this very step, if it was taken before a crash: same step, same loss, same weights."""
    for line in reversed(Journal(folder / LOOKS).read()):
        same = line["look"]["step"] == step.step and line["loss"] == step.loss
        # Not every step has a digest of its weights; where both have, they must agree.
        if same and (line["weights"] == step.weights or not (line["weights"] and step.weights)):
            return TrainingEvaluation.model_validate(line["look"])
    return None


def read_looks(folder: Path) -> tuple[TrainingEvaluation, ...]:
    """The last word on each look, in order."""
    looks = [TrainingEvaluation.model_validate(line["look"]) for line in Journal(folder / LOOKS).read()]
    return tuple(sorted({look.step: look for look in looks}.values(), key=lambda look: look.step))


def find_best(looks: tuple[TrainingEvaluation, ...]) -> int | None:
    """The step of the best look."""
    return next((look.step for look in reversed(looks) if look.better), None)
