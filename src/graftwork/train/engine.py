"""One model that learns, on one device or as one of a crew: gradients, update, state.

In: rows and a rate. Out: what was measured, and the state by names. The loop knows nothing of
torch beyond this. Between `backward` and `apply` the gradient can still be refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.adapter import adapter_tensors
from graftwork.model.load import tensors_digest
from graftwork.records.dataset import Row
from graftwork.train.crew import Alone, Crew
from graftwork.train.loss import Batch, summed_loss
from graftwork.train.settings import TrainSettings

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Measured:
    """What the backward pass of one step found, over all of the crew."""

    loss: float
    gradient_norm: float
    tokens: int
    trained_tokens: int


class Engine:
    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        crew: Crew | None = None,
        pulse: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.parameters = list(parameters)
        self._settings = settings
        self._crew = crew or Alone()
        self._pulse = pulse
        self._device = str(next(model.parameters()).device)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )

    @property
    def trainable(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def backward(self, rows: Sequence[Row]) -> Measured:
        """The gradient of the mean loss a trained token over `rows`, shortened where it is too long."""
        trained = sum(len(row.tokens) - row.trained_from for row in rows)
        total = 0.0
        for some in self._crew.share(rows):
            batch = Batch(some, device=self._device)
            loss = summed_loss(self.model, batch) / trained
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            self._pulse()
        total = self._crew.sum_up(total, self.parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self._settings.max_gradient_norm))
        return Measured(total, norm, sum(len(row.tokens) for row in rows), trained)

    def apply(self, rate: float) -> None:
        """Take the step that the last gradient points to."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Drop the gradient."""
        self.optimizer.zero_grad(set_to_none=True)

    def learned(self) -> dict[str, Tensor]:
        """What training has changed, by the names that it is saved under."""
        return adapter_tensors(self.model)

    def digest(self) -> str:
        return tensors_digest(self.learned())

    def state(self) -> dict[str, Tensor]:
        """All that a later process needs to go on to the same bytes."""
        tensors = {f"adapter/{name}": tensor.clone() for name, tensor in self.learned().items()}
        for place, parameter in enumerate(self.parameters):
            held = self.optimizer.state.get(parameter)
            if held:
                for key in OPTIMIZER_STATES:
                    tensors[f"optimizer/{place}/{key}"] = held[key].clone()
        tensors["random/torch"] = torch.get_rng_state()
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.restore_learned(tensors)
        for place, parameter in enumerate(self.parameters):
            keys = {key: f"optimizer/{place}/{key}" for key in OPTIMIZER_STATES}
            if keys["step"] in tensors:
                self.optimizer.state[parameter] = {
                    key: tensors[name].to(parameter.device if key != "step" else "cpu")
                    for key, name in keys.items()
                }
        torch.set_rng_state(tensors["random/torch"])

    @torch.no_grad()
    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        """The weights alone: for the best model at the end of a run."""
        for name, tensor in self.learned().items():
            tensor.copy_(tensors[f"adapter/{name}"])
