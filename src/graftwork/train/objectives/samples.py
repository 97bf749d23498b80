"""Samples: rows with what an objective compares them with, and the scale that divides a step's loss.

Input: rows of one optimizer step. Output: the same rows, each with the factor of its tokens. Pure. Supervised
fine-tuning, which compares nothing and divides by its tokens, is here too.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from graftwork.records.dataset import Row

if TYPE_CHECKING:
    from torch import Tensor

LOSS_MEASURE = "loss"
"""The measure that a step reports as its loss: a weighted sum of log-probabilities is meaningless on its
own.
"""
Part = Literal["rl", "sft", "chosen", "rejected"]
Normalization = Literal["dapo", "dr_grpo", "grpo"]


class TrainingSample(Row):
    """A row of an objective that compares. `unit` names the rows that are compared with each other: the two
    replies of a pair, the answers to one prompt. They share a micro-batch."""

    unit: str
    part: Part
    scale: float = 1.0
    """Factor on the weights of the row's tokens, including the divisor of the step's loss."""
    supervised_scale: float = 0.0
    """The same for the supervised term of a chosen reply: one over the chosen tokens of the step."""
    advantage: float = 0.0
    sampled: tuple[float, ...] | None = None
    """Log-probabilities of the trained tokens when they were sampled; None: by the model as it is now."""
    reference: tuple[float, ...] | None = None
    """Log-probabilities of the trained tokens by the model that training started from."""
    baseline: float = 0.0
    """KTO: the KL divergence of the step, which gains are compared with."""
    factors: tuple[float, ...] | None = None
    """Factor on the weight of each trained token; 0 for tokens that the model did not write or whose
    log-probabilities disagree with the sampler's. None: 1 for every token.
    """


def count_trained(rows: Sequence[Row]) -> int:
    """How many tokens of the rows are trained."""
    return sum(len(row.tokens) - row.trained_from for row in rows)


class SupervisedFineTuning:
    """The mean cross entropy over the reply tokens of a step."""

    name = "sft"

    def normalizer(self, rows: Sequence[Row]) -> int:
        return count_trained(rows)

    def weights(self, rows: Sequence[Row], log_probabilities: Callable[[], object]) -> None:
        """Every reply token weighs the same."""

    def measure(self, rows: Sequence[Row], log_probabilities: object) -> dict[str, "Tensor"]:
        """Nothing is measured besides the loss."""
        return {}


def make_sample(row: Row, **fields: object) -> TrainingSample:
    """The row as a sample, without validating its tokens again."""
    values = {name: getattr(row, name) for name in Row.model_fields}
    return TrainingSample.model_construct(**(values | fields))


R = TypeVar("R", bound=Row)


def split_units(rows: Iterable[R]) -> list[list[R]]:
    """The rows by their units, in the order of first occurrence; other rows are units of their own."""
    units: dict[object, list[R]] = {}
    for position, row in enumerate(rows):
        key = row.unit if isinstance(row, TrainingSample) else position
        units.setdefault(key, []).append(row)
    return list(units.values())


def join_units(units: Sequence[Sequence[R]], *, most: int | None) -> list[list[R]]:
    """Micro-batches of at most `most` rows: the answers to a prompt, which share it; then pairs and single
    rows together. Pairs stay together.
    """
    groups = [list(unit) for unit in units if len(unit) > 2]
    portions = [
        group[start : start + (most or len(group))]
        for group in groups
        for start in range(0, len(group), most or len(group))
    ]
    current: list[R] = []
    for unit in units:
        if len(unit) > 2:
            continue
        if current and most is not None and len(current) + len(unit) > most:
            portions.append(current)
            current = []
        current = [*current, *unit]
    return [*portions, current] if current else portions


def has_units(rows: Sequence[Row]) -> bool:
    return any(isinstance(row, TrainingSample) for row in rows)


def scale_policy(
    rows: Sequence[TrainingSample], *, how: Normalization, max_tokens: int, share: float = 1.0
) -> list[TrainingSample]:
    """Divide the loss of the sampled answers: `dapo` by all their tokens, `dr_grpo` by answers times the
    longest length allowed, `grpo` each answer by its own tokens and then by the number of answers."""
    tokens, answers = max(count_written(rows), 1), max(len(rows), 1)
    fixed = {"dapo": 1 / tokens, "dr_grpo": 1 / (answers * max_tokens)}
    return [
        row.model_copy(update={"scale": share * fixed.get(how, 1 / (answers * max(count_written([row]), 1)))})
        for row in rows
    ]


def count_written(rows: Sequence[TrainingSample]) -> int:
    """Trained tokens without those of factor 0."""
    return sum(
        count_trained([row]) if row.factors is None else sum(factor != 0 for factor in row.factors)
        for row in rows
    )


def scale_supervised(rows: Sequence[Row], *, unit: str, share: float = 1.0) -> list[TrainingSample]:
    """Rows of supervised fine-tuning in the same step: divided only by their own tokens."""
    scale = share / max(count_trained(rows), 1)
    return [
        make_sample(row, unit=f"{unit}/{position}", part="sft", scale=scale)
        for position, row in enumerate(rows)
    ]


def scale_pairs(pairs: Sequence[tuple[TrainingSample, TrainingSample]]) -> list[TrainingSample]:
    """The rows of a step of pairs: the loss is a mean over pairs, the supervised term one over tokens."""
    scale = 1 / max(len(pairs), 1)
    supervised = 1 / max(count_trained([chosen for chosen, _ in pairs]), 1)
    scaled = {"scale": scale, "supervised_scale": supervised}
    return [row.model_copy(update=scaled) for pair in pairs for row in pair]
