"""What one card and the host hold when several cards share a run: DDP, ZeRO-2, ZeRO-3, FSDP2. Pure.

In: the peak of one card alone, and how the run is shared. Out: the peak of each of several cards. ZeRO is
DeepSpeed's, with its default buckets; FSDP2 is torch's, cut up by block. Time is not known here.
"""

from typing import NamedTuple

from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.fit import MemoryPeak, Offload, PlainSetup, Precision, Sharding
from graftwork.records.plan import ModelShape

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
