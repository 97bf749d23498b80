"""The peak memory of a micro-batch of transformers and PEFT, computed from sizes alone. Pure, no torch.

In: a decoder's shape, a PlainSetup, the family. Out: a MemoryPeak: allocated by what comes and goes in two
steps, tensor by tensor; reserved by replaying that through the allocator. What it does not know: the CUDA
context, other processes, attention that needs a mask.
"""

from functools import lru_cache

from graftwork.model.trace.optimizer import keep_states, take_step
from graftwork.model.trace.stream import AllocationStream, MemoryTrace
from graftwork.plan.allocator import Allocator
from graftwork.plan.plain.decoder import FAMILIES, Family, PlainDecoder
from graftwork.plan.plain.modules import Machinery
from graftwork.plan.plain.tape import Storage, Tape
from graftwork.records.fit import MemoryPeak, PlainSetup
from graftwork.records.plan import ModelShape

STEPS = 2


def plain_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> MemoryPeak:
    """The most that a card holds, and for what."""
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
    decoder = PlainDecoder(shape, setup, FAMILIES.get(architecture, Family()))
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
    beside = trace.peak.parts.get("workspace", 0.0) + max(0.0, given - trace.peak.allocated)
    parts = {**trace.peak.parts, "workspace": beside}
    return trace.peak.model_copy(
        update={"allocated": given, "reserved": float(allocator.reserved_peak), "parts": parts}
    )
