"""The peak memory of a micro-batch of transformers and PEFT, computed from sizes alone. Pure, no torch.

In: a decoder's shape, a PlainSetup, the family. Out: a MemoryPeak: allocated by what comes and goes in two
steps, tensor by tensor; reserved by replaying that through the allocator. What it does not know: the CUDA
context, other processes, attention that needs a mask.
"""

from functools import lru_cache
from typing import NamedTuple

from graftwork.costmodel.allocator import Allocator
from graftwork.costmodel.plain_decoder import FAMILIES, Family, Machinery, PlainDecoder
from graftwork.costmodel.plain_tape import Storage, Tape
from graftwork.costmodel.stream import AllocationStream, MemoryTrace, keep_states, take_step
from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.fit import MemoryPeak, Offload, PlainSetup, Precision, Sharding
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


WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES_BYTES = {"adamw_8bit": 2 * (1 + 4 / 256), "sgd": 0.0}
"""Of the optimizer, a learned parameter; the others keep two numbers in float32."""
ADAM_BYTES = 8.0
MASTER_BYTES = 4.0
"""The float32 copy that 16-bit weights are stepped from."""
BUCKET_ELEMENTS = 5e8
"""DeepSpeed's `reduce_bucket_size`; no more than there is to reduce."""
PREFETCH_ELEMENTS = 5e7
GATHERED_BLOCKS = 2
"""The one that works and the one that is fetched meanwhile."""
NORMED = 2
"""Values of a hidden state's width that the learned norms of a block keep."""
HELD = ("weights", "adapters", "gradients", "optimizer")


class Distribution(NamedTuple):
    """How a run is spread."""

    sharding: Sharding
    offload: Offload
    cards: int


class LastingBytes(NamedTuple):
    """Bytes of a whole run that are there all the time, before they are cut up."""

    frozen: float
    learned: float
    master: float
    gradients: float
    optimizer: float


def whole_states(
    shape: ModelShape, setup: PlainSetup, shared: Distribution, *, trainable: int, frozen: float
) -> LastingBytes:
    """What all cards together hold of weights and of what is learned."""
    zero = shared.sharding in ("zero2", "zero3")
    learned = WIDTH[setup.dtype] if setup.method == "full" else WIDTH[setup.adapter_dtype]
    return LastingBytes(
        frozen=frozen,
        learned=trainable * learned,
        # ZeRO steps from a flat copy of its own, also where the weights are in float32 already.
        master=trainable * MASTER_BYTES if zero else 0.0,
        gradients=trainable * learned,
        optimizer=trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES),
    )


def is_cut_up(setup: PlainSetup, shared: Distribution) -> bool:
    """Whether learned weights, with their gradients and states, are spread over the cards."""
    return setup.method == "full" and shared.sharding not in ("none", "ddp")


def passing_setup(setup: PlainSetup) -> PlainSetup:
    """A setup whose peak is what passes through a card that learns all weights, and nothing of what stays.

    The smallest adapters keep the same inputs of the same products; gradients and states, which would hide
    the passes, are then too small to matter. What a learned norm keeps beside them is added in `share`.
    """
    computed: Precision = "bfloat16" if setup.autocast and setup.dtype == "float32" else setup.dtype
    return setup.model_copy(
        update={
            "method": "lora",
            "rank": 1,
            "dtype": computed,
            "adapter_dtype": computed,
            "autocast": False,
            "optimizer": "sgd",
        }
    )


def share(
    passing: MemoryPeak, shape: ModelShape, setup: PlainSetup, shared: Distribution, *, trainable: int
) -> MemoryPeak:
    """The peak of each card. `passing` is the peak of one alone, without the optimizer's own moment."""
    if shared.sharding == "none":
        return passing
    if shared.sharding == "ddp":
        return _with(passing, workspace=trainable * WIDTH[setup.adapter_dtype])
    full = setup.method == "full"
    frozen = 0.0 if full else passing.parts.get("weights", 0.0)
    states = whole_states(shape, setup, shared, trainable=trainable, frozen=frozen)
    parts = {name: size for name, size in passing.parts.items() if name not in HELD}
    parts |= _cut(states, shared, full=full)
    if full:
        kept = setup.adapted_layers if not setup.checkpointed else 1
        norms = NORMED * shape.hidden_size * WIDTH[passing_setup(setup).dtype]
        parts["activations"] = parts.get("activations", 0.0) + norms * kept * setup.rows * setup.tokens
    parts["workspace"] = parts.get("workspace", 0.0) + _buffers(
        shape, setup, shared, trainable=trainable, held=frozen or states.learned
    )
    allocated = sum(parts.values())
    # What the allocator takes beyond what is asked for comes of what passes, not of what stays.
    beyond = max(passing.reserved - passing.allocated, 0.0)
    return MemoryPeak(allocated=allocated, reserved=allocated + beyond, parts=parts, phase=passing.phase)


def _cut(states: LastingBytes, shared: Distribution, *, full: bool) -> dict[str, float]:
    """Of the lasting bytes, those of one card."""
    n = shared.cards
    cut_up = shared.sharding in ("zero3", "fsdp2")
    on_card = {
        "weights": states.frozen / (n if cut_up else 1),
        "adapters": 0.0 if full else states.learned / (n if cut_up else 1),
        "gradients": states.gradients / n,
        "optimizer": (states.optimizer + states.master) / n,
    }
    if full:
        on_card["weights"] = states.learned / (n if cut_up else 1)
    if shared.offload in ("optimizer", "weights"):
        on_card["optimizer"] = on_card["gradients"] = 0.0
    if shared.offload == "weights":
        on_card["weights"] = on_card["adapters"] = 0.0
    return on_card


def _buffers(
    shape: ModelShape, setup: PlainSetup, shared: Distribution, *, trainable: int, held: float
) -> float:
    """What is gathered to be worked with, and what is collected to be sent."""
    learned = WIDTH[setup.dtype] if setup.method == "full" else WIDTH[setup.adapter_dtype]
    bucket = min(BUCKET_ELEMENTS, trainable) * learned
    if shared.sharding == "zero2":
        return 2 * bucket
    a_weight = held / max(total_parameters(shape), 1)
    computed = min(a_weight, 2.0) if setup.autocast else a_weight
    block, table = layer_parameters(shape), shape.vocab_size * shape.hidden_size
    tables = table * (1 if shape.tied_embeddings else 2)
    gathered = GATHERED_BLOCKS * block * computed
    if shared.sharding == "fsdp2":
        # Embedding and head belong to the root, which stays whole from forward to backward.
        learned_block = block if setup.method == "full" else trainable / max(setup.adapted_layers, 1)
        return gathered + tables * computed + learned_block * learned
    prefetched = min(PREFETCH_ELEMENTS, total_parameters(shape)) * computed
    return gathered + table * computed + prefetched + bucket


def _with(peak: MemoryPeak, *, workspace: float) -> MemoryPeak:
    parts = {**peak.parts, "workspace": peak.parts.get("workspace", 0.0) + workspace}
    return peak.model_copy(
        update={
            "parts": parts,
            "allocated": peak.allocated + workspace,
            "reserved": peak.reserved + workspace,
        }
    )


FEW, MORE = 1, 2
"""Layers that are reckoned to the tensor."""
FIRST_ANCHOR, ANCHOR_STEP = 256, 4
"""Tokens that are reckoned: 256, 1,024, 4,096 …"""
MOST_BEYOND = 0.2
"""Of what is allocated, the most that the allocator was seen to add to a large model."""
FOREACH_TEMPORARIES = 1.0
"""Of the optimizer's states, what the foreach kernels hold for a moment."""


def exact_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str) -> MemoryPeak:
    """Tensor by tensor: a third of a second for a large model."""
    return plain_peak(shape, setup, architecture=architecture)


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
    return _reckoned(cut.model_dump_json(), small.model_dump_json(), architecture)


@lru_cache(maxsize=4096)
def _reckoned(shape: str, setup: str, architecture: str) -> MemoryPeak:
    return plain_peak(
        ModelShape.model_validate_json(shape),
        PlainSetup.model_validate_json(setup),
        architecture=architecture,
    )


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
    """The states beside the passes, or the optimizer's own moment where that is higher."""
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES * WIDTH[setup.dtype] / 4)
    passing = peak.allocated + states
    gradients = float(trainable * WIDTH[setup.dtype])
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
