"""The engine on a card: packed rows through the written-out decoder, within the memory that was given.

In: a frozen model with adapters, a Tuning. Out: what every engine gives. The first thing it does is
one measured step with nothing kept; what the card has left is then spent on keeping.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from graftwork.costmodel.card_memory import keep_measured
from graftwork.costmodel.packing import (
    COMPILED_SHAPES,
    RECORDED_SHAPES,
    bin_rows,
    round_places,
    round_tokens,
    token_step,
)
from graftwork.model.adapters.trainable import sum_bits
from graftwork.model.load import tensors_digest
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB
from graftwork.train.distributed.strategies import OptimizerState, SingleProcess
from graftwork.train.engine import StepMeasures, StepResult, TrainingEngine
from graftwork.train.gpu.attention import Documents
from graftwork.train.gpu.decoder import CudaGraphDecoder, GpuDecoder, PackedLayout, is_out_of_memory
from graftwork.train.gpu.load import FrozenWeights, build_decoder, memory_policy
from graftwork.train.gpu.token_pass import CardTokenPass
from graftwork.train.objectives.samples import LOSS_MEASURE, TrainingSample
from graftwork.train.objectives.sft import count_trained
from graftwork.train.settings import TrainSettings

FEWEST_DOCUMENTS = 16


@dataclass(frozen=True)
class PackedPass:
    """One pass: its tokens, and what the decoder needs to know about them."""

    tokens: Tensor
    packed: PackedLayout
    count: int


class PackSizes(NamedTuple):
    """The sizes that packs come in, which are the shapes that are compiled and recorded."""

    room: int
    """Tokens of a pass at most, but for a single longer row."""
    head_tokens: int
    longest: int = 0
    """Tokens of the longest row of the run: given, all packs share a bound."""
    shapes: int = COMPILED_SHAPES


def pack(
    rows: Sequence[Row], sizes: PackSizes, *, device: str, weights: Sequence[Tensor] | None = None
) -> list[PackedPass]:
    """The passes of a step."""
    bins = bin_rows([len(row.tokens) for row in rows], room=sizes.room)
    return [
        _pack(
            [rows[at] for at in some],
            sizes,
            device,
            None if weights is None else [weights[at] for at in some],
        )
        for some in bins
    ]


def _pack(rows: Sequence[Row], sizes: PackSizes, device: str, weights: Sequence[Tensor] | None) -> PackedPass:
    count = sum(len(row.tokens) for row in rows)
    step = token_step(sizes.room, sizes.shapes)
    fill = round_tokens(count, room=sizes.room, shapes=sizes.shapes) - count
    lengths = [len(row.tokens) for row in rows] + ([fill] if fill else [])
    starts = [0, *np.cumsum(lengths).tolist()]
    tokens = np.zeros(starts[-1] + 1, dtype=np.int64)
    for begin, row in zip(starts, rows, strict=False):
        tokens[begin : begin + len(row.tokens)] = row.tokens
    # The token before a trained one predicts it.
    places = [
        np.arange(begin + row.trained_from - 1, begin + len(row.tokens) - 1)
        for begin, row in zip(starts, rows, strict=False)
    ]
    predicts = np.concatenate(places)
    idle = round_places(len(predicts), head_tokens=sizes.head_tokens) - len(predicts)
    packed = PackedLayout(
        positions=_tensor(np.concatenate([np.arange(length) for length in lengths]), device),
        documents=_documents(starts, lengths, max(sizes.longest, step), device),
        predicts=_tensor(np.pad(predicts, (0, idle)), device),
        targets=_tensor(np.pad(tokens[predicts + 1], (0, idle), constant_values=-1), device),
        weights=None
        if weights is None
        else nn.functional.pad(torch.cat(list(weights)).to(device), (0, idle)),
    )
    return PackedPass(_tensor(tokens[:-1], device), packed, count)


def _tensor(numbers: "np.ndarray[Any, Any]", device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True)


def _documents(starts: list[int], lengths: list[int], longest: int, device: str) -> Documents:
    """Documents of no length at the end make their number a round one.

    Their number and the bound on their length are shapes of a recording: few different ones may occur.
    """
    if min(lengths) == max(lengths):
        return Documents(torch.tensor(starts, dtype=torch.int32).to(device), tuple(lengths))
    number = max(1 << (len(lengths) - 1).bit_length(), FEWEST_DOCUMENTS)
    padded = starts + [starts[-1]] * (number - len(lengths))
    at_most = 1 << (max(longest, *lengths) - 1).bit_length()
    return Documents(torch.tensor(padded, dtype=torch.int32).to(device), tuple(lengths), at_most)


class GpuEngine(TrainingEngine):
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
        self._on_card = self._device.startswith("cuda")
        self._compiled = tuning.compiled and self._on_card
        self._recorded = (tuning.compiled or tuning.recorded) and self._on_card
        self._decoder: GpuDecoder = self._build(tuning.model_copy(update={"keep": 0, "lean": 0}))
        self._runner: GpuDecoder | CudaGraphDecoder = self._decoder

    def settle(self, rows: Sequence[Row]) -> Tuning:
        """Measure one step that keeps nothing, then keep what the limit allows; what was settled on.

        Must come before the first real step: it leaves no gradient and no state behind.
        """
        if not self._on_card:
            self._use(self.tuning)
            return self.tuning
        _limit(self.tuning.limit_gib + self.tuning.sampling_gib)
        adapted = len(self._decoder.blocks) - self._decoder.first
        rows = _fullest(rows, room=self.tuning.micro_tokens)
        least = self._measure(rows)
        tuning = keep_measured(self.tuning, self._shape, measured_gib=least, adapted=adapted)
        while True:
            self._use(tuning)
            try:
                for _ in range(3):
                    peak = self._measure(rows)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                peak = tuning.limit_gib + 0.25
            if peak <= tuning.limit_gib or tuning.keep + tuning.lean == 0:
                break
            tuning = _one_less(tuning)
        self.tuning = tuning.model_copy(update={"peak_gib": peak})
        return self.tuning

    def backward(self, rows: Sequence[Row]) -> StepResult:
        normalizer = self._objective.normalizer(rows)
        self._progress("data")
        portions = self._pack(rows, self._weigh(rows))
        total = torch.zeros((), device=self._device)
        scale = torch.tensor(1 / normalizer, device=self._device)
        for portion in portions:
            self._progress("forward")
            total += self._learn(portion, scale)
        pull = self._pull()
        norm = self.strategy.clip_gradients(self._settings.max_gradient_norm)
        tokens = sum(len(row.tokens) for row in rows)
        measures = {**self._measures.means(), **pull}
        loss = measures.pop(LOSS_MEASURE, float(total) / normalizer)
        return StepResult(loss, norm, tokens, count_trained(rows), measures=measures)

    def _weigh(self, rows: Sequence[Row]) -> list[Tensor] | None:
        """The weights of a step; an objective that compares costs one more forward pass."""
        self._measures = StepMeasures()
        computed: list[list[Tensor]] = []

        def log_probabilities() -> list[Tensor]:
            if not computed:
                computed.append(self.log_probabilities(rows))
            return computed[0]

        weights = self._objective.weights(rows, log_probabilities)
        measured = rows if computed else [row for row in rows if _has_reference(row)]
        if measured:
            found = computed[0] if computed else self.log_probabilities(measured)
            self._measures.add(self._objective.measure(measured, found))
        return weights

    @torch.no_grad()
    def log_probabilities(self, rows: Sequence[Row]) -> list[Tensor]:
        """By the packed passes of training: never more memory than a step takes."""
        found: dict[int, Tensor] = {}
        sizes = self._sizes()
        for some in bin_rows([len(row.tokens) for row in rows], room=sizes.room):
            portion = _pack([rows[at] for at in some], sizes, self._device, None)
            self._progress("forward")
            counts = [count_trained([rows[at]]) for at in some]
            found |= zip(some, torch.split(self._read(portion)[: sum(counts)], counts), strict=True)
        return [found[at] for at in range(len(rows))]

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_rows: int = 0) -> float | None:
        """The loss a trained token, by the same products that training uses."""
        del batch_rows
        if not rows:
            return None
        total = 0.0
        for portion in self._pack(rows):
            total += float(self._lose(portion))
            self._progress("forward")
        return total / count_trained(rows)

    def token_pass(self) -> CardTokenPass | None:
        """Writes answers with the adapter in training; None where the model's own pass is needed."""
        decoder = self._decoder
        if self._compiled:
            # Pieces that are compiled stack their adapters in every pass.
            layers = len(self._frozen.blocks)
            policy = memory_policy(self.tuning, layers=layers, compiled=False)
            decoder = build_decoder(self.model, self._frozen, policy)
        return CardTokenPass.of(decoder)

    def digest(self) -> str:
        """By the sum of each tensor's bits: a hash of all bytes would bring them to the host first."""
        return tensors_digest({name: sum_bits(tensor) for name, tensor in self.learned().items()})

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_reserved() / GIB if self._on_card else super().peak_memory_gib()

    def _pack(self, rows: Sequence[Row], weights: Sequence[Tensor] | None = None) -> list[PackedPass]:
        return pack(rows, self._sizes(), device=self._device, weights=weights)

    def _sizes(self) -> PackSizes:
        tuning = self.tuning
        return PackSizes(
            room=tuning.micro_tokens,
            head_tokens=tuning.head_tokens,
            longest=tuning.longest,
            shapes=COMPILED_SHAPES if tuning.compiled else RECORDED_SHAPES,
        )

    def _lose(self, portion: PackedPass) -> Tensor:
        decoder = self._decoder
        return self._apart(lambda: decoder.lose(decoder.embed(portion.tokens), portion.packed))

    def _read(self, portion: PackedPass) -> Tensor:
        """Log-probabilities in host memory: a replay would overwrite what is left in its pool."""
        decoder = self._decoder
        return self._apart(
            lambda: decoder.log_probabilities(decoder.embed(portion.tokens), portion.packed).cpu()
        )

    def _apart(self, compute: Callable[[], Tensor]) -> Tensor:
        """Outside of the recorded step, whose memory gives way where it is needed."""
        runner = self._runner
        return runner.give_way(compute) if isinstance(runner, CudaGraphDecoder) else compute()

    def _learn(self, portion: PackedPass, scale: Tensor) -> Tensor:
        return self._runner.learn(
            self._decoder.embed(portion.tokens), portion.packed, scale, lambda: self._progress("backward")
        )

    def _build(self, tuning: Tuning) -> GpuDecoder:
        layers = len(self._frozen.blocks)
        policy = memory_policy(tuning, layers=layers, compiled=self._compiled)
        return build_decoder(self.model, self._frozen, policy)

    def _use(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._runner = self._decoder = self._build(tuning)
        if self._recorded:
            # A compiled piece is compiled at its first run and tuned at its second.
            plain_runs = 2 if self._compiled else 1
            self._runner = CudaGraphDecoder(self._decoder, self.parameters, plain_runs=plain_runs)

    def _measure(self, rows: Sequence[Row]) -> float:
        """GiB that the allocator takes for one pass as large as they come."""
        portion = max(self._pack(rows), key=lambda item: item.tokens.shape[0])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._learn(portion, torch.zeros((), device=self._device))
        torch.cuda.synchronize()
        self.forget()
        return torch.cuda.max_memory_reserved() / GIB + self._states_to_come()

    def _states_to_come(self) -> float:
        """Adam's two states, which are made at the first step."""
        made = any(self.strategy.optimizer_state(parameter) for parameter in self.parameters)
        return 0.0 if made else 2 * 4 * self.trainable / GIB


class SingleGpu(SingleProcess):
    """Alone, with gradients that stay in their places: a recorded step writes to fixed addresses.

    Clipping and the update are recorded too: from Python, hundreds of adapters cost more than their sums.
    """

    _clip: "tuple[Any, Tensor] | None" = None
    _update: Any = None
    _updates = 0

    def prepare(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        joined = super().prepare(model, parameters, optimizer, loss)
        self._on_card = joined[0].is_cuda
        if self._on_card:
            for group in optimizer.param_groups:
                # A number would be part of the recording; a tensor is read at each replay.
                group["lr"] = torch.tensor(group["lr"], device=joined[0].device)
                group["capturable"] = True
        return joined

    def clip_gradients(self, most: float) -> float:
        if not self._has_fixed_gradients():
            return super().clip_gradients(most)
        if self._clip is None:
            norm = nn.utils.clip_grad_norm_(self._parameters, most)
            self._clip = _recorded(lambda: nn.utils.clip_grad_norm_(self._parameters, most))
            return float(norm)
        graph, norm = self._clip
        graph.replay()
        return float(norm)

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
        self._update = _recorded(self._step_plainly)[0]
        self._update.replay()

    def _step_plainly(self) -> None:
        self._optimizer.step()
        self.zero_grad()

    def load_optimizer_state(self, parameter: nn.Parameter, held: OptimizerState) -> None:
        super().load_optimizer_state(parameter, held)
        self._update = None  # it writes to the states that were there before

    def _has_fixed_gradients(self) -> bool:
        return self._on_card and all(parameter.grad is not None for parameter in self._parameters)

    def zero_grad(self) -> None:
        held = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if held:
            torch._foreach_zero_(held)


def _has_reference(row: Row) -> bool:
    return isinstance(row, TrainingSample) and row.reference is not None


def _recorded(compute: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of what `compute` launches, and its result, which each replay renews. Computes nothing yet."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = compute()
    return graph, result


def _fullest(rows: Sequence[Row], *, room: int) -> list[Row]:
    """The longest rows, as many as one pass holds: nothing in the run will take more."""
    chosen: list[Row] = []
    left = room
    for row in sorted(rows, key=lambda row: -len(row.tokens)):
        if not chosen or len(row.tokens) <= left:
            chosen.append(row)
            left -= len(row.tokens)
    return chosen


def _limit(limit_gib: float) -> None:
    """The allocator refuses what goes beyond: an error here is better than one in another process."""
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(limit_gib / total, 1.0))


def _one_less(tuning: Tuning) -> Tuning:
    """A block that kept goes lean; where none keeps, a lean one starts from its input."""
    if tuning.keep:
        return tuning.model_copy(update={"keep": tuning.keep - 1, "lean": tuning.lean + 1})
    return tuning.model_copy(update={"lean": tuning.lean - 1})
