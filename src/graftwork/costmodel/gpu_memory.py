"""The memory of graft's own step on a GPU: LoRA, QLoRA (frozen weights in the form "four") or full. Pure.

Input: a decoder's shape, a tuning, what is trained. Output: `gpu_peak`, the peak of allocated and reserved
bytes and its parts, by replaying gpu_step.py through the allocator; `count_by_levels`, the same count summed
block by block, fast enough to rank hundreds of settings. Knows neither the CUDA context nor other processes.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from graftwork.costmodel import gpu_step
from graftwork.costmodel.allocator import Allocator, AllocatorLimitExceeded
from graftwork.costmodel.gpu_step import (
    WORKSPACE,
    Pass,
    StepRecipe,
    adapter_sizes,
    hold_recording,
    hold_stacks,
    hold_states,
    load,
    step_recipe,
    take_pass,
)
from graftwork.costmodel.gpu_tensors import WORD, ByteTally, StepSizes, TensorMemory, norm_places
from graftwork.model.shape import layer_parameters, layout_of_shape, linear_sizes
from graftwork.records.base import GIB, MIB
from graftwork.records.plan import MemoryPeak, ModelShape, Tuning

WIDTH = 2
"""Bytes of an activation."""

SLACK = 1.04
"""Allocator overhead relative to the requested bytes: its pages, and holes between saved tensors."""


class PieceBytes(NamedTuple):
    """A piece of a step: its temporary peak, and what it leaves allocated."""

    most: int
    left: int


def kept_bytes(shape: ModelShape, level: str) -> float:
    """Bytes that one token saves in one block between the passes; thin products are not counted."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if level == "again":
        return WIDTH * h
    layout, norms = layout_of_shape(shape), norm_places(shape)
    # Input, queries, keys, values, what attention gave, the middle of the residual stream.
    lean = WIDTH * ((1 if layout.parallel else 2) * h + 2 * q + 2 * kv) + 4 * shape.heads
    # Heads before their norm; and after attention and MLP what a norm there normed.
    lean += WIDTH * (q + kv) if norms.heads != "none" else 0
    lean += WIDTH * 2 * h if norms.after else 0
    return lean if level == "lean" else lean + WIDTH * (2 if layout.gated else 1) * i


def peak_bytes(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> float:
    """Return all of it, as the allocator holds it. Blocks below the first adapted one save nothing."""
    count = count_by_levels(shape, tuning, trainable=trainable, adapted=adapted)
    return count(tuning.keep, tuning.lean).held


class StepBytes(NamedTuple):
    """Bytes that last from step to step, and the peak of a pass beyond them."""

    standing: int
    passing: int

    @property
    def asked(self) -> int:
        return self.standing + self.passing

    @property
    def held(self) -> float:
        """The same, including the allocator's overhead for a pass."""
        return self.standing + SLACK * self.passing


def count_by_levels(
    shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int
) -> Callable[[int, int], StepBytes]:
    """Return the peak as a function of (keep, lean), with everything else as in the tuning; cheap to call
    often.
    """
    walk = step_recipe(shape, tuning, trainable=trainable, adapted=adapted)
    # What is there before and after every step: one block's, as many times as there are blocks.
    tied, on_host = shape.tied_embeddings, tuning.host_embedding
    one_block, two_blocks = (_loaded(walk.sizes, layers, tied, on_host) for layers in (1, 2))
    tally = ByteTally()
    tally.alloc(WORKSPACE)
    if tuning.compiled or tuning.recorded:
        hold_recording(tally, walk)
    standing = (
        one_block
        + (shape.layers - 1) * (two_blocks - one_block)
        + walk.adapted * _learned(walk.sizes)
        + tally.now
    )
    most_of_pass = _most_by_levels(walk)
    return lambda keep, lean: StepBytes(standing, most_of_pass(keep, lean))


@lru_cache(maxsize=1024)
def _loaded(s: StepSizes, layers: int, tied: bool, on_host: bool) -> int:
    tally = ByteTally()
    load(tally, s, layers=layers, tied=tied, on_host=on_host)
    return tally.now


@lru_cache(maxsize=1024)
def _learned(s: StepSizes) -> int:
    """Bytes of the adapters of one block, their gradients and optimizer states."""
    tally = ByteTally()
    for size in adapter_sizes(s, 1):
        tally.alloc(size)
        tally.alloc(size)
    hold_stacks(tally, s, 1)
    hold_states(tally, s, 1)
    return tally.now


def _most_by_levels(walk: StepRecipe) -> Callable[[int, int], int]:
    """Return the peak beyond the lasting bytes, over forward pass, loss and backward pass."""
    tuning, s, adapted = walk.tuning, walk.sizes, walk.adapted
    tokens, chunk = tuning.micro_tokens, tuning.chunk_tokens
    tally = ByteTally()
    Pass(tally, walk).begin()
    start, loss = tally.now, _most_of_loss(s, tokens, walk.places, tuning.head_tokens)
    levels: tuple[gpu_step.Level, ...] = ("again", "lean", "keep")
    forward = [_forward(s, tokens, chunk, level) for level in levels]
    backward = [_backward(s, tokens, chunk, level) for level in levels]
    below = start
    if frozen := walk.shape.layers - adapted:
        # What the last of them gave is there besides the input of the first, which is held to the end.
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


@lru_cache(maxsize=4096)
def _forward(s: StepSizes, tokens: int, chunk: int, level: gpu_step.Level) -> PieceBytes:
    tally = ByteTally()
    gpu_step.forward(tally, s, tokens, chunk, level, None)
    return PieceBytes(tally.most, tally.now)


@lru_cache(maxsize=4096)
def _backward(s: StepSizes, tokens: int, chunk: int, level: gpu_step.Level) -> PieceBytes:
    tally = ByteTally()
    x = tally.alloc(WIDTH * tokens * s.hidden)
    dy, saved = gpu_step.forward(tally, s, tokens, chunk, level, x)
    before = tally.most = tally.now
    gpu_step.backward(tally, s, tokens, chunk, saved, wants_input=True)
    most = tally.most
    tally.free(dy)
    return PieceBytes(most - before, tally.now - before)


@lru_cache(maxsize=4096)
def _most_of_loss(s: StepSizes, tokens: int, places: int, head_tokens: int) -> int:
    tally = ByteTally()
    gpu_step.compute_loss(tally, s, tokens, places, head_tokens)
    return tally.most


def extra_bytes(shape: ModelShape, level: str) -> float:
    """The cost of a token in a block of this level, beyond the block's input."""
    return kept_bytes(shape, level) - kept_bytes(shape, "again")


def weights_again(shape: ModelShape, levels: tuple[int, int], adapted: int) -> float:
    """Weights whose products are recomputed because an activation was not saved."""
    keep, lean = levels
    sizes, layout = linear_sizes(shape), layout_of_shape(shape)
    names = [path.rsplit(".", 1)[-1] for path in (*layout.gate_up, layout.down)]
    *gate_up_sizes, down = (math.prod(sizes[name]) if name in sizes else 0 for name in names)
    gate_up = sum(gate_up_sizes)
    return lean * gate_up + (adapted - keep - lean) * (layer_parameters(shape) - down)


SPARE = 112 * MIB
"""Bytes below a limit that are left for operations that the replay orders differently from the GPU."""


def gpu_peak(
    shape: ModelShape,
    tuning: Tuning,
    *,
    trainable: int,
    adapted: int,
    places: int | None = None,
    even: bool = True,
    expandable: bool = True,
) -> MemoryPeak:
    """Return the peak of a run of such steps. `places`: positions of a pass that predict; `even`: rows of one
    length. Under a limit that is too low the allocator releases its cache: if that suffices, the reserved
    bytes stay within the limit; if not, they are those of a larger GPU.
    """
    walk = step_recipe(shape, tuning, trainable=trainable, adapted=adapted, places=places, even=even)
    top = count(walk)
    reserved = _reserved_within(walk, expandable=expandable)
    if reserved is None:
        limit = int(tuning.limit_gib * GIB)
        reserved = max(_replay(walk, expandable=expandable, limit=None), limit + 1)
    return MemoryPeak(allocated=top.bytes, reserved=reserved, parts=top.parts, phase=top.phase)


def reserved_within(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> int | None:
    """Return the reserved bytes that `gpu_peak` reports if they fit the limit; None if they do not."""
    walk = step_recipe(shape, tuning, trainable=trainable, adapted=adapted)
    return _reserved_within(walk, expandable=True)


def _reserved_within(walk: StepRecipe, *, expandable: bool) -> int | None:
    limit = int(walk.tuning.limit_gib * GIB)
    try:
        return min(_replay(walk, expandable=expandable, limit=limit - SPARE), limit)
    except AllocatorLimitExceeded:
        return None


def load_peak(shape: ModelShape, tuning: Tuning) -> int:
    """Return the peak while weights are loaded onto the GPU."""
    tally, walk = ByteTally(), step_recipe(shape, tuning, trainable=0, adapted=0)
    _load(tally, walk)
    return tally.most


class Top(NamedTuple):
    """The moment of peak allocation."""

    bytes: int
    phase: str
    parts: dict[str, float]


def count(walk: StepRecipe) -> Top:
    """Replay a step after the first, and return its peak and what it consists of."""
    tally, parts, before = ByteTally(), dict[str, float](), 0

    def note(name: str) -> None:
        nonlocal before
        parts[name] = parts.get(name, 0.0) + tally.now - before
        before = tally.now

    _load(tally, walk, note=note)
    for name in ("adapters", "gradients"):
        _hold_all(tally, adapter_sizes(walk.sizes, walk.adapted))
        note(name)
    hold_stacks(tally, walk.sizes, walk.adapted)
    note("adapters")
    hold_states(tally, walk.sizes, walk.adapted)
    note("optimizer")
    tally.alloc(WORKSPACE)
    note("workspace")
    if walk.tuning.compiled or walk.tuning.recorded:
        hold_recording(tally, walk)
        note("recording")
    parts["weights"] += parts.pop("norms")
    tally.most = tally.now
    return _count_pass(tally, walk, parts)


def _load(memory: TensorMemory, walk: StepRecipe, *, note: Callable[[str], None] = lambda _: None) -> None:
    tied, on_host = walk.shape.tied_embeddings, walk.tuning.host_embedding
    load(memory, walk.sizes, layers=walk.shape.layers, tied=tied, on_host=on_host, note=note)


def _count_pass(tally: ByteTally, walk: StepRecipe, standing: dict[str, float]) -> Top:
    step_pass, before = Pass(tally, walk), tally.now
    step_pass.begin()
    parts = {**standing, "batch": float(tally.now - before)}
    before_blocks, gradient_bytes = tally.now, 0
    best = Top(0, "forward", {})

    def look(phase: str, saved: int) -> None:
        nonlocal best
        if tally.most > best.bytes:
            passing = tally.most - before_blocks - saved
            split = {"activations": saved - gradient_bytes, "logits": 0.0, "workspace": parts["workspace"]}
            if phase == "loss":
                split["logits"] = passing
            else:
                split["workspace"] += passing
            grown = {"gradients": parts["gradients"] + gradient_bytes}
            best = Top(tally.most, phase, {**parts, **split, **grown})
        tally.most = tally.now

    for _ in range(walk.shape.layers - walk.adapted):
        step_pass.forward(None)
        look("forward", 0)
    for level in walk.levels:
        saved = tally.now - before_blocks
        step_pass.forward(level)
        look("forward", saved)
    saved = tally.now - before_blocks
    step_pass.compute_loss()
    look("loss", saved)
    for _ in range(walk.adapted):
        saved, known_gradients = tally.now - before_blocks, len(step_pass.gradients)
        step_pass.backward()
        look("backward", saved)
        gradient_bytes += sum(step_pass.gradients[known_gradients:])
    return best


def _hold_all(memory: TensorMemory, sizes: list[int]) -> None:
    for size in sizes:
        memory.alloc(size)


def _replay(walk: StepRecipe, *, expandable: bool, limit: int | None) -> int:
    """Replay loading, the first step, which allocates gradients and states, and one after it. The limit
    applies from the first step on, when an engine sets it.
    """
    recorded = walk.tuning.compiled or walk.tuning.recorded
    allocator = _after_loading(
        walk.sizes,
        layers=walk.shape.layers,
        tied=walk.shape.tied_embeddings,
        on_host=walk.tuning.host_embedding,
        adapted=walk.adapted,
        recorded=recorded,
        expandable=expandable,
    ).copy_without_handles()
    lasting = allocator.reserved
    allocator.limit = limit
    allocator.alloc(WORD)
    allocator.alloc(WORKSPACE)
    take_pass(allocator, walk, keep_gradients=not recorded)
    hold_states(allocator, walk.sizes, walk.adapted)
    take_pass(allocator, walk, keep_gradients=False)
    if recorded:
        hold_recording(allocator, walk)
        allocator.empty_cache()
        # A recording has a pool for itself.
        allocator.pool = "recorded"
        take_pass(allocator, walk, keep_gradients=False)
    gaps = 0.0 if walk.tuning.compiled or not recorded else RECORDING_GAPS
    return allocator.reserved_peak + int(gaps * (allocator.reserved_peak - lasting))


@lru_cache(maxsize=8)
def _after_loading(
    sizes: StepSizes,
    *,
    layers: int,
    tied: bool,
    on_host: bool,
    adapted: int,
    recorded: bool,
    expandable: bool,
) -> Allocator:
    """The state before the first step. A search for the fastest tuning replays many steps after the same
    load.
    """
    allocator = Allocator(expandable=expandable)
    learned = adapter_sizes(sizes, adapted)
    load(allocator, sizes, layers=layers, tied=tied, on_host=on_host)
    _hold_all(allocator, learned)
    hold_stacks(allocator, sizes, adapted)
    if recorded:
        _hold_all(allocator, learned)
    allocator.empty_cache()
    allocator.reset_peaks()
    return allocator.copy_without_handles()


RECORDING_GAPS = 0.1
"""Extra memory in the pool of a recorded pass, as a share of what the pass allocates operation by operation:
0.02 to 0.15 (nine families on an H200, `benchmarks/step_time.py --families`).
"""
