"""What several GPUs that share a run hold and wait for: DDP, ZeRO-2, ZeRO-3, FSDP2, offloading. Pure.

In: the peak of one GPU alone, how the run is shared, the machine. Out: the peak of each GPU, and
the seconds of an optimizer step with what is sent between GPUs and to the host. ZeRO is DeepSpeed's with its
default buckets; FSDP2 is torch's, sharded by block.
"""

from typing import NamedTuple

from graftwork.costmodel.plain_time import plain_step
from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import layer_parameters, total_parameters
from graftwork.records.base import ELEMENT_BYTES
from graftwork.records.hardware import Machine
from graftwork.records.plan import MemoryPeak, ModelShape, Offload, PlainSetup, Precision, Sharding

ADAM_TRAFFIC = 28.0
"""Bytes that Adam moves in host memory for a parameter."""
HOST_BANDWIDTH_SHARE = 0.6
GUESSED_HOST_GB_S = 60.0
"""Two channels of DDR5, for machines whose processor is not named."""
PCIE_SHARE = 0.8
"""Of a connector's rate, what pinned memory reaches."""
LINK_SHARE = 0.6
"""Of a connector's rate, what two GPUs reach through the host: 19 to 20 of 32 GB/s on A40s (published)."""
NOT_HIDDEN = 0.35
"""Of what is sent while the GPU computes, what it has to wait for (derived from published scaling)."""
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


def is_cut_up(setup: PlainSetup, shared: Distribution) -> bool:
    """Whether learned weights, with their gradients and states, are spread over the GPUs."""
    return setup.method == "full" and shared.sharding not in ("none", "ddp")


def passing_setup(setup: PlainSetup) -> PlainSetup:
    """A setup whose peak is what passes through a GPU that learns all weights, and nothing of what stays.

    The smallest adapters keep the same inputs of the same products; gradients and states, which would hide
    the passes, are then too small to matter. What a trained norm keeps besides is added in `share`.
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
    """The peak of each GPU. `passing` is the peak of one alone, without the optimizer's own moment."""
    if shared.sharding == "none":
        return passing
    if shared.sharding == "ddp":
        return passing.plus({"workspace": trainable * ELEMENT_BYTES[setup.adapter_dtype]})
    full = setup.method == "full"
    frozen = 0.0 if full else passing.parts.get("weights", 0.0)
    learned = trainable * ELEMENT_BYTES[setup.dtype if full else setup.adapter_dtype]
    parts = {name: size for name, size in passing.parts.items() if name not in HELD}
    parts |= _lasting(setup, shared, trainable=trainable, frozen=frozen, learned=learned)
    if full:
        kept = setup.adapted_layers if not setup.checkpointed else 1
        norms = NORMED * shape.hidden_size * ELEMENT_BYTES[passing_setup(setup).dtype]
        parts["activations"] = parts.get("activations", 0.0) + norms * kept * setup.rows * setup.tokens
    parts["workspace"] = parts.get("workspace", 0.0) + _buffers(
        shape, setup, shared, trainable=trainable, held=frozen or learned
    )
    allocated = sum(parts.values())
    # What the allocator takes beyond what is asked for comes of what passes, not of what stays.
    beyond = max(passing.reserved - passing.allocated, 0.0)
    return MemoryPeak(allocated=allocated, reserved=allocated + beyond, parts=parts, phase=passing.phase)


def _lasting(
    setup: PlainSetup, shared: Distribution, *, trainable: int, frozen: float, learned: float
) -> dict[str, float]:
    """What is there all the time, of weights and of what is learned: the bytes of one GPU."""
    n, full = shared.cards, setup.method == "full"
    weights = n if shared.sharding in ("zero3", "fsdp2") else 1
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES)
    if shared.sharding in ("zero2", "zero3"):
        # ZeRO steps from a flat copy of its own, also where the weights are in float32 already.
        states += trainable * MASTER_BYTES
    on_gpu = {
        "weights": (learned if full else frozen) / weights,
        "adapters": 0.0 if full else learned / weights,
        "gradients": learned / n,
        "optimizer": states / n,
    }
    if shared.offload in ("optimizer", "weights"):
        on_gpu["optimizer"] = on_gpu["gradients"] = 0.0
    if shared.offload == "weights":
        on_gpu["weights"] = on_gpu["adapters"] = 0.0
    return on_gpu


def _buffers(
    shape: ModelShape, setup: PlainSetup, shared: Distribution, *, trainable: int, held: float
) -> float:
    """What is gathered to be worked with, and what is collected to be sent."""
    learned = ELEMENT_BYTES[setup.dtype] if setup.method == "full" else ELEMENT_BYTES[setup.adapter_dtype]
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


class HostTransfers(NamedTuple):
    """Seconds between GPU and host: of one pass, and of a step's end."""

    a_pass: float
    a_step: float
    adam: float


def transfers(
    machine: Machine, shared: Distribution, setup: PlainSetup, *, trainable: int, base_bytes: float
) -> HostTransfers:
    """What offloading adds to a pass and to a step."""
    if shared.offload == "none" or machine.gpu is None:
        return HostTransfers(0.0, 0.0, 0.0)
    pcie = machine.gpu.pcie_gb_s * PCIE_SHARE * 1e9
    full = setup.method == "full"
    width = ELEMENT_BYTES[setup.dtype] if full else ELEMENT_BYTES[setup.adapter_dtype]
    gradients = trainable * width / shared.cards / pcie
    fetched = 0.0
    if shared.offload == "weights":
        # Forward and backward each fetch a GPU's own part; the rest comes from the other GPUs.
        held = trainable * width if full else base_bytes
        fetched = 2 * held / shared.cards / pcie
    back = trainable * width / shared.cards / pcie if shared.offload == "optimizer" else 0.0
    return HostTransfers(a_pass=fetched + gradients, a_step=back, adam=adam_seconds(machine, trainable))


def adam_seconds(machine: Machine, trainable: int) -> float:
    """All processes step at once, out of one memory."""
    rate = machine.cpu.bandwidth_gb_s if machine.cpu is not None else GUESSED_HOST_GB_S
    return trainable * ADAM_TRAFFIC / (rate * HOST_BANDWIDTH_SHARE * 1e9)


class PlainRun(NamedTuple):
    """What the cost of a plain step depends on besides how the step is set."""

    shape: ModelShape
    architecture: str
    trainable: int
    half: Precision
    """What products are computed in under autocast."""
    rates: StepRates
    machine: Machine
    predicted: float = 1.0
    """Share of the tokens whose logits are computed."""
    correction: float = 1.0
    """A traced peak over the computed one of the same step."""

    def base_bytes(self, setup: PlainSetup) -> float:
        """The base as it is read."""
        return float(total_parameters(self.shape) * ELEMENT_BYTES[setup.dtype])


def plain_step_parts(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, passes: int
) -> dict[str, float]:
    """Seconds of an optimizer step: the passes, what is sent between GPUs and to the host, the update."""
    # With autocast, products are computed in 16 bits whatever the weights are stored in.
    worked = setup.model_copy(update={"dtype": run.half}) if setup.autocast else setup
    once = plain_step(run.shape, setup, rates=run.rates, architecture=run.architecture).once_a_step
    a_pass = plain_step(run.shape, worked, rates=run.rates, architecture=run.architecture).parts
    computing = sum(a_pass.values()) * passes
    base = run.base_bytes(worked)
    sent = _sending_seconds(run, worked, shared, base=base, passes=passes)
    moved = transfers(run.machine, shared, setup, trainable=run.trainable, base_bytes=base)
    waiting = exposed(computing, sent + moved.a_pass * passes)
    update = sum(once.values()) / (shared.cards if shared.sharding not in ("none", "ddp") else 1)
    parts = {name: seconds * passes for name, seconds in a_pass.items()}
    link_share = sent / (sent + moved.a_pass * passes) if sent else 0.0
    parts["link between cards"] = waiting * link_share
    parts["host transfers"] = waiting * (1 - link_share) + moved.a_step
    parts["optimizer"] = moved.adam if shared.offload != "none" else update
    return {name: seconds for name, seconds in parts.items() if seconds}


def exposed(computing: float, moving: float) -> float:
    """What the GPU waits for: what does not go on while it computes, and all that takes longer."""
    return max(moving - computing, 0.0) + NOT_HIDDEN * min(moving, computing)


def _sending_seconds(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, base: float, passes: int
) -> float:
    """Gradients once a step (DDP), and where weights are sharded these in every pass."""
    if shared.cards < 2:
        return 0.0
    gb_s = link_rate(run.machine)
    width = ELEMENT_BYTES[setup.dtype] if setup.method == "full" else ELEMENT_BYTES[setup.adapter_dtype]
    whole = link_seconds(run.trainable * width, cards=shared.cards, gb_s=gb_s)
    if shared.sharding == "ddp":
        return whole
    if shared.sharding == "zero2":
        # Half of an all-reduce in every pass, and the updated weights once.
        return whole / 2 * passes + whole / 2
    sharded = run.trainable * width if setup.method == "full" else base
    gathered = link_seconds(sharded, cards=shared.cards, gb_s=gb_s) / 2
    return (2 * gathered + whole / 2) * passes


def link_seconds(bytes: float, *, cards: int, gb_s: float) -> float:
    """A ring all-reduce: every GPU sends and receives 2 (n - 1) / n of the bytes, one way at `gb_s`."""
    if cards < 2:
        return 0.0
    return 2 * (cards - 1) / cards * bytes / (gb_s * 1e9)


def link_rate(machine: Machine) -> float:
    """GB/s between two GPUs: as stated, by NVLink where they are bridged, else through the host."""
    if machine.link_gb_s is not None:
        return machine.link_gb_s
    return machine.gpu.pcie_gb_s * LINK_SHARE if machine.gpu is not None else 10.0
