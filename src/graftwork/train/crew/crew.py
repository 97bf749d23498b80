"""What a crew is: the processes that learn one model together, seen from one of them.

In: the model, what is learned of it and its optimizer, once; then the rows of each step. Out: a loss
to go back from, a gradient that is that of all rows, an update, and whole tensors. What is summed does
not depend on how many share it: a run on two gives the losses of a run on one. All methods but
`share` may wait for the others: every process calls them, in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graftwork.records.dataset import Row
from graftwork.train.crew.deal import MicroBatch

OptimizerState = dict[str, Tensor]
"""What the optimizer holds of one parameter, by its own names."""


class DistributedStrategy(Protocol):
    rank: int
    size: int
    shards: bool
    """No process holds the whole model: it can be called only together, and on the plain path."""
    device: str | None
    """Where this process works; None: where the model is."""

    def join(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        """Take the model over; the parameters as they are from now on, in the same order."""

    def share(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        """The portions of a step that this process works on, one forward and backward each."""

    def loss(self, batch: Any) -> Tensor:
        """The function given to `join`, on the model as this crew holds it."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this portion's gradient; after the last one it is that of all processes."""

    def sum_up(self, value: float, parameters: Sequence[nn.Parameter] = ()) -> float:
        """The sum over all processes of a number that each of them has."""

    def shorten(self, most: float) -> float:
        """The length of the whole gradient; if it is longer than `most`, it is shortened to that."""

    def step(self, rate: float) -> None:
        """Take the step that the gradient points to, and forget it."""

    def forget(self) -> None:
        """Drop the gradient."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a parameter or of what belongs to it, wherever its parts are."""

    def put(self, parameter: Tensor, whole: Tensor) -> None:
        """Give a parameter other values."""

    def held(self, parameter: nn.Parameter) -> OptimizerState:
        """What the optimizer holds of it, whole; empty before the first step."""

    def hold(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        """Give the optimizer back what it held."""

    def any(self, said: bool) -> bool:
        """Whether any process says so."""

    def tell(self, value: Any) -> Any:
        """What the first process says (anything that JSON can hold), for all."""

    def part(self) -> None:
        """The work is done: wait for the others and let them go."""
