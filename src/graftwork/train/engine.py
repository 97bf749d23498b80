"""The training engine: computes the gradient of a batch, applies updates and saves its state.

Input: rows and a learning rate. Output: what the step measured, and the state by names. This engine runs any
causal decoder of transformers eagerly in PyTorch, alone or under a distributed strategy; `cpu/step.py`
computes its logits faster. `gpu/engine.py` and `streamed/engine.py` are engines of their own;
`engine_choice.py` picks. The loss comes from the objective. The gradient of `backward` can still be refused
before `apply`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from graftwork.model.adapters.peft import trained_digest, trained_tensors
from graftwork.model.load import eval_mode, tensors_digest
from graftwork.model.parts import decoder_parts
from graftwork.process.machine import peak_memory_gib
from graftwork.records.base import GIB
from graftwork.records.dataset import Row
from graftwork.train.distributed.strategies import MicroBatch, SingleProcess
from graftwork.train.host_memory import HostCopies
from graftwork.train.loss import (
    Logits,
    TokenBatch,
    eager_logits,
    mean_loss,
    token_losses,
    weighted_loss,
)
from graftwork.train.objectives import Objective, make_objective
from graftwork.train.objectives.samples import LOSS_MEASURE, count_trained, has_units, join_units, split_units
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.model.generate.decoder import TokenPass


PROXIMAL_MEASURE = "proximal"
"""The name of the term in a step's measures."""


class ProximalTerm:
    """FedProx: pulls what is trained towards its values before the first step, by `strength · (now - start)`.

    The start is taken when the term is made, before a checkpoint is restored: a resumed run has the same one.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], strength: float) -> None:
        self._parameters, self._strength = list(parameters), strength
        self._start = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def add_gradients(self) -> float:
        """Add the term to the gradients that are there; returns its value."""
        total = 0.0
        for parameter, start in zip(self._parameters, self._start, strict=True):
            if parameter.grad is None:
                continue
            distance = parameter - start
            parameter.grad.add_(distance.to(parameter.grad.dtype), alpha=self._strength)
            total += float((distance.double() ** 2).sum())
        return self._strength / 2 * total


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


def limit_gpu_memory(limit_gib: float) -> None:
    """The allocator refuses allocations beyond the limit: an error here is better than one in another
    process.
    """
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(limit_gib / total, 1.0))


FIRST_SCALE = 2.0**16
SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
GROW_EVERY = 200


class LossScaler:
    """`on` is False for types with a range like float32's: then the factor is always 1."""

    def __init__(self, *, on: bool, first: float = FIRST_SCALE, grow_every: int = GROW_EVERY) -> None:
        self.factor = first if on else 1.0
        self._on = on
        self._good = 0
        self._grow_every = grow_every

    @property
    def can_fall(self) -> bool:
        """Whether an overflow may be due to the factor, which can still become smaller."""
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
    """Enable activation checkpointing in the blocks of this model; returns their number. Idempotent."""

    def checkpointed(block: Any, forward: Any) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            # Who only reads, keeps nothing; and a cache would be filled a second time.
            filled = any(hasattr(argument, "get_seq_length") for argument in (*args, *kwargs.values()))
            if filled or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            # A block in evaluation mode draws nothing by chance: there is no state to be brought back.
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=bool(block.training), **kwargs
            )

        return compute

    blocks = decoder_parts(model).blocks
    for block in blocks:
        if not getattr(block, _CHECKPOINTED, False):
            block.forward = checkpointed(block, block.forward)
            setattr(block, _CHECKPOINTED, True)
    return len(blocks)


OPTIMIZER_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class StepResult:
    """Measurements of one step's backward pass, over all processes."""

    loss: float
    gradient_norm: float
    tokens: int
    trained_tokens: int
    overflowed: bool = False
    """Too large for float16: the gradient is recomputed with a smaller loss scale."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """What the objective measured: means by name."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


class StepMeasures:
    """Sums of what an objective measured in the micro-batches of a step."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, found: Mapping[str, Tensor]) -> None:
        for name, values in found.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(values.double().sum()), count + values.numel()

    def means(self) -> dict[str, float]:
        return {name: total / count for name, (total, count) in self._sums.items() if count}


@dataclass(frozen=True)
class StepOptions:
    """How the eager step is carried out."""

    micro_rows: int | None = None
    """Rows of one forward and backward pass (gradient accumulation); None: all rows of the step."""
    activation_checkpointing: bool = False
    logits: Logits | None = None
    """A faster forward pass; None: the model's own."""
    objective: Objective | None = None
    """None: supervised fine-tuning."""


class TrainingEngine:
    state_is_live = False
    """`state` returns the trained tensors themselves, not copies: no update until they are written."""
    computes_apart = False
    """A step is computed by a GPU while the host is free: `meanwhile` is called then."""
    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        strategy: SingleProcess | None = None,
        progress: Callable[..., None] = lambda *_: None,
        step: StepOptions | None = None,
    ) -> None:
        self.model = model
        self.strategy = strategy or SingleProcess()
        self._settings = settings
        self._progress = progress
        self._step = step or StepOptions()
        self._objective = self._step.objective or make_objective(settings)
        self._measures = StepMeasures()
        checkpointing = self._step.activation_checkpointing
        # A sharded model must be called equally often by all processes, and a block that is recomputed would
        # fill the prefix's cache a second time: both read the prefix with every row.
        self._share_beginning = not self.strategy.shards and not checkpointing
        if checkpointing:
            checkpoint_activations(model)
        self._scaler = LossScaler(on=getattr(model, "dtype", None) == torch.float16)
        self._overflowed = False
        self._copies = HostCopies()
        self._device = self.strategy.device or str(next(model.parameters()).device)
        # By index: a strategy may replace the parameters later.
        indices = {parameter.data_ptr(): index for index, parameter in enumerate(parameters)}
        self._names = {name: indices[tensor.data_ptr()] for name, tensor in trained_tensors(model).items()}
        self.trainable = sum(parameter.numel() for parameter in parameters)
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            # One pass over memory instead of ten.
            fused=True if not self.strategy.shards else None,
        )
        self.parameters = self.strategy.prepare(model, parameters, optimizer, self._loss)
        self._proximal = ProximalTerm(self.parameters, settings.proximal) if settings.proximal else None

    def _logits(self, batch: TokenBatch) -> Tensor:
        return eager_logits(self.model, batch) if self._step.logits is None else self._step.logits(batch)

    def _loss(self, batch: TokenBatch) -> Tensor:
        """The loss of a batch; a weighted one gives the objective the result of this forward pass."""
        logits = self._logits(batch)
        if not batch.weighed:
            return weighted_loss(logits, batch.targets, None)
        losses: list[Tensor] = []

        def log_probabilities() -> list[Tensor]:
            if not losses:
                losses.append(token_losses(logits, batch.targets))
            return batch.by_row(-losses[0].detach())

        weights = self._objective.weights(batch.rows, log_probabilities)
        if weights is None:
            return weighted_loss(logits, batch.targets, None)
        self._measures.add(self._objective.measure(batch.rows, log_probabilities()))
        return (losses[0] * torch.cat(weights).to(losses[0].device)).sum()

    def backward(self, rows: Sequence[Row]) -> StepResult:
        """Compute the gradient of the objective over `rows`, accumulated over micro-batches and clipped."""
        normalizer = self._objective.normalizer(rows)
        self._measures = StepMeasures()
        total = 0.0
        for micro_batch in self._micro_batches(rows):
            self._progress("data")
            batch = TokenBatch(
                micro_batch.rows, device=self._device, share_beginning=self._share_beginning, weighed=True
            )
            self._progress("forward")
            loss = self.strategy.loss(batch) / normalizer * micro_batch.counts
            self._progress("backward")
            self.strategy.backward(loss * self._scaler.factor, last=micro_batch.last)
            total += float(loss.detach())
        self._progress("update")
        total = self.strategy.sum(total)
        if self._scaler.factor != 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self._scaler.factor)
        pull = self._pull()
        norm = self.strategy.clip_gradients(self._settings.max_grad_norm)
        self._overflowed = self._scaler.can_fall and math.isfinite(total) and not math.isfinite(norm)
        if self._overflowed:
            self._scaler.overflowed()
            norm = 0.0
        tokens = sum(len(row.tokens) for row in rows)
        measures = {**self._measures.means(), **pull}
        return StepResult(
            measures.pop(LOSS_MEASURE, total),
            norm,
            tokens,
            count_trained(rows),
            overflowed=self._overflowed,
            measures=measures,
        )

    def prefetch(self, rows: Sequence[Row]) -> None:
        """Prepare the batch of the next step, if that can be done while this one is computed."""

    def _micro_batches(self, rows: Sequence[Row]) -> Sequence[MicroBatch]:
        """Rows that are compared with each other stay together, and share the prefix of their prompt."""
        if not has_units(rows):
            return self.strategy.micro_batches(rows, self._step.micro_rows)
        portions = join_units(split_units(rows), most=self._step.micro_rows)
        return [MicroBatch(part, last=index == len(portions) - 1) for index, part in enumerate(portions)]

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        """The log-probabilities of the trained tokens, one tensor for each row. Not for sharded models."""
        by_row: dict[int, Tensor] = {}
        for portion in self._micro_batches(rows):
            batch = TokenBatch(portion.rows, device=self._device, share_beginning=self._share_beginning)
            values = batch.by_row(-token_losses(self._logits(batch), batch.targets))
            by_row |= zip(map(id, portion.rows), values, strict=True)
        return [by_row[id(row)] for row in rows]

    def _batch(self, rows: Sequence[Row]) -> TokenBatch:
        """A batch with its weights: for engines that compute loss and gradient together."""
        return TokenBatch(
            rows,
            device=self._device,
            share_beginning=self._share_beginning,
            weights=self._objective.weights(rows, lambda: self.log_probabilities(rows)),
        )

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_size: int) -> float | None:
        """The mean cross entropy per trained token over `rows`; None without rows."""
        with eval_mode(self.model):
            if not rows or (self.strategy.size == 1 and not self.strategy.shards):
                return mean_loss(self.model, rows, batch_size=batch_size, device=self._device)
            total = 0.0
            ordered = sorted(rows, key=lambda row: len(row.tokens))
            for portion in self.strategy.micro_batches(ordered, batch_size):
                batch = TokenBatch(portion.rows, device=self._device, share_beginning=self._share_beginning)
                total += float(self.strategy.loss(batch)) * portion.counts
            return self.strategy.sum(total) / count_trained(rows)

    def loss(self, rows: Sequence[Row]) -> float:
        """The loss that a step on these rows would report now. Drops the last gradient, changes no weight."""
        if self._settings.objective == "sft":
            mean = self.mean_loss(rows, batch_size=len(rows))
            return math.nan if mean is None else mean
        loss = self.backward(rows).loss
        self.forget()
        return loss

    def _pull(self) -> dict[str, float]:
        """Add the proximal term to the gradients, if the settings ask for one; returns its value by name."""
        return {} if self._proximal is None else {PROXIMAL_MEASURE: self._proximal.add_gradients()}

    def apply(self, rate: float) -> None:
        """Update the weights with the last gradient, unless it overflowed."""
        if self._overflowed:
            self.forget()
            return
        self.strategy.step(rate)
        self._scaler.went_well()

    def forget(self) -> None:
        """Drop the last gradient."""
        self.strategy.zero_grad()

    def learned(self) -> dict[str, Tensor]:
        """The trained tensors, by the names they are saved under."""
        if not self.strategy.shards:
            return trained_tensors(self.model)
        return {
            name: self.strategy.gather(self.parameters[index]).detach() for name, index in self._names.items()
        }

    def digest(self) -> str:
        return tensors_digest(self.learned()) if self.strategy.shards else trained_digest(self.model)

    def state(self) -> dict[str, Tensor]:
        """Everything that a later process needs to continue bit-identically."""
        tensors = {f"adapter/{name}": tensor for name, tensor in self.learned().items()}
        for index, parameter in enumerate(self.parameters):
            moments = self.strategy.optimizer_state(parameter)
            if moments:
                tensors |= {f"optimizer/{index}/{key}": moments[key] for key in OPTIMIZER_STATES}
        return {**self._copies.take(tensors), **self._scaler.state(), **random_states()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.restore_learned(tensors)
        for index, parameter in enumerate(self.parameters):
            keys = {key: f"optimizer/{index}/{key}" for key in OPTIMIZER_STATES}
            if keys["step"] in tensors:
                self.strategy.load_optimizer_state(
                    parameter, {key: tensors[name] for key, name in keys.items()}
                )
        self._scaler.restore(tensors)
        restore_random_states(tensors)

    def token_pass(self) -> "TokenPass | None":
        """A faster way to generate answers with the trained weights; None: the model's own."""
        return None

    def peak_memory_gib(self) -> float:
        """Peak memory of this process: GPU memory if it trains on a GPU."""
        if torch.device(self._device).type == "cuda":
            return torch.cuda.max_memory_reserved(self._device) / GIB
        return peak_memory_gib()

    @torch.no_grad()
    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        """Restore only the weights, for the best checkpoint at the end of a run."""
        for name, index in self._names.items():
            self.strategy.assign(self.parameters[index], tensors[f"adapter/{name}"])
