"""Forward and backward over a decoder whose weights are on the host, block by block.

Input: the token batches of a step. Output: their losses; the gradients are in the units. All batches go
through a block before the next is fetched: a step fetches every block twice, however many batches it has. The
decoder's own code makes masks and positions: it is run with blocks that only record how they are called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graftwork.model.parts import decoder_parts, logits_reader
from graftwork.records.errors import UserError
from graftwork.train.host_memory import CopyLane, DeviceMemory
from graftwork.train.loss import TokenBatch, token_losses, weighted_loss
from graftwork.train.streamed.transfers import (
    BlockInputs,
    GradientSlots,
    GradientSum,
    HostUnit,
    ModelUnits,
    WeightSlots,
    add_rows,
    measure_norms,
)


class BlockCall(NamedTuple):
    """The decoder's arguments for each block, besides the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]
    by_name: bool
    """The hidden states are given by name, too."""


class _BlocksReached(Exception):
    """All calls are recorded: the rest of the decoder need not run."""


HIDDEN = "hidden_states"


class DecoderShell:
    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        parts, reader = decoder_parts(model), logits_reader(model)
        decoder: nn.Module = parts.decoder
        follows = reader.decoder is parts.decoder
        if not follows:
            raise UserError(
                f"{type(model).__name__} cannot be streamed",
                why="what it does after its head is not known",
                fix="set `train.strategy: fsdp`, or remove `train.offload`",
            )
        self.blocks = list(parts.blocks)
        self.embedding = model.get_input_embeddings()
        self._decoder = decoder
        self._head, self._logits = parts.head, reader.logits
        self._in_tuple = False
        self.padding: int | None = getattr(self.embedding, "padding_idx", None)
        """The token whose row is not trained."""
        self.row_scale = self._probe_rows(dtype)
        """The factor of the embedding on a row of its table."""
        for module in decoder.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def embed(self, tokens: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        with weights_of_call(self.embedding, weights):
            rows: Tensor = self.embedding(tokens)
        return rows

    @torch.no_grad()
    def _probe_rows(self, dtype: torch.dtype) -> float:
        """Look up rows of a table of zeros and of one of ones: the embedding may scale them, but nothing
        else.
        """
        weight = self.embedding.weight
        tokens = torch.tensor([[0, weight.shape[0] - 1]], device=weight.device)
        ones = torch.ones((), dtype=dtype, device=weight.device)
        nothing, scaled = (
            self.embed(tokens, {"weight": (ones * value).expand(weight.shape)}) for value in (0, 1)
        )
        factor = float(scaled.flatten()[0])
        if not factor or nothing.any() or not bool((scaled == factor).all()):
            raise UserError(
                f"{type(self.embedding).__name__} cannot be streamed",
                why="it does more to a row of its table than to scale it",
                fix="set `train.strategy: fsdp`, or remove `train.offload`",
            )
        return factor

    def enter(
        self, embedded: Tensor, attended: Tensor, outer: Mapping[str, Tensor]
    ) -> tuple[Tensor, list[BlockCall]]:
        """Return the first block's hidden states, and the arguments of each block."""
        first: list[Tensor] = []
        calls: list[BlockCall] = []

        def record(*args: Any, **kwargs: Any) -> Tensor:
            by_name = not args
            hidden: Tensor = kwargs.pop(HIDDEN) if by_name else args[0]
            if not first:
                first.append(hidden)
            calls.append(BlockCall(args[1:], kwargs, by_name))
            if len(calls) == len(self.blocks):
                raise _BlocksReached
            return hidden

        with self._blocks_do(lambda _at: record):
            try:
                self._call(embedded, attended, outer)
            except _BlocksReached:
                return first[0], calls
        raise UserError(
            "this decoder does not call all of its blocks",
            fix="set `train.strategy: fsdp`, or remove `train.offload`",
        )

    def run(self, index: int, weights: Mapping[str, Tensor], hidden: Tensor, call: BlockCall) -> Tensor:
        """Run one block."""
        positional = () if call.by_name else (hidden,)
        keywords = {HIDDEN: hidden, **call.named} if call.by_name else call.named
        with weights_of_call(self.blocks[index], weights):
            out: Any = self.blocks[index](*positional, *call.arguments, **keywords)
        self._in_tuple = isinstance(out, tuple)
        result: Tensor = out[0] if self._in_tuple else out
        return result

    def leave(self, hidden: Tensor, attended: Tensor, outer: Mapping[str, Tensor]) -> Tensor:
        """Return the decoder's output for the last block's hidden states."""
        last = len(self.blocks) - 1

        def answer(index: int) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = hidden if index == last else (args[0] if args else kwargs[HIDDEN])
                return (out,) if self._in_tuple else out

            return forward

        nothing = torch.zeros((), device=hidden.device, dtype=hidden.dtype).expand(hidden.shape)
        with self._blocks_do(answer):
            output: Tensor = self._call(nothing, attended, outer).last_hidden_state
        return output

    def logits(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        with weights_of_call(self._head, weights):
            return self._logits(hidden)

    def _call(self, embedded: Tensor, attended: Tensor, outer: Mapping[str, Tensor]) -> Any:
        keywords = {"inputs_embeds": embedded, "attention_mask": attended, "use_cache": False}
        with weights_of_call(self._decoder, outer):
            return self._decoder(**keywords)

    @contextmanager
    def _blocks_do(self, forward: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        for index, block in enumerate(self.blocks):
            block.forward = forward(index)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward


@contextmanager
def weights_of_call(module: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The module computes with these weights temporarily; its own are restored, ties included."""
    owners = [
        (module.get_submodule(path), leaf) for path, _, leaf in (name.rpartition(".") for name in weights)
    ]
    originals = [owner._parameters[leaf] for owner, leaf in owners]
    for (owner, leaf), weight in zip(owners, weights.values(), strict=True):
        owner._parameters[leaf] = weight  # type: ignore[assignment]
    try:
        yield
    finally:
        for (owner, leaf), parameter in zip(owners, originals, strict=True):
            owner._parameters[leaf] = parameter


@dataclass
class Portion:
    """Rows that pass through a block together."""

    batch: TokenBatch
    hidden: Tensor
    """In the forward pass the hidden states, in the backward pass their gradient."""
    entered: tuple[Tensor, Tensor] | None
    """The embedded rows and the first block's input, if the decoder does something in between."""
    calls: list[BlockCall]


class StreamedPasses:
    def __init__(
        self,
        shell: DecoderShell,
        units: ModelUnits,
        memory: DeviceMemory,
        *,
        host_inputs: int = 0,
        head_tokens: int | None = None,
        ready: Callable[[HostUnit], None] = lambda _unit: None,
        progress: Callable[..., None] = lambda *_: None,
    ) -> None:
        self._shell, self._units, self._memory = shell, units, memory
        self._head_tokens = head_tokens
        self._ready, self._progress = ready, progress
        self._weights = WeightSlots(units.blocks, memory, ready=ready)
        self._gradients = GradientSlots(units.blocks, memory)
        self._inputs = BlockInputs(memory, on_host=host_inputs)
        self._lane = CopyLane(memory.device)
        self._lowest = next(
            (index for index, unit in enumerate(units.blocks) if unit.trained), len(units.blocks)
        )

    def forget_weights(self) -> None:
        """Call after the weights on the host have changed."""
        self._weights.forget()

    def abandon(self) -> None:
        """Drop the state of an interrupted step."""
        self._inputs.drop()
        self._memory.drop("inputs", "states", "outer", "head")

    def learn(self, batches: Sequence[TokenBatch], normalizer: float) -> list[Tensor]:
        """The loss of each batch over the normalizer; gradients and their norms are in the units."""
        outer = self._outer(learn=self._units.outer.trained)
        portions = self._enter(batches, outer)
        self._forward(portions, keep=True)
        losses, sums = self._learn_head(portions, outer, normalizer)
        self._backward(portions)
        self._leave(portions, outer, sums)
        self._gradients.synchronize()
        self._lane.synchronize()
        self._exit(portions)
        return losses

    @torch.no_grad()
    def compute_losses(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """-log p of every trained token of each batch."""
        outer = self._outer(learn=False)
        portions = self._enter(batches, outer)
        self._forward(portions, keep=False)
        head = self._fetch(self._head)
        losses = []
        for portion in portions:
            states = self._shell.leave(portion.hidden, portion.batch.attended, outer)
            predicting, targets = states[portion.batch.predicts], portion.batch.targets
            losses.append(
                torch.cat(
                    [
                        token_losses(self._shell.logits(predicting[part], head), targets[part])
                        for part in self._chunks(len(targets))
                    ]
                )
            )
        self._drop(self._head)
        self._exit(portions)
        return losses

    def _outer(self, *, learn: bool) -> dict[str, Tensor]:
        """Weights outside the blocks: few, and on the device for the whole step."""
        unit = self._units.outer
        self._ready(unit)
        flat = unit.working.to(self._memory.device, copy=True)
        self._memory.take("outer", flat.nbytes)
        return {name: view.detach().requires_grad_(learn) for name, view in unit.views(flat).items()}

    def _enter(self, batches: Sequence[TokenBatch], outer: dict[str, Tensor]) -> list[Portion]:
        """Look up the rows of all batches: the table is on the device only for that."""
        table = self._fetch(self._units.table)
        portions = []
        for batch in batches:
            rows = self._shell.embed(batch.tokens, table)
            embedded = rows.detach().requires_grad_(self._units.table.trained)
            with torch.set_grad_enabled(self._units.table.trained and torch.is_grad_enabled()):
                first, calls = self._shell.enter(embedded, batch.attended, outer)
            self._memory.take("states", first.nbytes)
            entered = None if first is embedded else (embedded, first)
            portions.append(Portion(batch, first.detach(), entered, calls))
        self._drop(self._units.table)
        return portions

    def _exit(self, portions: list[Portion]) -> None:
        outer = self._units.outer
        self._memory.give_back("outer", outer.elements * self._memory.dtype.itemsize)
        for portion in portions:
            self._memory.give_back("states", portion.hidden.nbytes)

    @torch.no_grad()
    def _forward(self, portions: list[Portion], *, keep: bool) -> None:
        for index in range(len(self._units.blocks)):
            self._progress("forward")
            weights = self._weights.use(index)
            self._weights.prefetch(index + 1)
            for number, portion in enumerate(portions):
                hidden = portion.hidden
                if keep and index >= self._lowest:
                    self._inputs.put(index, number, hidden)
                portion.hidden = self._shell.run(index, weights, hidden, portion.calls[index])

    @property
    def _head(self) -> HostUnit:
        return self._units.head or self._units.table

    def _fetch(self, unit: HostUnit) -> dict[str, Tensor]:
        """The embedding or the head, which are on the device only while they are used."""
        self._ready(unit)
        flat = self._memory.buffer(unit.elements, self._memory.dtype, "head")
        self._lane.copy(flat, unit.working).wait()
        return unit.views(flat)

    def _drop(self, unit: HostUnit) -> None:
        self._memory.give_back("head", unit.elements * self._memory.dtype.itemsize)

    def _chunks(self, count: int) -> list[slice]:
        size = self._head_tokens or max(count, 1)
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def _learn_head(
        self, portions: list[Portion], outer: dict[str, Tensor], normalizer: float
    ) -> tuple[list[Tensor], GradientSum | None]:
        """The losses; the portions' hidden states become their gradients."""
        self._progress("backward")
        unit = self._head
        weights = self._fetch(unit)
        head = {name: view.detach().requires_grad_(unit.trained) for name, view in weights.items()}
        summed = self._sum_of(unit, "head", passes=len(portions)) if unit.trained else None
        sums = (
            self._sum_of(self._units.outer, "outer", passes=len(portions))
            if self._units.outer.trained
            else None
        )
        losses = []
        for portion in portions:
            batch = portion.batch
            leaf = portion.hidden.detach().requires_grad_()
            states = self._shell.leave(leaf, batch.attended, outer)
            predicting = states.detach()[batch.predicts]
            back = torch.zeros_like(states)
            loss, back[batch.predicts] = self._learn_chunks(predicting, batch, head, summed, normalizer)
            losses.append(loss)
            trained = list(outer.values()) if sums is not None else []
            gradients = torch.autograd.grad(states, [leaf, *trained], back, allow_unused=True)
            portion.hidden = gradients[0]
            if sums is not None:
                sums.add(dict(zip(outer, gradients[1:], strict=True)))
            del states, back, predicting, leaf, gradients
        if summed is not None:
            self._send(summed, "head")
        self._drop(self._head)
        return losses, sums

    def _learn_chunks(
        self,
        predicting: Tensor,
        batch: TokenBatch,
        head: dict[str, Tensor],
        summed: GradientSum | None,
        normalizer: float,
    ) -> tuple[Tensor, Tensor]:
        """The loss of a batch and its gradient by the chosen hidden states, chunk by chunk."""
        total, back = torch.zeros((), device=predicting.device), torch.empty_like(predicting)
        for part in self._chunks(len(batch.targets)):
            leaf = predicting[part].detach().requires_grad_()
            weights = None if batch.weights is None else batch.weights[part]
            logits = self._shell.logits(leaf, head)
            loss = weighted_loss(logits, batch.targets[part], weights) / normalizer
            del logits
            trained = list(head.values()) if summed is not None else []
            gradients = torch.autograd.grad(loss, [leaf, *trained])
            back[part] = gradients[0]
            total = total + loss.detach()
            if summed is not None:
                summed.add(dict(zip(head, gradients[1:], strict=True)))
            # A gradient of the whole head must not wait for the next chunk's.
            del gradients, loss
        return total, back

    def _sum_of(self, unit: HostUnit, part: str, *, passes: int) -> GradientSum:
        """Accumulator of gradients outside the blocks: in float32, if there are several."""
        assert unit.gradient is not None
        several = passes > 1 or self._head_tokens is not None
        kind = torch.float32 if several else unit.gradient.dtype
        return GradientSum(unit, self._memory.buffer(unit.elements, kind, part))

    def _send(self, summed: GradientSum, part: str) -> None:
        unit = summed.unit
        assert unit.gradient is not None
        summed.finish()
        flat = summed.flat.to(unit.gradient.dtype)
        measure_norms(unit, flat)
        # The blocks' backward passes need this memory: they begin after the copy, which takes milliseconds.
        self._lane.copy(unit.gradient, flat).wait()
        self._memory.give_back(part, summed.flat.nbytes)

    def _backward(self, portions: list[Portion]) -> None:
        blocks = self._units.blocks
        for index in reversed(range(self._lowest, len(blocks))):
            self._progress("backward")
            weights = self._weights.use(index)
            self._weights.prefetch(index - 1 if index > self._lowest else -1)
            leaves = {name: view.detach().requires_grad_() for name, view in weights.items()}
            summed = self._gradients.begin(blocks[index], passes=len(portions))
            onwards = index > self._lowest or self._units.table.trained
            for number, portion in enumerate(portions):
                # The next input that will be asked for is fetched while this one is computed with.
                if number + 1 < len(portions):
                    self._inputs.prefetch(index, number + 1)
                elif index > self._lowest:
                    self._inputs.prefetch(index - 1, 0)
                hidden = self._inputs.take(index, number).detach().requires_grad_(onwards)
                out = self._shell.run(index, leaves, hidden, portion.calls[index])
                inputs = [hidden, *leaves.values()] if onwards else list(leaves.values())
                gradients: Sequence[Any] = torch.autograd.grad(out, inputs, portion.hidden, allow_unused=True)
                del out
                if onwards:
                    portion.hidden = gradients[0]
                    gradients = gradients[1:]
                summed.add(dict(zip(leaves, gradients, strict=True)))
                del gradients, hidden, inputs
            summed.finish()
            self._gradients.send(summed)

    def _leave(self, portions: list[Portion], outer: dict[str, Tensor], sums: GradientSum | None) -> None:
        """The gradients of what precedes the blocks: of the embedding, on the host."""
        table = self._units.table
        if table.trained:
            self._lane.synchronize()
            if self._units.head is not None:
                assert table.gradient is not None
                table.gradient.zero_()
        for portion in portions:
            if not table.trained:
                break
            back = portion.hidden
            if portion.entered is not None:
                embedded, first = portion.entered
                inputs = [embedded, *(outer.values() if sums is not None else ())]
                gradients = torch.autograd.grad(first, inputs, back, allow_unused=True)
                back = gradients[0]
                if sums is not None:
                    sums.add(dict(zip(outer, gradients[1:], strict=True)))
            back = back * self._shell.row_scale if self._shell.row_scale != 1 else back
            add_rows(table, portion.batch.tokens, back, padding=self._shell.padding)
        if table.trained:
            assert table.gradient is not None
            measure_norms(table, table.gradient)
        if sums is not None:
            self._send(sums, "outer")
