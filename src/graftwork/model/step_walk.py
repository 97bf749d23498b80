"""A whole training step on a card as memory: weights, passes, gradients, update. Pure.

In: something that gives memory, a decoder's shape, a tuning. Out: the same requests, in the same order,
that `train/gpu` makes of the card. Whoever gives the memory knows what that comes to.
"""

from dataclasses import dataclass
from typing import Any

from graftwork.model import step_block, step_head
from graftwork.model.step_pieces import HALF, WORD, free_all
from graftwork.model.step_sizes import Memory, Sizes, sizes_of
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import MIB

WORKSPACE = 32 * MIB
"""What cuBLAS is given on a Hopper card; on others 8 MiB."""

LONG = 8
"""Bytes of a token's number."""


@dataclass(frozen=True)
class Walk:
    """One step's numbers."""

    shape: ModelShape
    tuning: Tuning
    sizes: Sizes
    adapted: int
    trainable: int
    places: int

    @property
    def levels(self) -> list[step_block.Level]:
        """Of the adapted blocks, from below."""
        again = max(self.adapted - self.tuning.keep - self.tuning.lean, 0)
        levels: list[step_block.Level] = ["again"] * again
        levels += ["lean"] * self.tuning.lean
        levels += ["keep"] * self.tuning.keep
        return levels[len(levels) - self.adapted :]


def walk_of(
    shape: ModelShape,
    tuning: Tuning,
    *,
    trainable: int,
    adapted: int,
    places: int | None = None,
    even: bool = True,
) -> Walk:
    """`places`: of one pass, those that predict; all of them where nobody says."""
    sizes = sizes_of(shape, tuning, trainable=trainable, adapted=adapted, even=even)
    wanted = round_places(places or tuning.micro_tokens, head_tokens=tuning.head_tokens)
    return Walk(shape, tuning, sizes, adapted, trainable, wanted)


def round_places(count: int, *, head_tokens: int) -> int:
    """As batches are filled up: full chunks of the head, or one whose size is a power of two."""
    if count >= head_tokens:
        return -(-count // head_tokens) * head_tokens
    return min(max(1 << max(count - 1, 0).bit_length(), 64), head_tokens)


def adapter_sizes(s: Sizes, blocks: int) -> list[int]:
    """Bytes of each learned tensor, in float32."""
    return [size for group in s.groups for size in group.gradient_bytes] * blocks


def hold_states(memory: Memory, s: Sizes, blocks: int) -> None:
    """Adam's: two for each learned tensor, and the count of its steps."""
    for size in adapter_sizes(s, blocks):
        memory.alloc(WORD)
        memory.alloc(size)
        memory.alloc(size)


class Pass:
    """One forward and backward pass, piece by piece, so that whoever counts can look in between."""

    def __init__(self, memory: Memory, walk: Walk) -> None:
        self.memory, self.walk = memory, walk
        self.found: list[Any] = []
        self.held: list[step_block.BlockHeld] = []
        self.batch: list[Any] = []
        self.x: Any = None

    def begin(self) -> None:
        """The batch, its embedding and its positions."""
        tokens, s = self.walk.tuning.micro_tokens, self.walk.sizes
        numbers = [LONG * tokens, LONG * self.walk.places, LONG * self.walk.places, WORD, LONG * tokens]
        self.batch = [self.memory.alloc(size) for size in numbers]
        self.x = self.memory.alloc(HALF * tokens * s.hidden)
        wide = [self.memory.alloc(WORD * tokens * s.head_dim) for _ in range(4)]
        turns = [self.memory.alloc(HALF * tokens * s.head_dim) for _ in range(2)]
        free_all(self.memory, wide)
        self.batch += [*turns, self.x]

    def forward(self, level: step_block.Level | None) -> None:
        """One block; no level: it lies below all adapters."""
        tuning, first = self.walk.tuning, self.x is self.batch[-1]
        # The first input is held by the call itself, to the end.
        x = None if first else self.x
        y, held = step_block.forward(
            self.memory, self.walk.sizes, tuning.micro_tokens, tuning.chunk_tokens, level or "again", x
        )
        if level is not None:
            self.held.append(held)
        elif not first:
            self.memory.free(self.x)
        self.x = y

    def lose(self) -> None:
        tuning = self.walk.tuning
        dx = step_head.lose(
            self.memory, self.walk.sizes, tuning.micro_tokens, self.walk.places, tuning.head_tokens
        )
        self.memory.free(self.x)
        self.x = dx

    def backward(self) -> None:
        """The uppermost block that is left."""
        tuning, held = self.walk.tuning, self.held.pop()
        dx, found = step_block.backward(
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
        own = len(adapter_sizes(self.walk.sizes, self.walk.adapted))
        free_all(self.memory, self.batch)
        free_all(self.memory, self.found if not keep_gradients else self.found[own:])


def hold_recording(memory: Memory, walk: Walk) -> None:
    """What a recorded pass reads from: a batch of its own, and its products' own workspace."""
    tokens = walk.tuning.micro_tokens
    numbers = [LONG * tokens, WORD, LONG * walk.places, LONG * walk.places]
    for size in (*numbers, HALF * tokens * walk.sizes.hidden, WORD, WORKSPACE):
        memory.alloc(size)


def take_pass(memory: Memory, walk: Walk, *, keep_gradients: bool) -> None:
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
