"""One process, one device: every wish is fulfilled right here."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.records.dataset import Row
from graftwork.train.crew.crew import OptimizerState
from graftwork.train.crew.deal import MicroBatch, split_into_micro_batches


class SingleProcess:
    rank = 0
    size = 1
    shards = False
    device: str | None = None

    def join(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        del model
        self._parameters, self._optimizer, self._loss = list(parameters), optimizer, loss
        return self._parameters

    def share(self, rows: Sequence[Row], micro_rows: int | None) -> Sequence[MicroBatch]:
        return split_into_micro_batches(rows, size=1, micro_rows=micro_rows)[0]

    def loss(self, batch: Any) -> Tensor:
        return self._loss(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        del last
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_up(self, value: float, parameters: Sequence[nn.Parameter] = ()) -> float:
        del parameters
        return value

    def shorten(self, most: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._parameters, most))

    def step(self, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    @torch.no_grad()
    def put(self, parameter: Tensor, whole: Tensor) -> None:
        parameter.copy_(whole)

    def held(self, parameter: nn.Parameter) -> OptimizerState:
        return dict(self._optimizer.state.get(parameter, {}))

    def hold(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        # A fused update wants the count of its steps where the weights are.
        self._optimizer.state[parameter] = {key: held[key].to(parameter.device) for key in held}

    def any(self, said: bool) -> bool:
        return said

    def tell(self, value: Any) -> Any:
        return value

    def part(self) -> None:
        """Nobody is there to say goodbye to."""
