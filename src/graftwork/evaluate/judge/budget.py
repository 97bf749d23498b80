"""What the judge may cost: questions, seconds, money. Safe for threads; knows no HTTP."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from graftwork.evaluate.judge.client import Said
from graftwork.evaluate.judge.settings import JudgeSettings


class BudgetSpent(Exception):
    """Nothing more is asked; what was said stays."""


class Spent(NamedTuple):
    """`cost` is None where graft.yaml names no prices."""

    questions: int
    tokens_in: int
    tokens_out: int
    seconds: float
    cost: float | None


class Budget:
    def __init__(self, settings: JudgeSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._questions = self._tokens_in = self._tokens_out = 0

    def require(self) -> None:
        """Take one question from the budget, or say that there is none left."""
        settings, spent = self._settings, self.spent()
        with self._lock:
            if settings.max_questions is not None and self._questions >= settings.max_questions:
                raise BudgetSpent(f"evaluate.judge.max_questions {settings.max_questions} is reached")
            if settings.max_seconds is not None and spent.seconds >= settings.max_seconds:
                raise BudgetSpent(f"evaluate.judge.max_seconds {settings.max_seconds:g} is reached")
            if settings.max_cost is not None and (spent.cost or 0.0) >= settings.max_cost:
                raise BudgetSpent(f"evaluate.judge.max_cost {settings.max_cost:g} is reached")
            self._questions += 1

    def add(self, said: Said) -> None:
        with self._lock:
            self._tokens_in += said.tokens_in
            self._tokens_out += said.tokens_out

    def spent(self) -> Spent:
        price_in, price_out = self._settings.price_in, self._settings.price_out
        with self._lock:
            cost = None
            if price_in is not None and price_out is not None:
                cost = (self._tokens_in * price_in + self._tokens_out * price_out) / 1e6
            seconds = self._clock() - self._began
            return Spent(self._questions, self._tokens_in, self._tokens_out, seconds, cost)
