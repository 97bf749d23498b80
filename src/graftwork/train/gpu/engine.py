"""The engine on a card: packed rows through the written-out decoder, within the memory that was given.

In: a furnished model with adapters, a Tuning. Out: what every engine gives. The first thing it does is
one measured step with nothing kept; what the card has left is then spent on keeping.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from graftwork.model.learn import sum_bits
from graftwork.model.load import tensors_digest
from graftwork.model.step_memory import keep_measured
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB
from graftwork.train.crew.alone import Alone
from graftwork.train.crew.crew import Held
from graftwork.train.engine import Engine, Measured
from graftwork.train.gpu.batch import COMPILED_SHAPES, RECORDED_SHAPES, PackSizes, Portion, pack
from graftwork.train.gpu.captured import Captured, ran_out
from graftwork.train.gpu.decoder import Decoder
from graftwork.train.gpu.furnish import Furnished
from graftwork.train.gpu.install import build, thrift_of
from graftwork.train.settings import TrainSettings


class CardEngine(Engine):
    def __init__(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        *,
        settings: TrainSettings,
        furnished: Furnished,
        tuning: Tuning,
        shape: ModelShape,
        pulse: Callable[..., None] = lambda *_: None,
    ) -> None:
        super().__init__(model, parameters, settings=settings, crew=OnCard(), pulse=pulse)
        self.tuning = tuning
        self._furnished = furnished
        self._shape = shape
        self._on_card = self._device.startswith("cuda")
        self._compiled = tuning.compiled and self._on_card
        self._recorded = (tuning.compiled or tuning.recorded) and self._on_card
        self._decoder: Decoder = self._build(tuning.model_copy(update={"keep": 0, "lean": 0}))
        self._runner: Decoder | Captured = self._decoder

    def settle(self, rows: Sequence[Row]) -> Tuning:
        """Measure one step that keeps nothing, then keep what the limit allows; what was settled on.

        Must come before the first real step: it leaves no gradient and no state behind.
        """
        if not self._on_card:
            self._use(self.tuning)
            return self.tuning
        _limit(self.tuning.limit_gib)
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
                if not ran_out(error):
                    raise
                peak = tuning.limit_gib + 0.25
            if peak <= tuning.limit_gib or tuning.keep + tuning.lean == 0:
                break
            tuning = _one_less(tuning)
        self.tuning = tuning.model_copy(update={"peak_gib": peak})
        return self.tuning

    def backward(self, rows: Sequence[Row]) -> Measured:
        trained = sum(len(row.tokens) - row.trained_from for row in rows)
        self._pulse("data")
        portions = self._pack(rows)
        total = torch.zeros((), device=self._device)
        scale = torch.tensor(1 / trained, device=self._device)
        for portion in portions:
            self._pulse("forward")
            total += self._learn(portion, scale)
        norm = self.crew.shorten(self._settings.max_gradient_norm)
        tokens = sum(len(row.tokens) for row in rows)
        return Measured(float(total) / trained, norm, tokens, trained)

    @torch.no_grad()
    def mean_loss(self, rows: Sequence[Row], *, batch_rows: int = 0) -> float | None:
        """The loss a trained token, by the same products that training uses."""
        del batch_rows
        if not rows:
            return None
        total = 0.0
        for portion in self._pack(rows):
            total += float(self._lose(portion))
            self._pulse("forward")
        trained = sum(len(row.tokens) - row.trained_from for row in rows)
        return total / trained

    def digest(self) -> str:
        """By the sum of each tensor's bits: a hash of all bytes would bring them to the host first."""
        return tensors_digest({name: sum_bits(tensor) for name, tensor in self.learned().items()})

    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_reserved() / GIB if self._on_card else super().peak_memory_gib()

    def _pack(self, rows: Sequence[Row]) -> list[Portion]:
        tuning = self.tuning
        sizes = PackSizes(
            room=tuning.micro_tokens,
            head_tokens=tuning.head_tokens,
            longest=tuning.longest,
            shapes=COMPILED_SHAPES if tuning.compiled else RECORDED_SHAPES,
        )
        return pack(rows, sizes, device=self._device)

    def _lose(self, portion: Portion) -> Tensor:
        decoder, runner = self._decoder, self._runner

        def compute() -> Tensor:
            return decoder.lose(decoder.embed(portion.tokens), portion.packed)

        return runner.give_way(compute) if isinstance(runner, Captured) else compute()

    def _learn(self, portion: Portion, scale: Tensor) -> Tensor:
        return self._runner.learn(
            self._decoder.embed(portion.tokens), portion.packed, scale, lambda: self._pulse("backward")
        )

    def _build(self, tuning: Tuning) -> Decoder:
        layers = len(self._furnished.blocks)
        thrift = thrift_of(tuning, layers=layers, compiled=self._compiled)
        return build(self.model, self._furnished, thrift)

    def _use(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self._runner = self._decoder = self._build(tuning)
        if self._recorded:
            # A compiled piece is compiled at its first run and tuned at its second.
            plain_runs = 2 if self._compiled else 1
            self._runner = Captured(self._decoder, self.parameters, plain_runs=plain_runs)

    def _measure(self, rows: Sequence[Row]) -> float:
        """GiB that the allocator takes for one pass as large as they come."""
        portion = max(self._pack(rows), key=lambda one: one.tokens.shape[0])
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._learn(portion, torch.zeros((), device=self._device))
        torch.cuda.synchronize()
        self.forget()
        return torch.cuda.max_memory_reserved() / GIB + self._states_to_come()

    def _states_to_come(self) -> float:
        """Adam's two states, which are made at the first step."""
        made = any(self.crew.held(parameter) for parameter in self.parameters)
        return 0.0 if made else 2 * 4 * self.trainable / GIB


class OnCard(Alone):
    """Alone, with gradients that stay in their places: a recorded step writes to fixed addresses.

    Clipping and the update are recorded too: from Python, hundreds of adapters cost more than their sums.
    """

    _clip: "tuple[Any, Tensor] | None" = None
    _update: Any = None
    _updates = 0

    def join(
        self,
        model: Any,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any], Tensor],
    ) -> list[nn.Parameter]:
        joined = super().join(model, parameters, optimizer, loss)
        self._on_card = joined[0].is_cuda
        if self._on_card:
            for group in optimizer.param_groups:
                # A number would be part of the recording; a tensor is read at each replay.
                group["lr"] = torch.tensor(group["lr"], device=joined[0].device)
                group["capturable"] = True
        return joined

    def shorten(self, most: float) -> float:
        if not self._has_fixed_gradients():
            return super().shorten(most)
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
        self.forget()

    def hold(self, parameter: nn.Parameter, held: Held) -> None:
        super().hold(parameter, held)
        self._update = None  # it writes to the states that were there before

    def _has_fixed_gradients(self) -> bool:
        return self._on_card and all(parameter.grad is not None for parameter in self._parameters)

    def forget(self) -> None:
        held = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if held:
            torch._foreach_zero_(held)


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
    """The allocator refuses what goes beyond: an error here is better than a neighbour's."""
    total = torch.cuda.get_device_properties(0).total_memory / GIB
    torch.cuda.set_per_process_memory_fraction(min(limit_gib / total, 1.0))


def _one_less(tuning: Tuning) -> Tuning:
    """A block that kept goes lean; where none keeps, a lean one starts from its input."""
    if tuning.keep:
        return tuning.model_copy(update={"keep": tuning.keep - 1, "lean": tuning.lean + 1})
    return tuning.model_copy(update={"lean": tuning.lean - 1})
