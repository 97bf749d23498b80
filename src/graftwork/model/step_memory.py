"""What a training step on a card holds, in bytes, and which blocks may keep what. Pure.

In: a decoder's shape and how a step is tuned. Out: bytes, or levels. The same count that
`plan/memory_card.py` replays (`model/step_walk.py`), summed up block by block, so that hundreds of
settings can be weighed in a moment: equal blocks ask for equal memory.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from graftwork.model import step_block, step_head
from graftwork.model.shape import layer_parameters, linear_sizes
from graftwork.model.step_load import load
from graftwork.model.step_sizes import Sizes, Tally
from graftwork.model.step_walk import (
    WORKSPACE,
    Pass,
    Walk,
    adapter_sizes,
    hold_recording,
    hold_states,
    walk_of,
)
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB

WIDTH = 2
"""Bytes of an activation."""

SLACK = 1.04
"""What the allocator holds beyond what is asked of it: its pages, and holes between what is kept."""


class Step(NamedTuple):
    """A piece of a step: the most that it takes for a moment, and what it leaves."""

    most: int
    left: int


def kept_bytes(shape: ModelShape, level: str) -> float:
    """What one token leaves in one block between the passes; thin products are not counted."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if level == "again":
        return WIDTH * h
    beside = layer_parameters(shape) - sum(a * b for a, b in linear_sizes(shape).values()) - 2 * h
    # Input, queries, keys, values, what attention gave, the middle of the residual stream.
    lean = WIDTH * (2 * h + 2 * q + 2 * kv) + 4 * shape.heads
    if beside in (2 * shape.head_dim, q + kv):
        # Heads before their norm; and behind attention and MLP what a norm there normed.
        lean += WIDTH * (q + kv) + (WIDTH * 2 * h if beside == q + kv else 0)
    return lean if level == "lean" else lean + WIDTH * 2 * i


def static_bytes(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int | None = None) -> float:
    """Weights and everything about what is learned."""
    layers = shape.layers if adapted is None else adapted
    return float(_standing(walk_of(shape, tuning, trainable=trainable, adapted=layers)))


def peak_bytes(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> float:
    """All of it, as the allocator holds it. Blocks below the first adapted one keep nothing."""
    count = count_by_levels(shape, tuning, trainable=trainable, adapted=adapted)
    return count(tuning.keep, tuning.lean).held


class Counted(NamedTuple):
    """Bytes that stand from step to step, and the most that a pass asks for beyond them."""

    standing: int
    passing: int

    @property
    def asked(self) -> int:
        return self.standing + self.passing

    @property
    def held(self) -> float:
        """With what the allocator adds to a pass."""
        return self.standing + SLACK * self.passing


def count_by_levels(
    shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int
) -> Callable[[int, int], Counted]:
    """The peak as a function of (keep, lean), all else as in the tuning: quick to ask many times."""
    walk = walk_of(shape, tuning, trainable=trainable, adapted=adapted)
    standing, most_of_pass = _standing(walk), _most_by_levels(walk)
    return lambda keep, lean: Counted(standing, most_of_pass(keep, lean))


def _standing(walk: Walk) -> int:
    """What is there before and after every step: one block's, as many times as there are blocks."""
    places = (walk.shape.tied_embeddings, walk.tuning.host_embedding)
    one, two = (_loaded(walk.sizes, layers, *places) for layers in (1, 2))
    tally = Tally()
    tally.alloc(WORKSPACE)
    if walk.tuning.compiled or walk.tuning.recorded:
        hold_recording(tally, walk)
    return one + (walk.shape.layers - 1) * (two - one) + walk.adapted * _learned(walk.sizes) + tally.now


@lru_cache(maxsize=1024)
def _loaded(s: Sizes, layers: int, tied: bool, on_host: bool) -> int:
    tally = Tally()
    load(tally, s, layers=layers, tied=tied, on_host=on_host)
    return tally.now


@lru_cache(maxsize=1024)
def _learned(s: Sizes) -> int:
    """Adapters of one block, their gradients and states."""
    tally = Tally()
    for size in adapter_sizes(s, 1):
        tally.alloc(size)
        tally.alloc(size)
    hold_states(tally, s, 1)
    return tally.now


def _most_by_levels(walk: Walk) -> Callable[[int, int], int]:
    """The most beyond what stands, over forward pass, loss and backward pass."""
    tuning, s, adapted = walk.tuning, walk.sizes, walk.adapted
    tokens, chunk = tuning.micro_tokens, tuning.chunk_tokens
    start, loss = _begin(walk), _loss(s, tokens, walk.places, tuning.head_tokens).most
    levels: tuple[step_block.Level, ...] = ("again", "lean", "keep")
    forward = [_forward(s, tokens, chunk, level) for level in levels]
    backward = [_backward(s, tokens, chunk, level) for level in levels]
    below = start
    if frozen := walk.shape.layers - adapted:
        # What the last of them gave is there beside the input of the first, which is held to the end.
        passed = WIDTH * tokens * s.hidden
        below = start + forward[0].most + (passed if frozen > 1 else 0)
        start += passed

    def most_of_pass(keep: int, lean: int) -> int:
        keep = min(keep, adapted)
        lean = min(lean, adapted - keep)
        counts = (adapted - keep - lean, lean, keep)
        most, now = below, start
        for count, step in zip(counts, forward, strict=True):
            if count:
                most = max(most, now + (count - 1) * step.left + step.most)
                now += count * step.left
        most = max(most, now + loss)
        for count, step in zip(reversed(counts), reversed(backward), strict=True):
            if count:
                # Fewer blocks hold something, more gradients are there: the most is at one of the ends.
                most = max(most, now + step.most, now + (count - 1) * step.left + step.most)
                now += count * step.left
        return most

    return most_of_pass


def _begin(walk: Walk) -> int:
    tally = Tally()
    Pass(tally, walk).begin()
    return tally.now


@lru_cache(maxsize=4096)
def _forward(s: Sizes, tokens: int, chunk: int, level: step_block.Level) -> Step:
    tally = Tally()
    step_block.forward(tally, s, tokens, chunk, level, None)
    return Step(tally.most, tally.now)


@lru_cache(maxsize=4096)
def _backward(s: Sizes, tokens: int, chunk: int, level: step_block.Level) -> Step:
    tally = Tally()
    x = tally.alloc(WIDTH * tokens * s.hidden)
    dy, held = step_block.forward(tally, s, tokens, chunk, level, x)
    before = tally.most = tally.now
    step_block.backward(tally, s, tokens, chunk, held, wants_input=True)
    most = tally.most
    tally.free(dy)
    return Step(most - before, tally.now - before)


@lru_cache(maxsize=4096)
def _loss(s: Sizes, tokens: int, places: int, head_tokens: int) -> Step:
    tally = Tally()
    step_head.lose(tally, s, tokens, places, head_tokens)
    return Step(tally.most, tally.now)


def best_levels(shape: ModelShape, room: float, *, tokens: int, adapted: int) -> tuple[int, int]:
    """(keep, lean) that fit into `room` bytes and leave the least to be computed again."""
    keeping, leaning = (extra_bytes(shape, level) * tokens for level in ("keep", "lean"))
    best, least = (0, 0), weights_again(shape, (0, 0), adapted)
    for keep in range(adapted + 1):
        left = room - keep * keeping
        if left < 0:
            break
        lean = min(adapted - keep, int(left // leaning))
        if (again := weights_again(shape, (keep, lean), adapted)) < least:
            best, least = (keep, lean), again
    return best


def extra_bytes(shape: ModelShape, level: str) -> float:
    """What a token costs in a block of this level beyond the block's input."""
    return kept_bytes(shape, level) - kept_bytes(shape, "again")


def weights_again(shape: ModelShape, levels: tuple[int, int], adapted: int) -> float:
    """Weights that are multiplied once more because something was not kept."""
    keep, lean = levels
    sizes = linear_sizes(shape)
    gate_up = sum(sizes[name][0] * sizes[name][1] for name in ("gate_proj", "up_proj") if name in sizes)
    down = sizes["down_proj"][0] * sizes["down_proj"][1] if "down_proj" in sizes else 0
    return lean * gate_up + (adapted - keep - lean) * (layer_parameters(shape) - down)


def keep_measured(tuning: Tuning, shape: ModelShape, *, measured_gib: float, adapted: int) -> Tuning:
    """The levels once more, from a step that was measured with every block starting from its input.

    What stands between the limit and the measured peak is what blocks may keep.
    """
    room = (tuning.limit_gib - measured_gib) * GIB / SLACK
    keep, lean = best_levels(shape, room, tokens=tuning.micro_tokens, adapted=adapted)
    return tuning.model_copy(update={"keep": keep, "lean": lean})


def describe_tuning(tuning: Tuning) -> str:
    """In a sentence, for plans and for the word at the start of a run."""
    form = {"whole": "16 bits", "eight": "8 bits, multiplied in 8 bits", "four": "4 bits (NF4)"}[tuning.form]
    where = ", the embedding on the host" if tuning.host_embedding else ""
    return (
        f"frozen weights in {form}{where}; {tuning.micro_tokens:,} tokens at a time; "
        f"{tuning.keep} blocks keep everything, {tuning.lean} all but the widest tensor; "
        f"{tuning.peak_gib:.1f} of {tuning.limit_gib:.1f} GiB"
    )
