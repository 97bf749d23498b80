"""The engine on a GPU: packed rows through the written-out decoder, within the memory that was given.

Input: a frozen model with adapters, a Tuning. Output: what every engine gives. The first thing it does is one
measured step with nothing kept; what the GPU has left is then spent on keeping.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graftwork.costmodel.gpu_tuning import keep_measured
from graftwork.costmodel.run import bin_rows
from graftwork.model.adapters.peft import sum_bits
from graftwork.model.generate.recorded import Recording, record
from graftwork.model.load import tensors_digest
from graftwork.records.base import GIB
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape, Tuning
from graftwork.train.distributed.strategies import BatchLoss, OptimizerState, SingleProcess
from graftwork.train.engine import StepMeasures, StepResult, TrainingEngine, limit_gpu_memory
from graftwork.train.gpu.decoder import CudaGraphDecoder, GpuDecoder, GpuTokenPass, is_out_of_memory
from graftwork.train.gpu.load import FrozenWeights, build_decoder
from graftwork.train.gpu.packing import PackedLayout, pack, pack_rows
from graftwork.train.objectives.samples import (
    LOSS_MEASURE,
    SupervisedFineTuning,
    TrainingSample,
    count_trained,
)
from graftwork.train.settings import TrainSettings


class GpuEngine(TrainingEngine):
    strategy: "SingleGpu"

    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        frozen: FrozenWeights,
        tuning: Tuning,
        shape: ModelShape,
        progress: Callable[..., None] = lambda *_: None,
    ) -> None:
        super().__init__(model, parameters, settings=settings, strategy=SingleGpu(), progress=progress)
        self.tuning = tuning
        self._frozen = frozen
        self._shape = shape
        self.computes_apart = self._on_gpu = self._device.startswith("cuda")
        self._compiled = tuning.compiled and self._on_gpu
        self._recorded = (tuning.compiled or tuning.recorded) and self._on_gpu
        self._decoder: GpuDecoder = self._build(tuning.model_copy(update={"keep": 0, "lean": 0}))
        self._runner: GpuDecoder | CudaGraphDecoder = self._decoder
        self._prefetched: tuple[Sequence[Row], list[PackedLayout]] = ((), [])

    def settle(self, rows: Sequence[Row]) -> Tuning:
        """Measure one step that keeps nothing, then keep what the limit allows; return the chosen settings.

        Call it before the first real step: it leaves no gradient or state behind.
        """
        if not self._on_gpu:
            self._use(self.tuning)
            return self.tuning
        limit_gpu_memory(self.tuning.limit_gib + self.tuning.sampling_gib)
        adapted = len(self._decoder.blocks) - self._decoder.first
        rows = _fullest(rows, room=self.tuning.micro_tokens)
        while (least := self._try(rows)) > self.tuning.limit_gib:
            # In smaller chunks if it does not fit as planned.
            smaller = _one_less(self.tuning.model_copy(update={"keep": 0, "lean": 0}))
            if smaller is None:
                break
            self.tuning = smaller
            del self._runner, self._decoder
            self._runner = self._decoder = self._build(smaller)
        tuning = keep_measured(self.tuning, self._shape, measured_gib=least, adapted=adapted)
        while True:
            self._use(tuning)
            peak = self._try(rows, times=3)
            smaller = _one_less(tuning)
            if peak <= tuning.limit_gib or smaller is None:
                break
            tuning = smaller
        self.tuning = tuning.model_copy(update={"peak_gib": peak})
        return self.tuning

    def _try(self, rows: Sequence[Row], *, times: int = 1) -> float:
        """Return the GiB of a step; more than the limit if it ran out of memory."""
        try:
            return [self._measure(rows) for _ in range(times)][-1]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.forget()
            return self.tuning.limit_gib + 0.25

    def backward(self, rows: Sequence[Row]) -> StepResult:
        normalizer = self._objective.normalizer(rows)
        self._progress("data")
        (prefetched_rows, portions), self._prefetched = self._prefetched, ((), [])
        if (
            portions
            and len(prefetched_rows) == len(rows)
            and all(a is b for a, b in zip(prefetched_rows, rows, strict=True))
        ):
            self._measures = StepMeasures()
        else:
            portions = self._pack(rows, self._weigh(rows))
        total = torch.zeros((), device=self._device)
        scale = torch.tensor(1 / normalizer, device=self._device)
        for portion in portions:
            self._progress("forward")
            total += self._learn(portion, scale)
        pull = self._pull()
        norm = self.strategy.launch_clipping(self._settings.max_grad_norm)
        # The GPU computes from here on until its results are asked for.
        self.meanwhile()
        loss_sum, gradient_norm = torch.stack((total, norm.to(total))).tolist()
        tokens = sum(len(row.tokens) for row in rows)
        measures = {**self._measures.means(), **pull}
        loss = measures.pop(LOSS_MEASURE, loss_sum / normalizer)
        return StepResult(loss, gradient_norm, tokens, count_trained(rows), measures=measures)

    def prefetch(self, rows: Sequence[Row]) -> None:
        """Pack a later batch, if its objective needs no pass of the model before."""
        if self._on_gpu and isinstance(self._objective, SupervisedFineTuning):
            self._prefetched = (rows, self._pack(rows))

    def _weigh(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """Return the weights of a step; an objective that compares needs one more forward pass."""
        self._measures = StepMeasures()
        computed: list[list[Tensor]] = []

        def log_probabilities() -> list[Tensor]:
            if not computed:
                computed.append(self.log_probabilities(rows))
            return computed[0]

        weights = self._objective.weights(rows, log_probabilities)
        samples = [row for row in rows if isinstance(row, TrainingSample)]
        measured = rows if computed else [sample for sample in samples if sample.reference is not None]
        if measured:
            measured_logps = computed[0] if computed else self.log_probabilities(measured)
            self._measures.add(self._objective.measure(measured, measured_logps))
        return weights

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        """Use the packed passes of training: never more memory than a step."""
        by_index: dict[int, Tensor] = {}
        decoder = self._decoder
        for indices in bin_rows([len(row.tokens) for row in rows], room=self.tuning.micro_tokens):
            portion = pack_rows([rows[index] for index in indices], self.tuning, device=self._device)
            self._progress("forward")
            counts = [count_trained([rows[index]]) for index in indices]
            # In host memory: a replay would overwrite what is left in its pool.
            read = self._apart(
                lambda: decoder.log_probabilities(decoder.embed(portion.tokens), portion).cpu()  # noqa: B023
            )
            by_index |= zip(indices, torch.split(read[: sum(counts)], counts), strict=True)
        return [by_index[index] for index in range(len(rows))]

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_size: int = 0) -> float | None:
        """The loss per trained token, with the same products that training uses."""
        del batch_size
        if not rows:
            return None
        total, decoder = 0.0, self._decoder
        for portion in self._pack(rows):
            total += float(self._apart(lambda: decoder.compute_loss(decoder.embed(portion.tokens), portion)))  # noqa: B023
            self._progress("forward")
        return total / count_trained(rows)

    def token_pass(self) -> GpuTokenPass | None:
        """Generates answers with the adapter in training; None if the model's own pass is needed."""
        decoder = self._decoder
        if self._compiled:
            # Pieces that are compiled stack their adapters in every pass.
            decoder = build_decoder(self.model, self._frozen, self.tuning, compiled=False)
        return GpuTokenPass.of(decoder)

    def digest(self) -> str:
        """Sum each tensor's bits: a hash of all bytes would copy them to the host first."""
        return tensors_digest({name: sum_bits(tensor) for name, tensor in self.learned().items()})

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_reserved() / GIB if self._on_gpu else super().peak_memory_gib()

    def _pack(self, rows: Sequence[Row], weights: Sequence[Tensor] | None = None) -> list[PackedLayout]:
        return pack(rows, self.tuning, device=self._device, weights=weights)

    def _apart(self, compute: Callable[[], Tensor]) -> Tensor:
        """Run outside the recorded step, whose memory is released if needed."""
        runner = self._runner
        return runner.give_way(compute) if isinstance(runner, CudaGraphDecoder) else compute()

    def _learn(self, portion: PackedLayout, scale: Tensor) -> Tensor:
        return self._runner.learn(
            self._decoder.embed(portion.tokens), portion, scale, lambda: self._progress("backward")
        )

    def _build(self, tuning: Tuning) -> GpuDecoder:
        return build_decoder(self.model, self._frozen, tuning, compiled=self._compiled)

    def _use(self, tuning: Tuning) -> None:
        self.tuning = tuning
        # Their stacked adapters go before others are made.
        del self._runner, self._decoder
        self._runner = self._decoder = self._build(tuning)
        if self._recorded:
            # A compiled piece is compiled at its first run and tuned at its second.
            plain_runs = 2 if self._compiled else 1
            self._runner = CudaGraphDecoder(self._decoder, self.parameters, plain_runs=plain_runs)

    def _measure(self, rows: Sequence[Row]) -> float:
        """GiB that the allocator uses for one pass of the largest size."""
        portion = max(self._pack(rows), key=lambda item: item.tokens.shape[0])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._learn(portion, torch.zeros((), device=self._device))
        torch.cuda.synchronize()
        self.forget()
        # Adam's two states are made at the first step.
        has_states = any(self.strategy.optimizer_state(parameter) for parameter in self.parameters)
        return torch.cuda.max_memory_reserved() / GIB + (0.0 if has_states else 2 * 4 * self.trainable / GIB)


class SingleGpu(SingleProcess):
    """A single GPU, with gradients at fixed addresses, as a recorded step requires. Clipping and the update
    are recorded too: from Python, hundreds of adapters cost more than their sums.
    """

    _clip: Recording | None = None
    _update: Any = None
    _updates = 0

    def prepare(
        self, model: Any, parameters: Sequence[nn.Parameter], optimizer: Optimizer, loss: BatchLoss
    ) -> list[nn.Parameter]:
        joined = super().prepare(model, parameters, optimizer, loss)
        self._on_gpu = joined[0].is_cuda
        if self._on_gpu:
            for group in optimizer.param_groups:
                # A number would be part of the recording; a tensor is read at each replay.
                group["lr"] = torch.tensor(group["lr"], device=joined[0].device)
                group["capturable"] = True
        return joined

    def clip_gradients(self, most: float) -> float:
        return float(self.launch_clipping(most))

    def launch_clipping(self, most: float) -> Tensor:
        """Clip the gradients; returns their norm before, which may still be computing."""
        if not self._has_fixed_gradients():
            return torch.tensor(super().clip_gradients(most))
        if self._clip is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, most)
            torch.cuda.synchronize()
            self._clip = record(lambda: nn.utils.clip_grad_norm_(self._parameters, most))
            return norm
        graph, norm = self._clip
        graph.replay()
        norm_before: Tensor = norm
        return norm_before

    def step(self, rate: float) -> None:
        if not self._has_fixed_gradients():
            super().step(rate)
            return
        for group in self._optimizer.param_groups:
            group["lr"].fill_(rate)
        if self._update is not None:
            self._update.replay()
            return
        self._updates += 1
        if self._updates == 1:  # makes the states
            self._step_plainly()
            return
        torch.cuda.synchronize()
        self._update, _ = record(self._step_plainly)
        self._update.replay()

    def _step_plainly(self) -> None:
        self._optimizer.step()
        self.zero_grad()

    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        super().load_optimizer_state(parameter, held)
        self._update = None  # it writes to the states that were there before

    def _has_fixed_gradients(self) -> bool:
        return self._on_gpu and all(parameter.grad is not None for parameter in self._parameters)

    def zero_grad(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)


def _fullest(rows: Sequence[Row], *, room: int) -> list[Row]:
    """The longest rows, as many as fit one pass: nothing in the run needs more."""
    selected: list[Row] = []
    room_left = room
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if not selected or len(row.tokens) <= room_left:
            selected.append(row)
            room_left -= len(row.tokens)
    return selected


GOOD_HEAD_TOKENS, GOOD_CHUNK_TOKENS = 256, 1024
"""Below these sizes, products are too small to fill a GPU."""
FEWEST_HEAD_TOKENS, FEWEST_CHUNK_TOKENS = 128, 512


def _one_less(tuning: Tuning) -> Tuning | None:
    """Return the next smaller step, with the least loss of time first. None: it cannot be smaller. A block
    that kept goes lean; if none keeps, a lean one starts from its input; if none does, logits and the insides
    of blocks are computed for fewer tokens at a time; then whole passes; and only then logits and insides for
    so few tokens that the GPU waits for its memory.
    """
    if tuning.keep:
        return tuning.model_copy(update={"keep": tuning.keep - 1, "lean": tuning.lean + 1})
    if tuning.lean:
        return tuning.model_copy(update={"lean": tuning.lean - 1})
    halved = _halve_down_to(tuning, head_tokens=GOOD_HEAD_TOKENS, chunk_tokens=GOOD_CHUNK_TOKENS)
    if halved is None and tuning.micro_tokens >= 2 * tuning.longest:
        return tuning.model_copy(update={"micro_tokens": tuning.micro_tokens // 2})
    return halved or _halve_down_to(tuning, head_tokens=FEWEST_HEAD_TOKENS, chunk_tokens=FEWEST_CHUNK_TOKENS)


def _halve_down_to(tuning: Tuning, **fewest: int) -> Tuning | None:
    """Halve the first of these numbers of tokens that is above its minimum; None if none is."""
    for name, least in fewest.items():
        if (tokens := getattr(tuning, name)) > least:
            return tuning.model_copy(update={name: tokens // 2})
    return None
