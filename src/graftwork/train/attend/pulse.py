"""Tells the heartbeat how far the run is, what it does now, and how long it will still take."""

import statistics
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from graftwork.files.journal import Journal
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.records.errors import GraftError
from graftwork.records.run import TrainStep
from graftwork.train.attend.attendant import TrainingCallback
from graftwork.train.files import SAVED

RECENT_STEPS = 16


class HeartbeatCallback(TrainingCallback):
    name = "pulse"

    def __init__(self, heart: Heart, folder: Path) -> None:
        self._heart = heart
        self._saved = Journal(folder / SAVED)
        self._first: int | None = None
        self._begun = 0.0
        self._here = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def after_step(self, step: TrainStep, steps: int) -> None:
        self._here += 1
        self._recent.append(step.seconds)
        self._heart.beat(
            "training",
            step.step,
            steps,
            seconds_left=self._seconds_left(step.step, steps),
            loss=step.loss,
            gradient_norm=step.gradient_norm,
            tokens_per_second=step.tokens / step.seconds,
            step_seconds=statistics.median(self._recent),
            steps_here=self._here,
        )

    def before_checkpoint(self, step: int) -> None:
        self._heart.move("checkpoint")

    def after_checkpoint(self, folder: Path, step: int) -> None:
        self._heart.move()
        # A note for readers only: a disk without room for it must not end the run.
        with suppress(GraftError):
            self._saved.append({**clock.now().model_dump(), "step": step, "folder": folder.name})

    def before_settling(self) -> None:
        self._heart.move("checkpoint")

    def ends(self) -> None:
        self._heart.move()

    def _seconds_left(self, step: int, steps: int) -> float | None:
        """From the steps of this process alone."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self._begun = step, now
            return None
        return (now - self._begun) / (step - self._first) * (steps - step)
