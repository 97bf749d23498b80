"""Objectives: what a training batch is and what weight each of its tokens gets.

To add one: write a file here with a class that has the attributes of `Objective`, return it from
`make_objective`, and, where its batches are produced during the run (rollouts), write a `BatchSource`.
Engines, checkpoints, strategies and callbacks stay as they are: every engine minimizes

    sum over trained tokens of weight · -log p(token) / normalizer

so an objective is a pure function of rows and log-probabilities. `samples.py` has supervised fine-tuning
and `epochs.py` its batch source; `preference.py` is DPO, ORPO and KTO, `policy.py` the losses over sampled
answers (GRPO and its kin), `advantages.py` their group advantages.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.records.dataset import Row
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

LogProbabilities = Callable[[], "list[Tensor]"]
"""Computes the model's current log-probabilities of the trained tokens, one tensor for each row."""


class Objective(Protocol):
    """Weights of tokens. Rows contain what an objective compares with: log-probabilities when sampled and of
    the reference model, advantages, masks.
    """

    name: str

    def normalizer(self, rows: Sequence[Row]) -> float:
        """Divisor of the weighted loss of one optimizer step."""

    def weights(self, rows: Sequence[Row], log_probabilities: LogProbabilities) -> "list[Tensor] | None":
        """The weight of each trained token, one tensor for each row; None if every token weighs 1.

        No gradient flows through the weights. Calling `log_probabilities` costs a forward pass.
        """

    def measure(self, rows: Sequence[Row], log_probabilities: "Sequence[Tensor]") -> "dict[str, Tensor]":
        """Figures of a step besides the loss, by name; their means are journaled."""


class BatchSource(Protocol):
    """Where the rows of each optimizer step come from."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    def batch(self, step: int) -> Sequence[Row]:
        """The rows of step 1 … `steps`. A resumed run that asks again gets the same rows."""

    def peek(self, step: int) -> Sequence[Row]:
        """The rows of another step if they do not depend on the model; none otherwise."""

    def measures(self, step: int) -> dict[str, float]:
        """What producing the rows of this step measured, by name."""

    def rows_before(self, step: int) -> int:
        """Rows in the steps up to and including `step`."""

    def identity(self) -> dict[str, Any]:
        """What a checkpoint records to recognize the run it was made for."""


def make_objective(settings: TrainSettings | None = None) -> Objective:
    """The objective of a run; supervised fine-tuning without settings."""
    if settings is None or settings.objective == "sft":
        from graftwork.train.objectives.samples import SupervisedFineTuning

        return SupervisedFineTuning()
    if settings.objective == "grpo":
        from graftwork.train.objectives.policy import PolicyGradient

        return PolicyGradient(settings.policy)
    if settings.objective == "kto":
        from graftwork.train.objectives.preference import KahnemanTversky

        return KahnemanTversky(settings.preferences)
    from graftwork.train.objectives.preference import DirectPreference, OddsRatioPreference

    kind = DirectPreference if settings.objective == "dpo" else OddsRatioPreference
    return kind(settings.preferences)
