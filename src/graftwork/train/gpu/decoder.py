"""A decoder that learns by its written-out blocks: one forward, one backward, no graph around them.

Input: the blocks' weights, how much each keeps, packed tokens. Output: the summed loss and gradients in the
adapters' `.grad`, or for sampling the logits of one new token of each row. What a block keeps is a level:
`keep` everything, `lean` without the MLP's widest tensor, `again` nothing but its input.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from graftwork.model.blocks import AttentionRule, attend_to_slots
from graftwork.model.generate.cache import SlotCache
from graftwork.model.generate.recorded import record
from graftwork.model.parts import LogitsEnding
from graftwork.records.plan import Tuning
from graftwork.train.gpu import block as pieces
from graftwork.train.gpu import fused
from graftwork.train.gpu.attention import Documents, Island, attend, attend_keeping
from graftwork.train.gpu.block import BlockShape, BlockWeights, SavedActivations
from graftwork.train.gpu.fused import NormWeights, replace_by_gradient, target_losses
from graftwork.train.gpu.linear import (
    FrozenWeight,
    LoraGradient,
    LoraGroup,
    LoraStacks,
    product,
    transposed_product,
)
from graftwork.train.gpu.packing import PackedLayout


def chunk_loss(
    hidden: Tensor, targets: Tensor, weights: Tensor | None, head: FrozenWeight, ending: LogitsEnding
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of a chunk and its gradient with respect to the hidden states. Logits exist
    for one chunk only.
    """
    logits = product(head, hidden)
    losses = replace_by_gradient(logits, targets, weights, ending)
    counted = targets >= 0
    weight = counted if weights is None else weights * counted
    return (losses * weight).sum(), transposed_product(head, logits)


def chunk_loss_only(hidden: Tensor, targets: Tensor, head: FrozenWeight, ending: LogitsEnding) -> Tensor:
    """The summed loss of a chunk, for evaluation."""
    return (target_losses(product(head, hidden), targets, ending) * (targets >= 0)).sum()


KeepLevel = Literal["keep", "lean", "again"]


def keep_levels(tuning: Tuning, *, layers: int) -> list[KeepLevel]:
    """Levels of the blocks, bottom up."""
    recomputed = max(layers - tuning.keep - tuning.lean, 0)
    counts: dict[KeepLevel, int] = {"again": recomputed, "lean": tuning.lean, "keep": tuning.keep}
    return [level for level, count in counts.items() for _ in range(count)][-layers:]


class BlockMemory(NamedTuple):
    """Tensors that one block saves between the passes."""

    x: Tensor
    island: Island | None
    low: Tensor | None
    raw: Tensor | None
    kept: SavedActivations | None


@dataclass
class EmbeddingAndHead:
    """The parts around the blocks."""

    embed: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], Sequence[tuple[Tensor, Tensor]]]
    """Cosines and sines of positions, one pair for each kind of block."""
    final_norm: NormWeights
    head: FrozenWeight
    dtype: torch.dtype
    """Type of the hidden states."""
    ending: LogitsEnding


Turns = Sequence[tuple[Tensor, Tensor]]
"""Cosines and sines of all positions, a pair for each kind of block."""


AttendToEarlier = Callable[[int, Tensor, Tensor, Tensor, AttentionRule], Tensor]
"""Takes a block's number and the queries, keys and values of one token of each row; returns attention to
earlier tokens.
"""


class GpuDecoder:
    def __init__(
        self,
        blocks: Sequence[BlockWeights],
        outside: EmbeddingAndHead,
        shapes: Sequence[BlockShape],
        tuning: Tuning,
        *,
        compiled: bool,
    ) -> None:
        self.blocks = list(blocks)
        self._stacks: LoraStacks | None = None
        if not compiled:
            self._stack_adapters(outside.dtype)
        self.outside = outside
        self.shapes = list(shapes)
        self._levels = keep_levels(tuning, layers=len(self.blocks))
        self._chunk_tokens, self._head_tokens = tuning.chunk_tokens, tuning.head_tokens
        adapted = [
            index
            for index, block in enumerate(self.blocks)
            if any(g.a for g in (block.qkv_graft, block.out_graft, block.gate_up_graft, block.down_graft))
        ]
        self.first = adapted[0] if adapted else len(self.blocks)
        if compiled:
            # Four sizes of batches, three levels, kept or not: each is one compilation of the same function.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)

        def wrap(function: Any) -> Any:
            return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

        self._before = wrap(pieces.before_attention)
        self._before_backward = wrap(pieces.before_attention_backward)
        self._after = wrap(pieces.after_attention)
        self._after_again = wrap(pieces.recompute_activations)
        self._after_backward = wrap(pieces.after_attention_backward)
        self._norm, self._norm_backward = wrap(fused.apply_norm), wrap(fused.apply_norm_backward)

    def _stack_adapters(self, dtype: torch.dtype) -> None:
        """Without a compiler, stacking adapters again for each product would cost more than the products."""
        groups = [
            group
            for block in self.blocks
            for group in (block.qkv_graft, block.out_graft, block.gate_up_graft, block.down_graft)
        ]
        self._stacks = LoraStacks(groups, dtype)
        stacked = iter(self._stacks.groups)
        self.blocks = [
            block._replace(
                qkv_graft=next(stacked),
                out_graft=next(stacked),
                gate_up_graft=next(stacked),
                down_graft=next(stacked),
            )
            for block in self.blocks
        ]

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        return self.outside.embed(tokens)

    @torch.no_grad()
    def learn(
        self, x: Tensor, packed: PackedLayout, scale: Tensor, progress: Callable[[], None] = lambda: None
    ) -> Tensor:
        """From embedded tokens to the summed loss; its gradient times `scale` is accumulated in the
        adapters.
        """
        gradients: Gradients = []
        self.refresh_adapters()
        turns = self._turns(x, packed.positions)
        memories: list[BlockMemory] = []
        for index, block in enumerate(self.blocks):
            x = self._forward(index, block, x, turns, packed.documents, memories)
        progress()
        loss, dx = self._compute_loss(x, packed, scale)
        del x
        for index in reversed(range(self.first, len(self.blocks))):
            dx = self._backward(index, memories.pop(), dx, turns, packed.documents, gradients)
        _add(gradients)
        if self._stacks is not None:
            self._stacks.add()
        progress()
        return loss

    @torch.no_grad()
    def compute_loss(self, x: Tensor, packed: PackedLayout) -> Tensor:
        """Only the summed loss."""
        self.refresh_adapters()
        turns = self._turns(x, packed.positions)
        for index in range(len(self.blocks)):
            x = self._pass(index, x, turns, packed.documents)
        return self._compute_loss(x, packed, None)[0]

    @torch.no_grad()
    def log_probabilities(self, x: Tensor, packed: PackedLayout) -> Tensor:
        """The log-probability of each target, padding included. Logits exist for one chunk only."""
        self.refresh_adapters()
        turns = self._turns(x, packed.positions)
        for index in range(len(self.blocks)):
            x = self._pass(index, x, turns, packed.documents)
        weight, epsilon, outside = self.outside.final_norm, self.shapes[-1].epsilon, self.outside
        size = self._head_tokens
        return torch.cat(
            [
                -target_losses(
                    product(outside.head, self._norm(x[positions], weight, epsilon)), targets, outside.ending
                )
                for positions, targets in zip(
                    torch.split(packed.predicts, size), torch.split(packed.targets, size), strict=True
                )
            ]
        )

    @torch.no_grad()
    def refresh_adapters(self) -> None:
        """Use the current adapters, before a pass or before tokens are generated by `advance`."""
        if self._stacks is not None:
            self._stacks.refresh()

    @torch.no_grad()
    def advance(self, tokens: Tensor, positions: Tensor, attend: "AttendToEarlier") -> Tensor:
        """Logits after one token of each row, in float32."""
        x = self.outside.embed(tokens)
        turns = self._turns(x, positions)
        for index, (w, shape) in enumerate(zip(self.blocks, self.shapes, strict=True)):
            q, k, v, _, _ = pieces.before_attention(x, *turns[shape.turn], w, shape)
            mixed = attend(index, q, k, v, shape.attention).reshape(x.shape[0], -1)
            x = pieces.after_attention(x, mixed, w, shape)[0]
        outside = self.outside
        normed = fused.apply_norm(x, outside.final_norm, self.shapes[-1].epsilon)
        return outside.ending.apply_(product(outside.head, normed).float())

    def _turns(self, x: Tensor, positions: Tensor) -> Turns:
        turns = self.outside.rotary(x, positions)
        return [(cos.to(x.dtype), sin.to(x.dtype)) for cos, sin in turns]

    def _pass(self, index: int, x: Tensor, turns: Turns, documents: Documents) -> Tensor:
        """Run a block, saving nothing."""
        w, shape = self.blocks[index], self.shapes[index]
        q, k, v, _, _ = self._before(x, *turns[shape.turn], w, shape)
        mixed = attend(q, k, v, documents, shape.attention).reshape(x.shape[0], -1)
        del q, k, v
        chunks = zip(*(torch.split(part, self._chunk_tokens) for part in (x, mixed)), strict=True)
        parts = [self._after(*chunk, w, shape)[0] for chunk in chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward(
        self,
        index: int,
        w: BlockWeights,
        x: Tensor,
        turns: Turns,
        documents: Documents,
        memories: list[BlockMemory],
    ) -> Tensor:
        level = self._levels[index]
        if index < self.first or level == "again":
            if index >= self.first:
                memories.append(BlockMemory(x, None, None, None, None))
            return self._pass(index, x, turns, documents)
        shape = self.shapes[index]
        q, k, v, low, raw = self._before(x, *turns[shape.turn], w, shape)
        island = attend_keeping(q, k, v, documents, shape.attention)
        y, saved = self._after(x, island.mixed.detach().view(x.shape[0], -1), w, shape)
        if level == "lean":
            saved = saved._replace(gate_up=None)
        memories.append(BlockMemory(x, island, low, raw, saved))
        return y  # type: ignore[no-any-return]

    def _backward(
        self,
        index: int,
        memory: BlockMemory,
        dy: Tensor,
        turns: Turns,
        documents: Documents,
        collected: "Gradients",
    ) -> Tensor:
        w, shape = self.blocks[index], self.shapes[index]
        x, island, low, raw, saved = memory
        if island is None:
            q, k, v, low, raw = self._before(x, *turns[shape.turn], w, shape)
            island = attend_keeping(q, k, v, documents, shape.attention)
            del q, k, v
        mixed = island.mixed.detach().view(x.shape[0], -1)
        d_mixed, d_middle = self._second_half_backward(index, x, mixed, saved, dy, collected)
        del saved, dy, mixed
        d_heads = island.backward(d_mixed)
        del island, d_mixed
        dx, gradient = self._before_backward(
            d_heads, d_middle, (x, low, raw), turns[shape.turn], w, shape, index > self.first
        )
        collected.append((w.qkv_graft, gradient))
        return dx  # type: ignore[no-any-return]

    def _second_half_backward(
        self,
        index: int,
        x: Tensor,
        mixed: Tensor,
        saved: SavedActivations | None,
        dy: Tensor,
        collected: "Gradients",
    ) -> tuple[Tensor, Tensor]:
        """In chunks if the widest tensors were not saved: then they never exist for all tokens."""
        w, shape = self.blocks[index], self.shapes[index]
        if saved is not None and saved.gate_up is not None:
            d_mixed, d_middle, gradients = self._after_backward(dy, mixed, saved, w, shape)
            collected += zip((w.out_graft, w.gate_up_graft, w.down_graft), gradients, strict=True)
            return d_mixed, d_middle
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, x.shape[0], self._chunk_tokens):
            chunk = slice(start, start + self._chunk_tokens)
            if saved is None:
                part = self._after_again(x[chunk], mixed[chunk], w, shape)
            else:
                part = SavedActivations._make(None if tensor is None else tensor[chunk] for tensor in saved)
            d_mixed, d_middle, gradients = self._after_backward(dy[chunk], mixed[chunk], part, w, shape)
            collected += zip((w.out_graft, w.gate_up_graft, w.down_graft), gradients, strict=True)
            parts.append((d_mixed, d_middle))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([pair[0] for pair in parts]), torch.cat([pair[1] for pair in parts])

    def _compute_loss(self, x: Tensor, packed: PackedLayout, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The loss at the positions that predict, and the gradient of the last block's output."""
        weight, epsilon, ending = self.outside.final_norm, self.shapes[-1].epsilon, self.outside.ending
        head = self.outside.head
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        dx = torch.zeros_like(x)
        size = self._head_tokens
        for start in range(0, packed.predicts.shape[0], size):
            positions, targets = packed.predicts[start : start + size], packed.targets[start : start + size]
            hidden = x[positions]
            normed = self._norm(hidden, weight, epsilon)
            if scale is None:
                total += chunk_loss_only(normed, targets, head, ending)
                continue
            weights = None if packed.weights is None else packed.weights[start : start + size]
            loss, d = chunk_loss(normed, targets, weights, head, ending)
            total += loss
            d = self._norm_backward((d * scale).to(x.dtype), hidden, weight, epsilon)
            dx.index_add_(0, positions, d)
        return total, dx


Gradients = list[tuple[LoraGroup, LoraGradient]]


def _add(gradients: Gradients) -> None:
    """Add all at once: hundreds of small sums would cost more than a block."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for graft, gradient in gradients:
        if not gradient.a:
            continue
        for parameter, d in zip((*graft.a, *graft.b), (*gradient.a, *gradient.b), strict=True):
            if parameter.grad is None:
                parameter.grad = d
            elif id(parameter) in sums:
                parameter.grad += d
            else:
                sums[id(parameter)] = (parameter.grad, d)
    if sums:
        torch._foreach_add_([grad for grad, _ in sums.values()], [d for _, d in sums.values()])


class CudaGraphDecoder:
    """Replaces the decoder on a GPU. Gradients have fixed addresses from the start."""

    def __init__(self, decoder: GpuDecoder, parameters: Sequence[Tensor], *, plain_runs: int = 1) -> None:
        self.decoder = decoder
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._runs: dict[Any, int] = {}
        self._recordings: dict[Any, tuple[Any, Tensor, PackedLayout, Tensor, Tensor]] = {}
        """By shape: a graph, the tensors that it reads (hidden states, layout, scale), and its loss."""
        self._plain: set[Any] = set()
        self._plain_runs = plain_runs
        self._pool = torch.cuda.MemPool()
        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def learn(
        self, x: Tensor, packed: PackedLayout, scale: Tensor, progress: Callable[[], None] = lambda: None
    ) -> Tensor:
        documents = packed.documents
        even = documents.lengths if documents.even else (documents.longest,)
        sizes = documents.starts.shape[0], packed.predicts.shape[0]
        shape = tuple(x.shape), even, *sizes, packed.weights is not None
        if shape not in self._recordings:
            runs = self._runs.get(shape, 0)
            self._runs[shape] = runs + 1
            if runs < self._plain_runs or shape in self._plain:
                return self.give_way(lambda: self.decoder.learn(x, packed, scale, progress))
            try:
                self._recordings[shape] = self._record(x, packed, scale)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                # Not enough memory for another recording: this shape stays eager.
                self._plain.add(shape)
            if shape in self._plain:
                # Not in the handler: the error refers to the tensors of the recording.
                return self.give_way(lambda: self.decoder.learn(x, packed, scale, progress))
        graph, still_x, still, still_scale, loss = self._recordings[shape]
        still_x.copy_(x)
        still_scale.copy_(scale)
        still.copy_(packed)
        graph.replay()
        progress()
        return loss.clone()

    def give_way(self, compute: Callable[[], Tensor]) -> Tensor:
        """Compute something eagerly, in the memory of the recordings; if it does not fit there, without them.
        Recordings use their memory only while they are replayed, so an eager pass needs none of its own. A
        pass that runs out of memory has added nothing to the gradients yet: they are added last.
        """
        try:
            with self._apart():
                return compute()
        except torch.OutOfMemoryError:
            self._recordings.clear()
            self._pool = torch.cuda.MemPool()
            torch.cuda.empty_cache()
        return compute()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """In the pool and on the stream of the recordings: freed memory belongs to a pool and a stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(self._pool):
            yield
        current.wait_stream(self._stream)

    def _record(
        self, x: Tensor, packed: PackedLayout, scale: Tensor
    ) -> tuple[Any, Tensor, PackedLayout, Tensor, Tensor]:
        """Recording computes nothing: gradients are unchanged until the first replay."""
        still, x, scale = packed.clone(), x.clone(), scale.clone()
        if not self._recordings:
            # Plain passes leave gaps of their own behind: the first recording starts without them.
            self._pool = torch.cuda.MemPool()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph, losses = record(
            lambda: self.decoder.learn(x, still, scale), pool=self._pool.id, stream=self._stream
        )
        return graph, x, still, scale, losses


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, even if that shows only after the end of a recording."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, torch.OutOfMemoryError):
            return True
        cause = cause.__context__
    return False


class GpuTokenPass:
    """Call `update` after the adapters changed, and `run` for each token."""

    def __init__(self, decoder: GpuDecoder) -> None:
        self._decoder = decoder

    @classmethod
    def of(cls, decoder: GpuDecoder) -> "GpuTokenPass | None":
        """None if keys of earlier tokens, which the model itself wrote, have another order or a window."""
        plain = all(
            not shape.interleaved and shape.attention.window is None and shape.attention.cap is None
            for shape in decoder.shapes
        )
        return cls(decoder) if plain else None

    def update(self) -> None:
        self._decoder.refresh_adapters()

    def run(self, tokens: Tensor, positions: Tensor, cache: SlotCache, columns: int) -> Tensor:
        """Logits after a token of each of the first slots. `tokens` and `positions` are [rows]."""
        visible = torch.arange(columns, device=positions.device) <= positions[:, None]
        bias = torch.zeros(visible.shape, dtype=cache.dtype, device=visible.device)
        bias.masked_fill_(~visible, float("-inf"))

        def attend(block: int, q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> Tensor:
            keys, values = cache.write_tokens(block, k, v, positions, columns)
            return attend_to_slots(q, keys, values, bias, on_gpu=True, scale=rule.scale)

        return self._decoder.advance(tokens, positions, attend)
