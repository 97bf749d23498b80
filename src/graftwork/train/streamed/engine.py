"""The streaming engine: full fine-tuning on one device whose memory holds two layers and not the model.

In: a model in host memory, rows, a StreamedStep. Out: what every engine gives. Weights, gradients and
Adam's moments stay in host memory. In float32 its losses and weights are those of the plain engine with
activation checkpointing, bit by bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.load import eval_mode
from graftwork.records.dataset import Row
from graftwork.records.plan import StreamedStep
from graftwork.records.units import GIB
from graftwork.train.distributed.strategies import OptimizerState, SingleProcess
from graftwork.train.engine import StepOptions, StepResult, TrainingEngine, random_states
from graftwork.train.loss import TokenBatch
from graftwork.train.objectives.sft import count_trained
from graftwork.train.settings import TrainSettings
from graftwork.train.streamed.memory import DeviceBytes
from graftwork.train.streamed.passes import StreamedPasses
from graftwork.train.streamed.shell import DecoderShell
from graftwork.train.streamed.transfers import Placement
from graftwork.train.streamed.units import ModelUnits, UnitMemory, cut_up, gradient_norm
from graftwork.train.streamed.update import AdamSettings, StreamedAdam

CLIP_EPSILON = 1e-6
"""As torch's `clip_grad_norm_` has it."""


class StreamedStrategy(SingleProcess):
    """One process whose weights and optimizer are in units."""

    def __init__(self, units: ModelUnits, adam: StreamedAdam, *, device: str) -> None:
        self.units, self.adam, self.device = units, adam, device
        self._scale = 1.0

    def clip_gradients(self, most: float) -> float:
        norm = gradient_norm(self.units, self._parameters)
        # Gradients are scaled when they are used: each is read only once.
        self._scale = float(torch.clamp(most / (norm + CLIP_EPSILON), max=1.0))
        return float(norm)

    def step(self, rate: float) -> None:
        self.adam.begin(self._scale, rate)

    def zero_grad(self) -> None:
        """Every step overwrites the last gradient."""

    @torch.no_grad()
    def assign(self, parameter: Tensor, whole: Tensor) -> None:
        self.adam.finish()
        unit, name = self.units.owner(parameter)  # type: ignore[arg-type]
        spec = unit.specs[name]
        for flat in dict.fromkeys((unit.master, unit.working)):
            spec.of(flat).copy_(whole)

    def optimizer_state(self, parameter: nn.Parameter) -> OptimizerState:
        self.adam.finish()
        unit, name = self.units.owner(parameter)
        if not unit.updates or unit.moments is None:
            return {}
        spec = unit.specs[name]
        first, second = (spec.of(flat) for flat in unit.moments)
        return {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(unit.updates))}

    @torch.no_grad()
    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        unit, name = self.units.owner(parameter)
        assert unit.moments is not None
        for flat, key in zip(unit.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            unit.specs[name].of(flat).copy_(held[key])
        unit.updates = int(held["step"])


class StreamedEngine(TrainingEngine):
    state_is_live = True

    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        step: StreamedStep,
        device: str,
        progress: Callable[..., None] = lambda *_: None,
        overlapped: bool | None = None,
    ) -> None:
        self.step = step
        place = torch.device(device)
        card = place.type == "cuda"
        if card:
            _limit(step.limit_gib)
        dtype: torch.dtype = getattr(torch, step.dtype)
        shell = DecoderShell(model, device=place, dtype=dtype)
        memory = UnitMemory(dtype, pinned=card, pinned_states=card and step.update == "card")
        self._units = cut_up(model, memory)
        adam = StreamedAdam(
            self._units.in_order(),
            AdamSettings(weight_decay=settings.weight_decay),
            on=step.update,
            device=place,
            # On a processor the update would only compete with the forward pass.
            overlapped=card if overlapped is None else overlapped,
        )
        self.device_bytes = DeviceBytes()
        placement = Placement(place, dtype, self.device_bytes)
        self._passes = StreamedPasses(
            shell,
            self._units,
            placement,
            host_inputs=step.host_inputs,
            head_tokens=step.head_tokens,
            ready=adam.wait,
            progress=progress,
        )
        strategy = StreamedStrategy(self._units, adam, device=device)
        super().__init__(
            model,
            parameters,
            settings=settings,
            strategy=strategy,
            progress=progress,
            step=StepOptions(micro_rows=step.micro_rows),
        )
        self._adam = adam
        # Rows that share a beginning would need it in every block's cache.
        self._share_beginning = False

    def backward(self, rows: Sequence[Row]) -> StepResult:
        normalizer = self._objective.normalizer(rows)
        self._progress("data")
        batches = [self._batch(portion.rows) for portion in self._portions(rows)]
        try:
            losses = self._passes.learn(batches, normalizer)
        except BaseException:
            self._passes.abandon()
            raise
        total = sum(float(loss) for loss in losses)
        self._progress("update")
        norm = self.strategy.clip_gradients(self._settings.max_gradient_norm)
        tokens = sum(len(row.tokens) for row in rows)
        return StepResult(total, norm, tokens, count_trained(rows))

    def _portions(self, rows: Sequence[Row]) -> Sequence[Any]:
        return self.strategy.micro_batches(rows, self._step.micro_rows)

    def apply(self, rate: float) -> None:
        super().apply(rate)
        self._passes.forget_weights()

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        batch = TokenBatch(rows, device=self._device, share_beginning=False)
        return batch.by_row(-self._passes.lose([batch])[0])

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_rows: int) -> float | None:
        """The mean cross entropy per trained token; every block is fetched once."""
        if not rows:
            return None
        ordered = sorted(rows, key=lambda row: len(row.tokens))
        size = min(batch_rows, self._step.micro_rows or batch_rows)
        batches = [
            TokenBatch(ordered[at : at + size], device=self._device, share_beginning=False)
            for at in range(0, len(ordered), size)
        ]
        with eval_mode(self.model):
            total = sum(float(losses.sum()) for losses in self._passes.lose(batches))
        return total / count_trained(rows)

    def learned(self) -> dict[str, Tensor]:
        self._adam.finish()
        return super().learned()

    def digest(self) -> str:
        self._adam.finish()
        return super().digest()

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves: a copy would need as much host memory again."""
        tensors = {f"adapter/{name}": tensor for name, tensor in self.learned().items()}
        for place, parameter in enumerate(self.parameters):
            held = self.strategy.optimizer_state(parameter)
            tensors |= {f"optimizer/{place}/{key}": tensor for key, tensor in held.items()}
        return {**tensors, **random_states()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        self._passes.forget_weights()

    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        super().restore_learned(tensors)
        self._passes.forget_weights()


def _limit(limit_gib: float) -> None:
    """The allocator refuses what goes beyond: an error here is better than one in another process."""
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(limit_gib / total, 1.0))
