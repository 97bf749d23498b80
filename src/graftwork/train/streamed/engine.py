"""The streaming engine: full fine-tuning on one device whose memory holds two layers and not the model.

Input: a model in host memory, rows, a StreamedStep. Output: what every engine gives. Weights, gradients and
Adam's moments stay in host memory. In float32 its losses and weights are those of the plain engine with
activation checkpointing, bit by bit.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from graftwork.model.load import eval_mode
from graftwork.records.dataset import Row
from graftwork.records.plan import StreamedStep
from graftwork.train.distributed.strategies import OptimizerState, SingleProcess
from graftwork.train.engine import (
    StepOptions,
    StepResult,
    TrainingEngine,
    limit_gpu_memory,
    random_states,
)
from graftwork.train.host_memory import DeviceMemory
from graftwork.train.loss import TokenBatch
from graftwork.train.objectives.samples import count_trained
from graftwork.train.settings import TrainSettings
from graftwork.train.streamed.passes import DecoderShell, StreamedPasses
from graftwork.train.streamed.transfers import HostUnit, ModelUnits, cut_up, gradient_norm

# Adam over units in host memory: on the host in slices, or on the GPU with slices streamed through it. Input:
# units with gradients, the factor that clips them, a learning rate. Output: updated weights, moments and
# working copies. A thread updates the units in the order in which the next forward pass asks for them; `wait`
# blocks until one of them is done.
SLICE_ELEMENTS = 1 << 22
"""Elements that are updated at once: a slice of the gradient fits the cache."""


BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""The defaults of torch.optim.AdamW."""


class StreamedAdam:
    def __init__(
        self,
        units: Sequence[HostUnit],
        *,
        weight_decay: float,
        on: Literal["host", "gpu"] = "host",
        device: torch.device,
        overlapped: bool = True,
        slice_elements: int = SLICE_ELEMENTS,
    ) -> None:
        self._units = [unit for unit in units if unit.trained]
        self._weight_decay = weight_decay
        self._slice = slice_elements
        self._threads = (
            ThreadPoolExecutor(1, thread_name_prefix="update") if overlapped and self._units else None
        )
        self._pending: dict[int, Future[None]] = {}
        self._on, self._device = on, device
        self._buffers: list[_SliceBuffers] = []

    def begin(self, scale: float, rate: float) -> None:
        """Update all units with their gradients times `scale`."""
        self.finish()
        for unit in self._units:
            unit.updates += 1
            if self._threads is None:
                self._update(unit, scale, rate)
            else:
                self._pending[id(unit)] = self._threads.submit(self._update, unit, scale, rate)

    def wait(self, unit: HostUnit) -> None:
        """Wait until this unit is updated."""
        pending = self._pending.pop(id(unit), None)
        if pending is not None:
            pending.result()

    def finish(self) -> None:
        """Wait until all units are updated."""
        for unit in self._units:
            self.wait(unit)

    @torch.no_grad()
    def _update(self, unit: HostUnit, scale: float, rate: float) -> None:
        assert unit.gradient is not None
        assert unit.moments is not None
        if self._on == "gpu":
            self._update_on_gpu(unit, scale, rate)
            return
        gradient = torch.empty(min(self._slice, unit.elements), dtype=torch.float32)
        for part in self._slices(unit.elements):
            gradient_part = gradient[: part.stop - part.start]
            gradient_part.copy_(unit.gradient[part]).mul_(scale)
            tensors = (unit.master[part], gradient_part, unit.moments[0][part], unit.moments[1][part])
            self._step(tensors, unit.updates, rate)
            if unit.working is not unit.master:
                unit.working[part].copy_(unit.master[part])

    def _update_on_gpu(self, unit: HostUnit, scale: float, rate: float) -> None:
        """Two slices at a time on the GPU: one is fetched while the other is updated and sent back."""
        assert unit.gradient is not None
        assert unit.moments is not None
        if not self._buffers:
            self._buffers = [_SliceBuffers(self._slice, self._device) for _ in range(2)]
        for number, part in enumerate(self._slices(unit.elements)):
            buffers, size = self._buffers[number % 2], part.stop - part.start
            with buffers.apart():
                master, first, second, gradient = (buffer[:size] for buffer in buffers.tensors)
                host_parts = (unit.master[part], unit.moments[0][part], unit.moments[1][part])
                for target, source in zip((master, first, second), host_parts, strict=True):
                    target.copy_(source, non_blocking=True)
                sent = buffers.sent(size, unit.gradient.dtype)
                sent.copy_(unit.gradient[part], non_blocking=True)
                gradient.copy_(sent).mul_(scale)
                self._step((master, gradient, first, second), unit.updates, rate)
                for target, source in zip(host_parts, (master, first, second), strict=True):
                    target.copy_(source, non_blocking=True)
                if unit.working is not unit.master:
                    sent = buffers.sent(size, unit.working.dtype)
                    sent.copy_(master)
                    unit.working[part].copy_(sent, non_blocking=True)
        for buffers in self._buffers:
            buffers.synchronize()

    def _slices(self, elements: int) -> list[slice]:
        return [slice(start, min(start + self._slice, elements)) for start in range(0, elements, self._slice)]

    def _step(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor], updates: int, rate: float) -> None:
        weights, gradient, first, second = tensors
        adamw(
            [weights],
            [gradient],
            [first],
            [second],
            [],
            # The count before this update: the kernel adds one to it, for each slice to its own.
            [torch.full((), float(updates - 1), device=weights.device)],
            fused=True,
            amsgrad=False,
            beta1=BETA1,
            beta2=BETA2,
            lr=rate,
            weight_decay=self._weight_decay,
            eps=EPSILON,
            maximize=False,
        )


class _SliceBuffers:
    """A slice on the GPU: weights, both moments and the gradient in float32, and 16-bit transfer buffers."""

    def __init__(self, elements: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.tensors = tuple(torch.empty(elements, device=device) for _ in range(4))
        self._sent = torch.empty(4 * elements, dtype=torch.uint8, device=device)
        if self._stream is not None:
            # What had this memory before may still be computed with.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def apart(self) -> AbstractContextManager[Any]:
        """Launches inside run parallel to the computation."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def sent(self, size: int, dtype: torch.dtype) -> Tensor:
        """Buffer for `size` numbers in transfer."""
        return self._sent.view(dtype)[:size]


CLIP_EPSILON = 1e-6
"""The same value as in torch's `clip_grad_norm_`."""


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
        for flat in dict.fromkeys((unit.master, unit.working)):
            unit.view(name, flat).copy_(whole)

    def optimizer_state(self, parameter: nn.Parameter) -> OptimizerState:
        self.adam.finish()
        unit, name = self.units.owner(parameter)
        if not unit.updates or unit.moments is None:
            return {}
        first, second = (unit.view(name, flat) for flat in unit.moments)
        return {"exp_avg": first, "exp_avg_sq": second, "step": torch.tensor(float(unit.updates))}

    @torch.no_grad()
    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        unit, name = self.units.owner(parameter)
        assert unit.moments is not None
        for flat, key in zip(unit.moments, ("exp_avg", "exp_avg_sq"), strict=True):
            unit.view(name, flat).copy_(held[key])
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
        torch_device = torch.device(device)
        on_gpu = torch_device.type == "cuda"
        if on_gpu:
            limit_gpu_memory(step.limit_gib)
        dtype: torch.dtype = getattr(torch, step.dtype)
        shell = DecoderShell(model, device=torch_device, dtype=dtype)
        self._units = cut_up(model, dtype, pinned=on_gpu, pinned_states=on_gpu and step.update == "gpu")
        adam = StreamedAdam(
            self._units.in_order(),
            weight_decay=settings.weight_decay,
            on=step.update,
            device=torch_device,
            # On a CPU the update would only compete with the forward pass.
            overlapped=on_gpu if overlapped is None else overlapped,
        )
        self.device_memory = DeviceMemory(torch_device, dtype)
        self._passes = StreamedPasses(
            shell,
            self._units,
            self.device_memory,
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
        portions = self.strategy.micro_batches(rows, self._step.micro_rows)
        batches = [self._batch(portion.rows) for portion in portions]
        try:
            losses = self._passes.learn(batches, normalizer)
        except BaseException:
            self._passes.abandon()
            raise
        total = sum(float(loss) for loss in losses)
        self._progress("update")
        norm = self.strategy.clip_gradients(self._settings.max_grad_norm)
        tokens = sum(len(row.tokens) for row in rows)
        return StepResult(total, norm, tokens, count_trained(rows))

    def apply(self, rate: float) -> None:
        super().apply(rate)
        self._passes.forget_weights()

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        batch = TokenBatch(rows, device=self._device, share_beginning=False)
        return batch.by_row(-self._passes.compute_losses([batch])[0])

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_size: int) -> float | None:
        """The mean cross entropy per trained token; every block is fetched once."""
        if not rows:
            return None
        ordered = sorted(rows, key=lambda row: len(row.tokens))
        size = min(batch_size, self._step.micro_rows or batch_size)
        batches = [
            TokenBatch(ordered[start : start + size], device=self._device, share_beginning=False)
            for start in range(0, len(ordered), size)
        ]
        with eval_mode(self.model):
            total = sum(float(losses.sum()) for losses in self._passes.compute_losses(batches))
        return total / count_trained(rows)

    def learned(self) -> dict[str, Tensor]:
        self._adam.finish()
        return super().learned()

    def digest(self) -> str:
        self._adam.finish()
        return super().digest()

    def state(self) -> dict[str, Tensor]:
        """The tensors themselves: a copy would need the same amount of host memory again."""
        tensors = {f"adapter/{name}": tensor for name, tensor in self.learned().items()}
        for index, parameter in enumerate(self.parameters):
            moments = self.strategy.optimizer_state(parameter)
            tensors |= {f"optimizer/{index}/{key}": tensor for key, tensor in moments.items()}
        return {**tensors, **random_states()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        super().restore(tensors)
        self._passes.forget_weights()

    def restore_learned(self, tensors: dict[str, Tensor]) -> None:
        super().restore_learned(tensors)
        self._passes.forget_weights()
