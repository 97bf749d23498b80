"""Supervised fine-tuning: the mean cross entropy over the reply tokens of a step."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graftwork.records.dataset import Row

if TYPE_CHECKING:
    from torch import Tensor


class SupervisedFineTuning:
    name = "sft"

    def normalizer(self, rows: Sequence[Row]) -> int:
        return count_trained(rows)

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], object]) -> None:
        """Every reply token weighs the same."""

    def measure(self, rows: Sequence[Row], log_probabilities: object) -> dict[str, "Tensor"]:
        """The loss says it all."""
        return {}


def count_trained(rows: Sequence[Row]) -> int:
    """How many tokens of the rows are trained."""
    return sum(len(row.tokens) - row.trained_from for row in rows)
