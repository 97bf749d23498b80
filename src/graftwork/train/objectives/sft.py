"""Supervised fine-tuning: the mean cross entropy over the reply tokens of a step."""

from collections.abc import Callable, Sequence

from graftwork.records.dataset import Row


class SupervisedFineTuning:
    name = "sft"

    def normalizer(self, rows: Sequence[Row]) -> int:
        return count_trained(rows)

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], object]) -> None:
        """Every reply token weighs the same."""


def count_trained(rows: Sequence[Row]) -> int:
    """How many tokens of the rows are trained."""
    return sum(len(row.tokens) - row.trained_from for row in rows)
