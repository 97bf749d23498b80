"""A whole step of graft's own on a card as memory: loading, passes, loss, gradients, update. Pure.

In: something that gives memory, a decoder's shape, a tuning. Out: the same allocations, in the same
order, that `train/gpu` makes. The caller counts them or replays them through the allocator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from graftwork.costmodel import card_block
from graftwork.costmodel import card_tensors as pieces
from graftwork.costmodel.card_block import SHOWN, chunks
from graftwork.costmodel.card_tensors import (
    HALF,
    WORD,
    ByteTally,
    LinearGroup,
    StepSizes,
    TensorMemory,
    follow,
    free_all,
    sizes_of,
)
from graftwork.costmodel.packing import round_places
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import MIB


def lose(memory: TensorMemory, s: StepSizes, tokens: int, places: int, head_tokens: int) -> Any:
    """The loss at the places that predict: the gradient of the last block's output is left."""
    dx = memory.alloc(HALF * tokens * s.hidden)
    last: list[Any] = []
    for some in chunks(places, head_tokens)[:SHOWN]:
        # Each name holds what the last chunk left until it is rebound.
        wide = some * s.hidden
        hidden = memory.alloc(HALF * wide)
        free_all(memory, last[:1])
        normed = memory.alloc(HALF * wide) if s.compiled else pieces.norm(memory, wide)
        free_all(memory, last[1:2])
        dh = _chunk_loss(memory, s, some)
        free_all(memory, last[2:])
        scaled = memory.alloc(HALF * wide)
        d = memory.alloc(HALF * wide) if s.compiled else pieces.norm(memory, wide)
        free_all(memory, [dh, scaled])
        last = [hidden, normed, d]
    free_all(memory, last)
    return dx


def _chunk_loss(memory: TensorMemory, s: StepSizes, tokens: int) -> Any:
    """Logits become their gradient in place."""
    codes = follow(memory, pieces.CODES, tokens * s.hidden)["out"] if s.head == "eight" else None
    logits = memory.alloc(HALF * tokens * s.vocabulary)
    if codes is not None:
        memory.free(codes)
    losses = memory.alloc(WORD * tokens)
    if s.head == "eight":
        dh = pieces.eight_turned(memory, tokens, s.vocabulary, s.hidden, turned=s.turned)
    else:
        dh = memory.alloc(HALF * tokens * s.hidden)
    free_all(memory, [losses, logits])
    return dh


NF4_BLOCK, NF4_CHUNK = 64, 256
AT_ONCE = 2**24
"""Elements that are put into eight or four bits in one go."""


def load(
    memory: TensorMemory,
    s: StepSizes,
    *,
    layers: int,
    tied: bool,
    on_host: bool,
    note: Callable[[str], None] = lambda _: None,
) -> None:
    """All that is frozen, in the order in which it comes; `note` is called with what has just come.

    `tied`: the head is the embedding; `on_host`: the embedding does not come at all.
    """
    table = s.vocabulary * s.hidden
    _load_blocks(memory, s, layers)
    note("weights")
    if s.head == "eight":
        load_eight(memory, (s.vocabulary,), s.hidden, turned=s.turned)
    elif tied and on_host:
        memory.alloc(HALF * table)
    note("head")
    if not on_host:
        memory.alloc(HALF * table)
    note("embedding")
    load_norms(memory, s, layers)
    note("norms")
    if s.head == "whole" and not tied:
        memory.alloc(HALF * table)
    note("head")


def _load_blocks(memory: TensorMemory, s: StepSizes, layers: int) -> None:
    """The products of all blocks. A tally counts one of them: they are alike."""
    computed = min(layers, 1) if isinstance(memory, ByteTally) else layers
    for _ in range(computed):
        before = memory.now if isinstance(memory, ByteTally) else 0
        for group in s.groups:
            load_group(memory, group, form=s.form, turned=s.turned)
    if isinstance(memory, ByteTally) and layers > 1:
        more = (memory.now - before) * (layers - 1)
        memory.now += more
        # The temporaries of the last block, on top of all that stays.
        memory.most += more


def load_norms(memory: TensorMemory, s: StepSizes, layers: int) -> None:
    """Of the blocks, the last one, and the frequencies of rotary positions."""
    for _ in range(layers):
        if s.head_norms != "none":
            for width in (s.q, s.kv) if s.head_norms == "all" else (s.head_dim, s.head_dim):
                _load_norm(memory, s, width)
        for _ in range(s.norms):
            _load_norm(memory, s, s.hidden)
    _load_norm(memory, s, s.hidden)
    for _ in range(2):
        memory.alloc(HALF * s.head_dim)


def _load_norm(memory: TensorMemory, s: StepSizes, width: int) -> None:
    memory.alloc(HALF * width)
    if s.norm_bias:
        memory.alloc(HALF * width)
    if s.layout.norm == "rms_plus_one":
        memory.alloc(WORD * width)


def load_group(memory: TensorMemory, group: LinearGroup, *, form: str, turned: bool) -> None:
    """The weights of one product."""
    if form == "four":
        for out in group.outs:
            _load_four(memory, out, group.inputs)
            if group.bias:
                memory.alloc(HALF * out)
        if group.bias:
            memory.alloc(HALF * group.out)
        memory.alloc(WORD * 16)
    elif form == "eight":
        bias = HALF * group.out if group.bias else 0
        load_eight(memory, group.outs, group.inputs, turned=turned, bias=bias)
    else:
        memory.alloc(HALF * group.weights)
        if group.bias:
            memory.alloc(HALF * group.out)


def load_eight(
    memory: TensorMemory, outs: Sequence[int], inputs: int, *, turned: bool, bias: int = 0
) -> None:
    """A weight in 8 bits, some rows at a time; a name holds the last rows until the next are there."""
    weights = sum(outs) * inputs
    if bias:
        memory.alloc(bias)
    memory.alloc(weights)
    memory.alloc(WORD * sum(outs))
    held: list[Any] = []
    rows = max(1, AT_ONCE // inputs)
    for count in (min(rows, out - begin) for out in outs for begin in range(0, out, rows)):
        half, wide = memory.alloc(HALF * count * inputs), memory.alloc(WORD * count * inputs)
        memory.free(half)
        _let_go(memory, held, "wide")
        sizes = memory.alloc(WORD * count * inputs)
        own = memory.alloc(WORD * count)
        memory.free(sizes)
        _let_go(memory, held, "own")
        held = [("wide", wide), ("own", own)]
    free_all(memory, [block for _, block in held])
    if turned:
        memory.alloc(weights)


def _load_four(memory: TensorMemory, out: int, inputs: int) -> None:
    """A weight in 4 bits, some rows at a time; a name holds the last rows until the next are there."""
    weights = out * inputs
    scales = WORD * weights // NF4_BLOCK
    weight = memory.alloc(HALF * weights)
    small = [memory.alloc(WORD * 16), memory.alloc(WORD * 15)]
    memory.alloc(weights // 2)
    every = memory.alloc(scales)
    held: list[Any] = []
    rows = max(1, AT_ONCE // inputs)
    for begin in range(0, out, rows):
        some = min(rows, out - begin) * inputs
        wide = memory.alloc(WORD * some)
        _let_go(memory, held, "wide")
        sizes = memory.alloc(WORD * some)
        largest = memory.alloc(WORD * some // NF4_BLOCK)
        memory.free(sizes)
        _let_go(memory, held, "largest")
        least = memory.alloc(WORD * some // NF4_BLOCK)
        unit = memory.alloc(WORD * some)
        memory.free(least)
        _let_go(memory, held, "unit")
        places = memory.alloc(WORD * some)
        nearest = memory.alloc(some)
        memory.free(places)
        _let_go(memory, held, "nearest")
        high = memory.alloc(some // 2)
        pair = memory.alloc(some // 2)
        free_all(memory, [high, pair])
        held = [("wide", wide), ("largest", largest), ("unit", unit), ("nearest", nearest)]
    free_all(memory, [block for _, block in held])
    _load_scales(memory, weights // NF4_BLOCK)
    free_all(memory, [*small, every, weight])


def _let_go(memory: TensorMemory, held: list[Any], name: str) -> None:
    for at, (of, block) in enumerate(held):
        if of == name:
            memory.free(block)
            del held[at]
            return


def _load_scales(memory: TensorMemory, scales: int) -> None:
    """The scales of blocks in 8 bits: their codes, a scale for each chunk, the offset."""
    chunks = -(-scales // NF4_CHUNK)
    memory.alloc(WORD)
    flat = memory.alloc(WORD * scales)
    padded = memory.alloc(WORD * chunks * NF4_CHUNK)
    sizes = memory.alloc(WORD * chunks * NF4_CHUNK)
    largest = memory.alloc(WORD * chunks)
    memory.free(sizes)
    memory.alloc(WORD * chunks)
    memory.free(largest)
    least = memory.alloc(WORD * chunks)
    divided = memory.alloc(WORD * chunks * NF4_CHUNK)
    memory.free(least)
    memory.alloc(chunks * NF4_CHUNK)
    free_all(memory, [divided, flat, padded])


WORKSPACE = 32 * MIB
"""What cuBLAS is given on a Hopper card; on others 8 MiB."""

ID_BYTES = 8
"""Bytes of a token's number."""


@dataclass(frozen=True)
class StepRecipe:
    """One step's numbers."""

    shape: ModelShape
    tuning: Tuning
    sizes: StepSizes
    adapted: int
    trainable: int
    places: int

    @property
    def levels(self) -> list[card_block.Level]:
        """Of the adapted blocks, from below."""
        again = max(self.adapted - self.tuning.keep - self.tuning.lean, 0)
        levels: list[card_block.Level] = ["again"] * again
        levels += ["lean"] * self.tuning.lean
        levels += ["keep"] * self.tuning.keep
        return levels[len(levels) - self.adapted :]


def step_recipe(
    shape: ModelShape,
    tuning: Tuning,
    *,
    trainable: int,
    adapted: int,
    places: int | None = None,
    even: bool = True,
) -> StepRecipe:
    """`places`: of one pass, those that predict; all of them by default."""
    sizes = sizes_of(shape, tuning, trainable=trainable, adapted=adapted, even=even)
    wanted = round_places(places or tuning.micro_tokens, head_tokens=tuning.head_tokens)
    return StepRecipe(shape, tuning, sizes, adapted, trainable, wanted)


def adapter_sizes(s: StepSizes, blocks: int) -> list[int]:
    """Bytes of each learned tensor, in float32."""
    return [size for group in s.groups for size in group.gradient_bytes] * blocks


def hold_stacks(memory: TensorMemory, s: StepSizes, blocks: int) -> None:
    """The stacked copies of the adapters that a step uses unless it is compiled."""
    groups = [] if s.compiled else list(s.groups) * blocks
    for group in groups:
        pieces.hold_stacks(memory, group)


def hold_states(memory: TensorMemory, s: StepSizes, blocks: int) -> None:
    """Adam's: two for each learned tensor, and the count of its steps."""
    for size in adapter_sizes(s, blocks):
        memory.alloc(WORD)
        memory.alloc(size)
        memory.alloc(size)


class Pass:
    """One forward and backward pass, piece by piece, so that a counter can read the peak in between."""

    def __init__(self, memory: TensorMemory, walk: StepRecipe) -> None:
        self.memory, self.walk = memory, walk
        self.found: list[Any] = []
        self.held: list[card_block.SavedBlock] = []
        self.batch: list[Any] = []
        self.x: Any = None

    def begin(self) -> None:
        """The batch, its embedding and its positions."""
        tokens, s = self.walk.tuning.micro_tokens, self.walk.sizes
        alloc, free = self.memory.alloc, self.memory.free
        self.batch = [alloc(_number_bytes(self.walk)), alloc(WORD), alloc(WORD)]
        self.x = alloc(HALF * tokens * s.hidden)
        # Positions, angles, angles of both halves; then cosines and sines, each scaled.
        wide = [
            alloc(WORD * tokens),
            alloc(WORD * tokens * s.head_dim // 2),
            alloc(WORD * tokens * s.head_dim),
        ]
        for _ in range(2):
            plain = alloc(WORD * tokens * s.head_dim)
            wide.append(alloc(WORD * tokens * s.head_dim))
            free(plain)
        turns = [alloc(HALF * tokens * s.head_dim) for _ in range(2)]
        free_all(self.memory, wide)
        self.batch += [*turns, self.x]

    def forward(self, level: card_block.Level | None) -> None:
        """One block; no level: it is below all adapters."""
        tuning, first = self.walk.tuning, self.x is self.batch[-1]
        # The first input is held by the call itself, to the end.
        x = None if first else self.x
        y, held = card_block.forward(
            self.memory, self.walk.sizes, tuning.micro_tokens, tuning.chunk_tokens, level or "again", x
        )
        if level is not None:
            self.held.append(held)
        elif not first:
            self.memory.free(self.x)
        self.x = y

    def lose(self) -> None:
        tuning = self.walk.tuning
        dx = lose(self.memory, self.walk.sizes, tuning.micro_tokens, self.walk.places, tuning.head_tokens)
        self.memory.free(self.x)
        self.x = dx

    def backward(self) -> None:
        """The uppermost block that is left."""
        tuning, held = self.walk.tuning, self.held.pop()
        dx, found = card_block.backward(
            self.memory,
            self.walk.sizes,
            tuning.micro_tokens,
            tuning.chunk_tokens,
            held,
            wants_input=bool(self.held),
        )
        self.memory.free(self.x)
        self.x = dx
        self.found += found

    def end(self, *, keep_gradients: bool) -> None:
        """Gradients become those of the adapters, or are added to them."""
        sizes = adapter_sizes(self.walk.sizes, self.walk.adapted)
        if keep_gradients and not self.walk.sizes.compiled:
            for size in sizes:
                self.memory.alloc(size)
        free_all(self.memory, self.batch)
        free_all(self.memory, self.found if not keep_gradients else self.found[len(sizes) :])


def hold_recording(memory: TensorMemory, walk: StepRecipe) -> None:
    """What a recorded pass reads from: a batch of its own, and its products' own workspace."""
    for size in (_number_bytes(walk), HALF * walk.tuning.micro_tokens * walk.sizes.hidden, WORD, WORKSPACE):
        memory.alloc(size)


def _number_bytes(walk: StepRecipe) -> int:
    """Tokens and positions, places and targets, in one tensor; bounds of documents are few."""
    return 2 * ID_BYTES * (walk.tuning.micro_tokens + walk.places)


def take_pass(memory: TensorMemory, walk: StepRecipe, *, keep_gradients: bool) -> None:
    """All of it: with `keep_gradients` the first, whose gradients stay."""
    one = Pass(memory, walk)
    one.begin()
    for _ in range(walk.shape.layers - walk.adapted):
        one.forward(None)
    for level in walk.levels:
        one.forward(level)
    one.lose()
    for _ in range(walk.adapted):
        one.backward()
    one.end(keep_gradients=keep_gradients)
