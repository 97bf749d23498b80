"""What training needs of others, said by training itself.

Whoever starts a run may bring an examiner that asks the model questions. Without one, the loss on
validation rows is all that a look during training can judge by.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from graftwork.records.dataset import Row


class TrainingEvaluator(Protocol):
    """Asks the model in training, and grades its answers. The model is left as it was."""

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        """The first rows that the metric says anything about: the same every time."""

    def smaller_is_better(self, metric: str) -> bool: ...

    def examine(
        self, model: Any, rows: Sequence[Row], *, metric: str, seconds: float, pulse: Callable[[], None]
    ) -> tuple[float, ...]:
        """Grades of the first rows, as many as could be asked in time, but of one at least.

        `pulse` is called with every token; what it raises ends the look.
        """
