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
from torch.utils.checkpoint import checkpoint

from graftwork.model.adapters.trainable import trained_digest, trained_tensors
from graftwork.model.load import eval_mode, tensors_digest
from graftwork.model.parts import decoder_parts
from graftwork.process.memory import peak_memory_gib
from graftwork.records.dataset import Row
from graftwork.train.checkpoints.store import HostCopies
from graftwork.train.distributed.strategies import DistributedStrategy, SingleProcess
from graftwork.train.loss import TokenBatch, mean_loss, summed_loss
from graftwork.train.settings import TrainSettings

HOST_RANDOM = "random/torch"
DEVICE_RANDOM = "random/cuda"


def random_states() -> dict[str, Tensor]:
    states = {HOST_RANDOM: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[DEVICE_RANDOM] = torch.cuda.get_rng_state()
    return states


def restore_random_states(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors[HOST_RANDOM])
    if DEVICE_RANDOM in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors[DEVICE_RANDOM])


FIRST_SCALE = 2.0**16
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
GROW_EVERY = 200


class LossScaler:
    """`on` is False for types with a range like that of float32: then the factor is always 1."""

    def __init__(self, *, on: bool, first: float = FIRST_SCALE, grow_every: int = GROW_EVERY) -> None:
        self.factor = first if on else 1.0
        self._on = on
        self._good = 0
        self._grow_every = grow_every

    @property
    def can_fall(self) -> bool:
        """An overflow is the factor's fault as long as it can still become smaller."""
        return self._on and self.factor > SMALLEST_SCALE

    def overflowed(self) -> None:
        self.factor, self._good = max(self.factor / 2, SMALLEST_SCALE), 0

    def went_well(self) -> None:
        if not self._on:
            return
        self._good += 1
        if self._good == self._grow_every:
            self.factor, self._good = min(self.factor * 2, LARGEST_SCALE), 0

    def state(self) -> dict[str, Tensor]:
        if not self._on:
            return {}
        return {
            "scaler/factor": torch.tensor(self.factor, dtype=torch.float64),
            "scaler/good": torch.tensor(self._good),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if self._on and "scaler/factor" in tensors:
            self.factor, self._good = float(tensors["scaler/factor"]), int(tensors["scaler/good"])


_CHECKPOINTED = "_graft_recomputes"


def checkpoint_activations(model: Any) -> int:
    """From now on the blocks of this model compute again; how many there are. Twice is as once."""
    blocks = decoder_parts(model).blocks
    for block in blocks:
        if not getattr(block, _CHECKPOINTED, False):
            block.forward = _checkpointed(block, block.forward)
            setattr(block, _CHECKPOINTED, True)
    return len(blocks)


def _checkpointed(block: Any, forward: Any) -> Any:
    def compute(*given: Any, **named: Any) -> Any:
        # Who only reads, keeps nothing; and a cache would be filled a second time.
        filled = any(hasattr(one, "get_seq_length") for one in (*given, *named.values()))
        if filled or not torch.is_grad_enabled():
            return forward(*given, **named)
        # A block in evaluation mode draws nothing by chance: there is no state to be brought back.
        return checkpoint(
            forward, *given, use_reentrant=False, preserve_rng_state=bool(block.training), **named
        )

    return compute


OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class StepResult:
    """What the backward pass of one step found, over all of the crew."""

    loss: float
    gradient_norm: float
    tokens: int
    trained_tokens: int
    overflowed: bool = False
    """Too large for float16: the step is passed over, and the next loss is scaled less."""


class TrainingEngine:
    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        crew: DistributedStrategy | None = None,
        pulse: Callable[..., None] = lambda *_: None,
        micro_rows: int | None = None,
        loss: Callable[[TokenBatch], Tensor] | None = None,
        checkpointing: bool = False,
    ) -> None:
        self.model = model
        self.crew = crew or SingleProcess()
        self._settings = settings
        self._pulse = pulse
        self._micro_rows = micro_rows
        self._given_loss = loss
        # Where no process holds the whole model, all must call it equally often: no extra reading. And a
        # block that computes again would fill the beginning's cache once more.
        self._share_beginning = not self.crew.shards and not checkpointing
        if checkpointing:
            checkpoint_activations(model)
        self._scaler = LossScaler(on=getattr(model, "dtype", None) == torch.float16)
        self._overflowed = False
        self._copies = HostCopies()
        self._device = self.crew.device or str(next(model.parameters()).device)
        self._names = _parameter_indices(trained_tensors(model), parameters)
        self.trainable = sum(parameter.numel() for parameter in parameters)
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            # One pass over memory instead of ten.
            fused=True if not self.crew.shards else None,
        )
        self.parameters = self.crew.join(model, parameters, optimizer, self._loss)

    def _loss(self, batch: TokenBatch) -> Tensor:
        return summed_loss(self.model, batch) if self._given_loss is None else self._given_loss(batch)

    def backward(self, rows: Sequence[Row]) -> StepResult:
        """The gradient of the mean loss a trained token over `rows`, shortened where it is too long."""
        trained = sum(len(row.tokens) - row.trained_from for row in rows)
        total = 0.0
        for portion in self.crew.share(rows, self._micro_rows):
            self._pulse("data")
            batch = TokenBatch(portion.rows, device=self._device, share_beginning=self._share_beginning)
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
        return StepResult(total, norm, tokens, trained, overflowed=self._overflowed)

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_rows: int) -> float | None:
        """The loss a trained token over `rows`, shared by the crew; None where there are none."""
        with eval_mode(self.model):
            if not rows or self.crew.size == 1:
                return mean_loss(self.model, rows, batch_rows=batch_rows, device=self._device)
            return self._shared_loss(rows, batch_rows)

    def _shared_loss(self, rows: Sequence[Row], batch_rows: int) -> float:
        ordered = sorted(rows, key=lambda row: len(row.tokens))
        total, trained = 0.0, sum(len(row.tokens) - row.trained_from for row in rows)
        for portion in self.crew.share(ordered, batch_rows):
            batch = TokenBatch(portion.rows, device=self._device, share_beginning=self._share_beginning)
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
            return trained_tensors(self.model)
        return {name: self.crew.whole(self.parameters[place]).detach() for name, place in self._names.items()}

    def digest(self) -> str:
        return tensors_digest(self.learned()) if self.crew.shards else trained_digest(self.model)

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
        restore_random_states(tensors)

    def peak_memory_gib(self) -> float:
        """The most that this process took: of a card's memory where it works on one."""
        if torch.device(self._device).type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) / 2**30
        return peak_memory_gib()

    @torch.no_grad()
    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        """The weights alone: for the best model at the end of a run."""
        for name, place in self._names.items():
            self.crew.put(self.parameters[place], tensors[f"adapter/{name}"])


def _parameter_indices(learned: dict[str, Tensor], parameters: Sequence[nn.Parameter]) -> dict[str, int]:
    """Which parameter stands behind each name: a crew may hold them as something else later."""
    places = {parameter.data_ptr(): place for place, parameter in enumerate(parameters)}
    return {name: places[tensor.data_ptr()] for name, tensor in learned.items()}
