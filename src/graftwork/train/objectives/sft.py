"""Supervised fine-tuning: the mean cross entropy over the reply tokens of a step."""

from collections.abc import Sequence

from graftwork.records.dataset import Row
from graftwork.train.objectives import LogProbabilities


class SupervisedFineTuning:
    name = "sft"

    def normalizer(self, rows: Sequence[Row]) -> int:
        return count_trained(rows)

    def weights(self, rows: Sequence[Row], log_probabilities: LogProbabilities) -> None:
        """Every reply token weighs the same."""


def count_trained(rows: Sequence[Row]) -> int:
    """How many tokens of the rows are trained."""
    return sum(len(row.tokens) - row.trained_from for row in rows)
