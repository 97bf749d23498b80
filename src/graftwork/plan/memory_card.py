"""What our own training step takes of a card: every tensor counted, the allocator replayed. Pure.

In: a decoder's shape, a tuning, what is trained. Out: the peak of allocated and of reserved bytes, and
what is held at that moment. Counted from the code of the step (`model/step_walk.py` and what it calls)
and replayed through `plan/allocator.py`. Knows neither the CUDA context nor what others take.
"""

from collections.abc import Callable
from typing import NamedTuple

from graftwork.model.step_load import load
from graftwork.model.step_pieces import WORD
from graftwork.model.step_sizes import Memory, Tally
from graftwork.model.step_walk import (
    WORKSPACE,
    Pass,
    Walk,
    adapter_sizes,
    hold_recording,
    hold_states,
    take_pass,
    walk_of,
)
from graftwork.plan.allocator import Allocator, Block, OutOfMemory
from graftwork.records.fit import MemoryPeak
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB, MIB

SPARE = 64 * MIB
"""Of a limit, what is left to whatever the replay does in another order than the card."""


def card_peak(
    shape: ModelShape,
    tuning: Tuning,
    *,
    trainable: int,
    adapted: int,
    places: int | None = None,
    even: bool = True,
    expandable: bool = True,
) -> MemoryPeak:
    """The most that a run of such steps takes. `places` of a pass predict; `even`: rows of one length.

    Under a limit that has no room the allocator gives back what it only kept: where that is enough, the
    reserved bytes stay within the limit; where it is not, they are those that a larger card would show.
    """
    walk = walk_of(shape, tuning, trainable=trainable, adapted=adapted, places=places, even=even)
    top = count(walk)
    reserved = _reserved_within(walk, expandable=expandable)
    if reserved is None:
        limit = int(tuning.limit_gib * GIB)
        reserved = max(_replay(walk, expandable=expandable, limit=None), limit + 1)
    return MemoryPeak(allocated=top.bytes, reserved=reserved, parts=top.parts, phase=top.phase)


def reserved_within(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> int | None:
    """The reserved bytes that `card_peak` states where the limit has room for them; None where it has not."""
    walk = walk_of(shape, tuning, trainable=trainable, adapted=adapted)
    return _reserved_within(walk, expandable=True)


def _reserved_within(walk: Walk, *, expandable: bool) -> int | None:
    limit = int(walk.tuning.limit_gib * GIB)
    try:
        return min(_replay(walk, expandable=expandable, limit=limit - SPARE), limit)
    except OutOfMemory:
        return None


def load_peak(shape: ModelShape, tuning: Tuning) -> int:
    """The most that is allocated while weights come onto the card: a head goes through 32 bits into 8."""
    tally, walk = Tally(), walk_of(shape, tuning, trainable=0, adapted=0)
    _load(tally, walk)
    return tally.most


class Top(NamedTuple):
    """The moment at which the most is allocated."""

    bytes: int
    phase: str
    parts: dict[str, float]


def count(walk: Walk) -> Top:
    """The peak of a step that is not the first, and what it is made of."""
    tally, parts, before = Tally(), dict[str, float](), 0

    def note(name: str) -> None:
        nonlocal before
        parts[name] = parts.get(name, 0.0) + tally.now - before
        before = tally.now

    _load(tally, walk, note=note)
    for name in ("adapters", "gradients"):
        _hold_all(tally, adapter_sizes(walk.sizes, walk.adapted))
        note(name)
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


def _load(memory: Memory, walk: Walk, *, note: Callable[[str], None] = lambda _: None) -> None:
    tied, on_host = walk.shape.tied_embeddings, walk.tuning.host_embedding
    load(memory, walk.sizes, layers=walk.shape.layers, tied=tied, on_host=on_host, note=note)


def _count_pass(tally: Tally, walk: Walk, standing: dict[str, float]) -> Top:
    one, before = Pass(tally, walk), tally.now
    one.begin()
    parts = {**standing, "batch": float(tally.now - before)}
    begun, found = tally.now, 0
    best = Top(0, "forward", {})

    def look(phase: str, kept: int) -> None:
        nonlocal best
        if tally.most > best.bytes:
            passing = tally.most - begun - kept
            split = {"activations": kept - found, "logits": 0.0, "workspace": parts["workspace"]}
            if phase == "loss":
                split["logits"] = passing
            else:
                split["workspace"] += passing
            grown = {"gradients": parts["gradients"] + found}
            best = Top(tally.most, phase, {**parts, **split, **grown})
        tally.most = tally.now

    for _ in range(walk.shape.layers - walk.adapted):
        one.forward(None)
        look("forward", 0)
    for level in walk.levels:
        kept = tally.now - begun
        one.forward(level)
        look("forward", kept)
    kept = tally.now - begun
    one.lose()
    look("loss", kept)
    for _ in range(walk.adapted):
        kept, more = tally.now - begun, len(one.found)
        one.backward()
        look("backward", kept)
        found += sum(one.found[more:])
    return best


def _hold_all(memory: Memory, sizes: list[int]) -> None:
    for size in sizes:
        memory.alloc(size)


def _replay(walk: Walk, *, expandable: bool, limit: int | None) -> int:
    """Loading, the first step, whose gradients and states are new, and one after it.

    The limit holds from the first step on: that is when an engine sets it.
    """
    allocator = Allocator(expandable=expandable)
    learned = adapter_sizes(walk.sizes, walk.adapted)
    recorded = walk.tuning.compiled or walk.tuning.recorded
    _load(allocator, walk)
    _hold_all(allocator, learned)
    if recorded:
        _hold_all(allocator, learned)
    allocator.empty_cache()
    allocator.reset_peaks()
    allocator.limit = limit
    allocator.alloc(WORD)
    allocator.alloc(WORKSPACE)
    take_pass(allocator, walk, keep_gradients=not recorded)
    hold_states(allocator, walk.sizes, walk.adapted)
    take_pass(allocator, walk, keep_gradients=False)
    if recorded:
        hold_recording(allocator, walk)
        allocator.empty_cache()
        take_pass(Private(allocator), walk, keep_gradients=False)
    return allocator.reserved_peak


class Private:
    """A pool of the allocator's that a recording has for itself."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def alloc(self, size: int) -> Block:
        return self._allocator.alloc(size, pool="recorded")

    def free(self, block: Block) -> None:
        self._allocator.free(block)
