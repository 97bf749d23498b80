"""One model that learns, on one device or as one of a crew: gradients, update, state.

In: rows and a rate. Out: what was measured, and the state by names. The loop knows nothing of
torch beyond this. Between `backward` and `apply` the gradient can still be refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.aside import set_aside
from graftwork.model.learn import learned_digest, learned_tensors
from graftwork.model.load import tensors_digest
from graftwork.process.memory import peak_memory_gib
from graftwork.records.dataset import Row
from graftwork.records.units import GIB
from graftwork.train.chance import random_states, restore_random
from graftwork.train.crew import Alone, Crew
from graftwork.train.host_copy import HostCopies
from graftwork.train.loss import Batch, mean_loss, summed_loss
from graftwork.train.recompute import recompute_blocks
from graftwork.train.scaler import Scaler
from graftwork.train.settings import TrainSettings

OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Measured:
    """What the backward pass of one step found, over all of the crew."""

    loss: float
    gradient_norm: float
    tokens: int
    trained_tokens: int
    overflowed: bool = False
    """Too large for float16: the step is passed over, and the next loss is scaled less."""


class Engine:
    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        crew: Crew | None = None,
        pulse: Callable[..., None] = lambda *_: None,
        micro_rows: int | None = None,
        loss: Callable[[Batch], Tensor] | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.crew = crew or Alone()
        self._settings = settings
        self._pulse = pulse
        self._micro_rows = micro_rows
        self._given_loss = loss
        # Where no process holds the whole model, all must call it equally often: no extra reading. And a
        # block that computes again would fill the beginning's cache once more.
        self._share_beginning = not self.crew.shards and not checkpointing
        if checkpointing:
            recompute_blocks(model)
        self._scaler = Scaler(on=getattr(model, "dtype", None) == torch.float16)
        self._overflowed = False
        self._copies = HostCopies()
        self._device = self.crew.device or str(next(model.parameters()).device)
        self._names = _places(learned_tensors(model), parameters)
        self.trainable = sum(parameter.numel() for parameter in parameters)
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            # One pass over memory instead of ten.
            fused=True if not self.crew.shards else None,
        )
        self.parameters = self.crew.join(model, parameters, optimizer, self._loss)

    def _loss(self, batch: Batch) -> Tensor:
        return summed_loss(self.model, batch) if self._given_loss is None else self._given_loss(batch)

    def backward(self, rows: Sequence[Row]) -> Measured:
        """The gradient of the mean loss a trained token over `rows`, shortened where it is too long."""
        trained = sum(len(row.tokens) - row.trained_from for row in rows)
        total = 0.0
        for portion in self.crew.share(rows, self._micro_rows):
            self._pulse("data")
            batch = Batch(portion.rows, device=self._device, share_beginning=self._share_beginning)
            self._pulse("forward")
            loss = self.crew.loss(batch) / trained * portion.counts
            self._pulse("backward")
            self.crew.backward(loss * self._scaler.factor, last=portion.last)
            total += float(loss.detach())
        self._pulse("update")
        total = self.crew.sum_up(total)
        self._lower(1 / self._scaler.factor)
        norm = self.crew.shorten(self._settings.max_gradient_norm)
        self._overflowed = self._scaler.can_fall and math.isfinite(total) and not math.isfinite(norm)
        if self._overflowed:
            self._scaler.overflowed()
            norm = 0.0
        tokens = sum(len(row.tokens) for row in rows)
        return Measured(total, norm, tokens, trained, overflowed=self._overflowed)

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_rows: int) -> float | None:
        """The loss a trained token over `rows`, shared by the crew; None where there are none."""
        with set_aside(self.model):
            if not rows or self.crew.size == 1:
                return mean_loss(self.model, rows, batch_rows=batch_rows, device=self._device)
            return self._shared_loss(rows, batch_rows)

    def _shared_loss(self, rows: Sequence[Row], batch_rows: int) -> float:
        ordered = sorted(rows, key=lambda row: len(row.tokens))
        total, trained = 0.0, sum(len(row.tokens) - row.trained_from for row in rows)
        for portion in self.crew.share(ordered, batch_rows):
            batch = Batch(portion.rows, device=self._device, share_beginning=self._share_beginning)
            total += float(self.crew.loss(batch)) * portion.counts
        return self.crew.sum_up(total) / trained

    def _lower(self, factor: float) -> None:
        """Take the scale of the loss out of the gradient."""
        if factor != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def apply(self, rate: float) -> None:
        """Take the step that the last gradient points to, if it points anywhere."""
        if self._overflowed:
            self.forget()
            return
        self.crew.step(rate)
        self._scaler.went_well()

    def forget(self) -> None:
        """Drop the gradient."""
        self.crew.forget()

    def learned(self) -> dict[str, Tensor]:
        """What training has changed, by the names that it is saved under."""
        if not self.crew.shards:
            return learned_tensors(self.model)
        return {name: self.crew.whole(self.parameters[place]).detach() for name, place in self._names.items()}

    def digest(self) -> str:
        return tensors_digest(self.learned()) if self.crew.shards else learned_digest(self.model)

    def state(self) -> dict[str, Tensor]:
        """All that a later process needs to go on to the same bytes."""
        tensors = {f"adapter/{name}": tensor for name, tensor in self.learned().items()}
        for place, parameter in enumerate(self.parameters):
            held = self.crew.held(parameter)
            if held:
                tensors |= {f"optimizer/{place}/{key}": held[key] for key in OPTIMIZER_STATES}
        return {**self._copies.take(tensors), **self._scaler.state(), **random_states()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.restore_learned(tensors)
        for place, parameter in enumerate(self.parameters):
            keys = {key: f"optimizer/{place}/{key}" for key in OPTIMIZER_STATES}
            if keys["step"] in tensors:
                self.crew.hold(parameter, {key: tensors[name] for key, name in keys.items()})
        self._scaler.restore(tensors)
        restore_random(tensors)

    def peak_memory_gib(self) -> float:
        """The most that this process took: of a card's memory where it works on one."""
        if torch.device(self._device).type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) / GIB
        return peak_memory_gib()

    @torch.no_grad()
    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        """The weights alone: for the best model at the end of a run."""
        for name, place in self._names.items():
            self.crew.put(self.parameters[place], tensors[f"adapter/{name}"])


def _places(learned: dict[str, Tensor], parameters: Sequence[nn.Parameter]) -> dict[str, int]:
    """Which parameter stands behind each name: a crew may hold them as something else later."""
    places = {parameter.data_ptr(): place for place, parameter in enumerate(parameters)}
    return {name: places[tensor.data_ptr()] for name, tensor in learned.items()}
