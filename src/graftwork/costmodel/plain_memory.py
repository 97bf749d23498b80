"""The memory of a step of transformers and PEFT, from sizes alone. Pure.

In: a decoder's shape, a PlainSetup, the family. Out: a MemoryPeak: allocated by what comes and goes in
two steps, tensor by tensor; reserved by replaying that through the allocator. `quick_peak` extrapolates
from small cases, for searches. Does not know the CUDA context, other processes, or attention that needs a
mask.
"""

from functools import lru_cache

from graftwork.costmodel.allocator import AllocationStream, Allocator, MemoryTrace, keep_states, take_step
from graftwork.costmodel.distributed import (
    ADAM_BYTES,
    HELD,
    STATES_BYTES,
    Distribution,
    PlainRun,
    is_cut_up,
    passing_setup,
    share,
)
from graftwork.costmodel.plain_decoder import Machinery, PlainDecoder, Storage, Tape
from graftwork.model.families import recipe_family
from graftwork.records.base import ELEMENT_BYTES
from graftwork.records.plan import MemoryPeak, ModelShape, PlainSetup

STEPS = 2


def plain_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> MemoryPeak:
    """The most that a GPU holds, and for what."""
    return _cached_peak(shape.model_dump_json(), setup.model_dump_json(), architecture)


@lru_cache(maxsize=4096)
def _cached_peak(shape: str, setup: str, architecture: str) -> MemoryPeak:
    trace = plain_trace(
        ModelShape.model_validate_json(shape),
        PlainSetup.model_validate_json(setup),
        architecture=architecture,
    )
    return replayed(trace)


def plain_trace(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> MemoryTrace:
    """Two steps, as the memory sees them."""
    stream = AllocationStream()
    tape = Tape(stream)
    shared = Machinery(tape, setup)
    decoder = PlainDecoder(shape, setup, recipe_family(architecture))
    stream.enter("setup")
    adapters = setup.method != "full"
    for weight in decoder.weights:
        part = "adapters" if weight.trained and adapters else "weights"
        weight.storage = Storage(stream, weight.count * weight.width, part)
    stream.take(shared.places * 8, "activations")
    trained = [weight for weight in decoder.weights if weight.trained]
    sizes = [(weight.count, weight.width) for weight in trained]
    for step in range(STEPS):
        stream.enter("forward")
        loss = decoder.plain_loss(shared) if setup.loss == "plain" else decoder.fused_loss(shared)
        shared.forget_casts()
        stream.enter("backward")
        root, loss.edge = loss.edge, None
        assert root is not None
        tape.backward(root, None)
        del root, loss
        stream.enter("optimizer")
        if step == 0:
            keep_states(stream, sizes, setup.optimizer)
        take_step(stream, sizes, setup.optimizer)
        for weight in trained:
            weight.gradient = None
    return stream.finish()


def replayed(trace: MemoryTrace, *, expandable: bool = False) -> MemoryPeak:
    """The peak of a stream, with what the allocator holds for it."""
    allocator = Allocator(expandable=expandable)
    blocks = {}
    for event in trace.events:
        if event >= 0:
            blocks[event] = allocator.alloc(trace.sizes[event])
        else:
            allocator.free(blocks.pop(~event))
    # A block that is not worth cutting is given whole, and counted so.
    given = float(allocator.allocated_peak)
    workspace = trace.peak.parts.get("workspace", 0.0) + max(0.0, given - trace.peak.allocated)
    parts = {**trace.peak.parts, "workspace": workspace}
    return trace.peak.model_copy(
        update={"allocated": given, "reserved": float(allocator.reserved_peak), "parts": parts}
    )


FEW, MORE = 1, 2
"""Layers that are computed tensor by tensor."""
FIRST_ANCHOR, ANCHOR_STEP = 256, 4
"""Tokens that are computed: 256, 1,024, 4,096 …"""
MOST_BEYOND = 0.2
"""Of what is allocated, the most that the allocator was seen to add to a large model."""
FOREACH_TEMPORARIES = 1.0
"""Of the optimizer's states, what the foreach kernels hold for a moment."""


def quick_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str, trainable: int) -> MemoryPeak:
    """By straight lines through small cases."""
    # Where all weights are learned, the optimizer's own moment hides the passes: it is added apart.
    apart = setup.method == "full" and setup.optimizer != "sgd"
    asked = setup.model_copy(update={"optimizer": "sgd"}) if apart else setup
    tokens = asked.rows * asked.tokens
    low = FIRST_ANCHOR
    while low * ANCHOR_STEP < tokens:
        low *= ANCHOR_STEP
    high = low * ANCHOR_STEP
    below, above = (_all_layers(shape, asked, at, architecture) for at in (low, high))
    found = _line(below, above, share=(tokens - low) / (high - low))
    return _with_optimizer(found, setup, trainable=trainable) if apart else found


def _all_layers(shape: ModelShape, setup: PlainSetup, tokens: int, architecture: str) -> MemoryPeak:
    """All adapted layers from a few of them, and the frozen ones below, which keep only their weights."""
    few, more = (_anchor(shape, setup, tokens, layers, architecture) for layers in (FEW, MORE))
    share = (setup.adapted_layers - FEW) / (MORE - FEW)
    found = _line(few, more, share=share)
    reserved = found.reserved
    if setup.checkpointed:
        # What the allocator adds then grows with what passes, not with what stays.
        beyond = (more.reserved - more.allocated) / max(_passing(more), 1.0)
        grown = min(beyond * _passing(found), MOST_BEYOND * found.allocated)
        reserved = max(reserved, found.allocated + grown)
    below = shape.layers - setup.adapted_layers
    a_layer = (more.parts.get("weights", 0.0) - few.parts.get("weights", 0.0)) / (MORE - FEW)
    frozen = below * a_layer
    return MemoryPeak(
        allocated=found.allocated + frozen,
        reserved=reserved + frozen,
        parts={**found.parts, "weights": found.parts.get("weights", 0.0) + frozen},
        phase=found.phase,
    )


def _passing(peak: MemoryPeak) -> float:
    return sum(size for name, size in peak.parts.items() if name not in HELD)


def _anchor(shape: ModelShape, setup: PlainSetup, tokens: int, layers: int, architecture: str) -> MemoryPeak:
    deep = setup.checkpointed >= setup.adapted_layers
    small = setup.model_copy(
        update={
            "rows": 1,
            "tokens": tokens,
            "adapted_layers": layers,
            "checkpointed": layers if deep else round(layers * setup.checkpointed / setup.adapted_layers),
        }
    )
    cut = shape.model_copy(update={"layers": layers, "parameters": None})
    return plain_peak(cut, small, architecture=architecture)


def _line(first: MemoryPeak, second: MemoryPeak, *, share: float) -> MemoryPeak:
    """On the straight line through two peaks, never below nothing."""

    def between(a: float, b: float) -> float:
        return max(a + share * max(b - a, 0.0), 0.0)

    names = dict.fromkeys([*first.parts, *second.parts])
    parts = {name: between(first.parts.get(name, 0.0), second.parts.get(name, 0.0)) for name in names}
    return MemoryPeak(
        allocated=between(first.allocated, second.allocated),
        reserved=between(first.reserved, second.reserved),
        parts=parts,
        phase=second.phase,
    )


def _with_optimizer(peak: MemoryPeak, setup: PlainSetup, *, trainable: int) -> MemoryPeak:
    """The states on top of the passes, or the optimizer's own moment where that is higher."""
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES * ELEMENT_BYTES[setup.dtype] / 4)
    passing = peak.allocated + states
    gradients = float(trainable * ELEMENT_BYTES[setup.dtype])
    weights = peak.parts.get("weights", 0.0)
    moment = states * FOREACH_TEMPORARIES if setup.optimizer == "adamw_foreach" else 0.0
    stepping = weights + gradients + states + moment
    beyond = peak.reserved - peak.allocated
    if stepping <= passing:
        parts = {**peak.parts, "optimizer": states}
        return MemoryPeak(allocated=passing, reserved=passing + beyond, parts=parts, phase=peak.phase)
    parts = {"weights": weights, "gradients": gradients, "optimizer": states, "workspace": moment}
    # Of what the passes took, the allocator gives nothing back.
    reserved = max(stepping, passing) + beyond
    return MemoryPeak(allocated=stepping, reserved=reserved, parts=parts, phase="optimizer")


def peak_of_each(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, exact: bool = False
) -> MemoryPeak:
    """The peak of each GPU that shares the run. `exact`: tensor by tensor, else by straight lines."""
    asked = passing_setup(setup) if is_cut_up(setup, shared) else setup
    if exact:
        alone = plain_peak(run.shape, asked, architecture=run.architecture)
    else:
        alone = quick_peak(run.shape, asked, architecture=run.architecture, trainable=run.trainable)
    if run.correction != 1.0:
        alone = alone.times(run.correction)
    if run.predicted != 1.0:
        alone = alone.plus({"logits": -alone.parts.get("logits", 0.0) * (1 - run.predicted)})
    return share(alone, run.shape, setup, shared, trainable=run.trainable)
