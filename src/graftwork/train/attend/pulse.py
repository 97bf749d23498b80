"""Tells the heartbeat how far the run is, and how long it will still take."""

import time

from graftwork.process.heartbeat import Heart
from graftwork.records.run import TrainStep
from graftwork.train.attend.attendant import Attendant


class Pulse(Attendant):
    name = "pulse"

    def __init__(self, heart: Heart) -> None:
        self._heart = heart
        self._first: int | None = None
        self._begun = 0.0

    def after_step(self, step: TrainStep, steps: int) -> None:
        self._heart.beat(
            "training",
            step.step,
            steps,
            seconds_left=self._seconds_left(step.step, steps),
            loss=step.loss,
            tokens_per_second=step.tokens / step.seconds,
        )

    def _seconds_left(self, step: int, steps: int) -> float | None:
        """From the steps of this process alone."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self._begun = step, now
            return None
        return (now - self._begun) / (step - self._first) * (steps - step)
