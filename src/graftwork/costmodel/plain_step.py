"""A step of transformers and PEFT on one GPU or several that share it: its seconds, and its memory. Pure.

Input: a decoder's shape and family, a PlainSetup, how the run is shared, what the GPU reaches. Output:
seconds by parts, kernel group by kernel group: a group takes the longest of its launches, its operations and
its traffic, and the host calls each kernel from Python. Peaks: allocated by what comes and goes in two steps,
tensor by tensor; reserved by replaying that through the allocator; `quick_peak` extrapolates from small
cases, for searches. What GPUs that share a run hold and wait for: DDP, DeepSpeed's ZeRO-2 and ZeRO-3 with its
default buckets, FSDP2 of torch, sharded by block, and offloading. Does not know the CUDA context, other
processes, or attention that needs a mask.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from graftwork.costmodel.allocations import AllocationStream, MemoryTrace, keep_states, take_step
from graftwork.costmodel.allocator import Allocator
from graftwork.costmodel.plain_decoder import Machinery, PlainDecoder, Storage, Tape
from graftwork.costmodel.rates import OPENED_NF4_BYTES, PLAIN_DEQUANTIZING, StepRates
from graftwork.model.families import ModelFamily, family_or_llama, recipe_family
from graftwork.model.shape import adapter_parameters, layer_parameters, linear_sizes, total_parameters
from graftwork.records.base import ELEMENT_BYTES
from graftwork.records.hardware import Machine
from graftwork.records.plan import MemoryPeak, ModelShape, Offload, PlainSetup, Precision, Sharding, StepTime

FIXED, WAITING = "beginning and end", "waiting for launches"


class Cost(NamedTuple):
    """Cost of a module: kernels of forward and backward passes, and bytes of traffic per 16-bit value."""

    forward: float
    backward: float
    read: float = 0.0
    back: float = 0.0


RMS_NORM = Cost(8, 14, 34, 70)
"""Cast to float32, square, mean, scale, cast back, multiply by the weight; none of it is fused in
transformers.
"""
LAYER_NORM = Cost(1, 2, 6, 14)
ROTARY = Cost(10, 12, 20, 34)
GATE, ACTIVATION = Cost(2, 3, 10, 18), Cost(1, 1, 4, 6)
FUSED_NORM, FUSED_ROTARY, FUSED_GATE = Cost(1, 1, 6, 10), Cost(1, 1, 8, 8), Cost(1, 1, 6, 14)
RESIDUAL = Cost(1, 1, 6, 6)
ATTENTION = Cost(1, 4)
STEPWISE_ATTENTION = Cost(16, 22, 30, 42)
"""Attention written out, if scores are capped: bytes per score."""
ADAPTER = Cost(8, 11)
"""Cost of one linear layer: casts of both factors and the input, two thin products, a scale, a sum; backward
four thin products. Kernels were counted on the modules of transformers 5 and PEFT 0.21 under autocast.
"""
ADAPTER_INPUT = (14, 22)
"""Bytes of traffic per value of the layer's input, forward and backward."""
ADAPTER_OUTPUT = (12, 8)
NO_AUTOCAST_ADAPTER = Cost(4, 7)
LOSS_BYTES = {"plain": 38, "fused": 6}
"""Traffic per logit: the plain loss casts them to float32 and writes their gradient twice."""
OUTSIDE_KERNELS = 50
"""Embedding, positions, mask, last norm, loss."""
CAST_BYTES = 6
"""Four read, two written."""
HOST_OVER_LAUNCH = 4.0
"""Host time of a kernel of transformers + PEFT relative to a bare launch: modules, hooks, autograd, and as
many views as kernels (H200 hosts, 2026-11: 5.3 to 9.8 ms per block of a Llama, from run to run; chosen so
that all of them are within the stated range).
"""
HOST_PER_TENSOR = 1.2e-5
"""Host time per trained tensor: clipping, update and zeroing."""
TENSORS_PER_TARGET = 2
OVERLAP = 6.0
"""How sharply the slower of host and GPU dominates: parts of a step are bound by one, parts by the other."""
PLAIN_OPTIMIZER_BYTES = {
    "adamw_fused": 7.0,
    "adamw_foreach": 17.0,
    "adamw_loop": 17.0,
    "adamw_8bit": 4.5,
    "sgd": 3.0,
}
"""Tensors read and written per step, each with the parameter's width."""
LOOP_KERNELS = {"adamw_loop": 12.0}
"""Kernels per trained tensor, if the update loops over them."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def plain_step(
    shape: ModelShape, setup: PlainSetup, *, rates: StepRates, architecture: str = "llama"
) -> StepTime:
    """One forward and backward pass of `rows` rows, and the optimizer's step."""
    family = family_or_llama(architecture)
    tokens, layers, adapted = setup.rows * setup.tokens, shape.layers, setup.adapted_layers
    cast = setup.autocast and setup.dtype == "float32"
    width = 1.5 if cast else WIDTHS[setup.dtype] / 2
    forward, backward = _products(shape, setup, rates)
    spread = _elementwise(shape, setup, family, rates, width=width)
    attention = _attention(shape, setup, family, rates)
    table, head = shape.vocab_size * shape.hidden_size, 3 if setup.method == "full" else 2
    parts = {
        "products": forward * layers + backward * adapted,
        "computed again": setup.checkpointed * (forward + spread.forward + attention.forward),
        "attention": attention.forward * layers + attention.backward * adapted,
        "elementwise": spread.forward * layers + spread.backward * adapted,
        "head": head * rates.product_seconds(tokens, shape.hidden_size, shape.vocab_size, _rate(setup, rates))
        + LOSS_BYTES[setup.loss] * shape.vocab_size * tokens / rates.bandwidth,
    }
    if cast:
        weights = layer_parameters(shape) * layers + table
        parts["bringing weights to 16 bits"] = CAST_BYTES * weights / rates.bandwidth
    if setup.method == "qlora":
        passes = layers + adapted + setup.checkpointed
        opened = OPENED_NF4_BYTES * layer_parameters(shape) * passes
        share = rates.dequantising if setup.fused_nf4 else PLAIN_DEQUANTIZING
        parts["opening NF4"] = opened / (rates.bandwidth * share)
    parts = {name: rates.plain_factor * seconds for name, seconds in parts.items()}
    busy = sum(parts.values())
    host = launches(shape, setup, architecture=architecture) * rates.launch_seconds * HOST_OVER_LAUNCH
    parts[WAITING] = longer(host * rates.host_factor, busy) - busy
    parts[FIXED] = rates.fixed_seconds
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_per_step={"optimizer": _optimizer(shape, setup, rates)},
    )


def longer(host: float, busy: float) -> float:
    """Return the time of a pass whose host and GPU work in parallel."""
    most = max(host, busy)
    return (
        float(most * ((host / most) ** OVERLAP + (busy / most) ** OVERLAP) ** (1 / OVERLAP)) if most else 0.0
    )


def launches(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> float:
    """Return the kernels of one micro-batch that are launched one by one."""
    forward, backward = _kernels(shape, setup, family_or_llama(architecture))
    return forward * (shape.layers + setup.checkpointed) + backward * setup.adapted_layers + OUTSIDE_KERNELS


def _kernels(shape: ModelShape, setup: PlainSetup, family: ModelFamily) -> tuple[float, float]:
    """Return the number of kernels of a block: forward, and backward."""
    linears = len(linear_sizes(shape))
    modules = [cost for cost, _ in _modules(shape, setup, family)] + [_attention_cost(setup, family)]
    forward, backward = sum(m.forward for m in modules), sum(m.backward for m in modules)
    if setup.method == "full":
        # Each frozen weight would need no gradient of its own; each learned one does.
        return forward + linears, backward + 2 * linears
    adapter = ADAPTER if setup.autocast else NO_AUTOCAST_ADAPTER
    adapted = _targets(shape, setup)
    return (
        forward + linears + adapter.forward * len(adapted),
        backward + linears + adapter.backward * len(adapted),
    )


def _modules(shape: ModelShape, setup: PlainSetup, family: ModelFamily) -> list[tuple[Cost, int]]:
    """Return the modules of a block besides its linear layers and attention, each with its width."""
    h, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rms, rotary, gate = (FUSED_NORM, FUSED_ROTARY, FUSED_GATE) if setup.liger else (RMS_NORM, ROTARY, GATE)
    norm = LAYER_NORM if family.norm_bias else rms
    modules = [(norm, h)] * family.norms + [(RESIDUAL, h)] * 2
    modules += [(rms, q), (rms, kv)] if family.head_norms != "none" else []
    modules += [] if family.positions else [(rotary, q + kv)]
    names = {path.rsplit(".", 1)[-1] for path in linear_sizes(shape)}
    gated = bool(names & {"gate_proj", "gate_up_proj"})
    return [*modules, (gate if gated else ACTIVATION, shape.intermediate_size)]


def _targets(shape: ModelShape, setup: PlainSetup) -> list[tuple[int, int]]:
    if setup.method == "full":
        return []
    sizes = linear_sizes(shape)
    return [size for path, size in sizes.items() if path.rsplit(".", 1)[-1] in setup.targets]


def _rate(setup: PlainSetup, rates: StepRates) -> float:
    """Under autocast float32 weights are cast once and multiplied in 16 bits."""
    if setup.autocast and setup.dtype == "float32":
        return rates.products("bfloat16" if rates.has_bf16 else "float16")
    return rates.products(setup.dtype)


def _products(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> tuple[float, float]:
    """Seconds of a block's products with weights: forward, and backward."""
    tokens, rate = setup.rows * setup.tokens, _rate(setup, rates)
    sizes = list(linear_sizes(shape).values())
    if shape.experts:
        # Those of the experts that a token goes through, as one wide MLP.
        inner = shape.experts_used * shape.expert_inner
        sizes += [(shape.hidden_size, 2 * inner), (inner, shape.hidden_size)]
    forward = sum(rates.product_seconds(tokens, inputs, outputs, rate) for inputs, outputs in sizes)
    backward = sum(rates.product_seconds(tokens, outputs, inputs, rate) for inputs, outputs in sizes)
    return forward, backward * (2 if setup.method == "full" else 1)


class BothPasses(NamedTuple):
    forward: float
    backward: float


def _elementwise(
    shape: ModelShape, setup: PlainSetup, family: ModelFamily, rates: StepRates, *, width: float
) -> BothPasses:
    """Seconds of all operations of one block other than products with weights and attention."""
    used = _modules(shape, setup, family)
    tokens = setup.rows * setup.tokens
    read = sum(cost.read * size for cost, size in used)
    back = sum(cost.back * size for cost, size in used)
    for inputs, outputs in _targets(shape, setup):
        read += ADAPTER_INPUT[0] * inputs + ADAPTER_OUTPUT[0] * outputs
        back += ADAPTER_INPUT[1] * inputs + ADAPTER_OUTPUT[1] * outputs
    kernels = _kernels(shape, setup, family)
    return BothPasses(
        max(read * width * tokens / rates.bandwidth, kernels[0] * rates.kernel_seconds),
        max(back * width * tokens / rates.bandwidth, kernels[1] * rates.kernel_seconds),
    )


def _attention_cost(setup: PlainSetup, family: ModelFamily) -> Cost:
    return STEPWISE_ATTENTION if setup.attention == "math" or family.capped_attention else ATTENTION


def _attention(shape: ModelShape, setup: PlainSetup, family: ModelFamily, rates: StepRates) -> BothPasses:
    """Return the attention of one block; unfused, it also computes the scores above the diagonal."""
    tokens = setup.rows * setup.tokens
    once = 2.0 * setup.tokens * shape.heads * shape.head_dim * tokens
    if _attention_cost(setup, family) is ATTENTION:
        seconds = once / rates.attention_at(setup.tokens, shape.head_dim)
        return BothPasses(seconds, 2.5 * seconds)
    scores = setup.rows * shape.heads * setup.tokens**2
    products = 2 * once / rates.products(setup.dtype)
    return BothPasses(
        products + STEPWISE_ATTENTION.read * scores / rates.bandwidth,
        2 * products + STEPWISE_ATTENTION.back * scores / rates.bandwidth,
    )


def _optimizer(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> float:
    """The GPU's update, or the host's calls if these take longer."""
    trainable = trained_parameters(shape, setup)
    width = WIDTHS[setup.dtype if setup.method == "full" else setup.adapter_dtype]
    moved = trainable * width * PLAIN_OPTIMIZER_BYTES[setup.optimizer] / rates.bandwidth
    tensors = setup.adapted_layers * (
        len(_targets(shape, setup)) * TENSORS_PER_TARGET or len(linear_sizes(shape))
    )
    called = tensors * LOOP_KERNELS.get(setup.optimizer, 0.0) * rates.launch_seconds
    return max(moved, tensors * HOST_PER_TENSOR * rates.host_factor + called)


def trained_parameters(shape: ModelShape, setup: PlainSetup) -> int:
    if setup.method == "full" and setup.adapted_layers == shape.layers:
        return total_parameters(shape)
    return adapter_parameters(
        shape, rank=setup.rank, targets=setup.targets, layers=setup.adapted_layers, method=setup.method
    )


def expected_longest(lengths: Sequence[int], rows: int) -> float:
    """Tokens that each row of a batch is padded to, on average: the longest of `rows` random rows."""
    ordered, count = sorted(lengths), len(lengths)
    total, below = 0.0, 0.0
    for rank, length in enumerate(ordered, start=1):
        upto = (rank / count) ** rows
        total += length * (upto - below)
        below = upto
    return total


ADAM_TRAFFIC = 28.0
"""Bytes that Adam moves in host memory for a parameter."""
HOST_BANDWIDTH_SHARE = 0.6
GUESSED_HOST_GB_S = 60.0
"""Two channels of DDR5, for machines with an unnamed CPU."""
PCIE_SHARE = 0.8
"""Share of the link's rate that pinned memory reaches."""
LINK_SHARE = 0.6
"""Share of the link's rate that two GPUs reach through the host: 19 to 20 of 32 GB/s on A40s (published)."""
NOT_HIDDEN = 0.35
"""Share of the traffic sent during computation that the GPU still waits for (derived from published scaling).
"""
STATES_BYTES = {"adamw_8bit": 2 * (1 + 4 / 256), "sgd": 0.0}
"""Bytes of optimizer state per trained parameter; optimizers not listed keep two numbers in float32."""
ADAM_BYTES = 8.0
MASTER_BYTES = 4.0
"""Bytes of the float32 copy of each 16-bit weight."""
BUCKET_ELEMENTS = 5e8
"""DeepSpeed's `reduce_bucket_size`; at most the number of elements to reduce."""
PREFETCH_ELEMENTS = 5e7
GATHERED_BLOCKS = 2
"""The block being computed and the one being prefetched."""
NORMED = 2
"""Saved values, in units of the hidden size, that the trained norms of a block keep."""
HELD = ("weights", "adapters", "gradients", "optimizer")


class Distribution(NamedTuple):
    """How a run is sharded."""

    sharding: Sharding
    offload: Offload
    gpus: int


def is_cut_up(setup: PlainSetup, shared: Distribution) -> bool:
    """Return whether trained weights, with their gradients and states, are sharded over the GPUs."""
    return setup.method == "full" and shared.sharding not in ("none", "ddp")


def passing_setup(setup: PlainSetup) -> PlainSetup:
    """Return a setup whose peak is the transient memory of a GPU that trains all weights. The smallest
    adapters save the same inputs of the same products; their gradients and states, which would hide the
    passes, are too small to matter. What a trained norm saves in addition is added in `share`.
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
    """Return the peak of each GPU. `passing` is the peak of a single one, without the optimizer's own
    moment."""
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
        norm_layers = setup.adapted_layers if not setup.checkpointed else 1
        norms = NORMED * shape.hidden_size * ELEMENT_BYTES[passing_setup(setup).dtype]
        parts["activations"] = parts.get("activations", 0.0) + norms * norm_layers * setup.rows * setup.tokens
    parts["workspace"] = parts.get("workspace", 0.0) + _buffers(
        shape, setup, shared, trainable=trainable, weight_bytes=frozen or learned
    )
    allocated = sum(parts.values())
    # What the allocator takes beyond what is asked for comes of what passes, not of what stays.
    unallocated = max(passing.reserved - passing.allocated, 0.0)
    return MemoryPeak(allocated=allocated, reserved=allocated + unallocated, parts=parts, phase=passing.phase)


def _lasting(
    setup: PlainSetup, shared: Distribution, *, trainable: int, frozen: float, learned: float
) -> dict[str, float]:
    """Lasting bytes of weights and trained state, on one GPU."""
    n, full = shared.gpus, setup.method == "full"
    weights = n if shared.sharding in ("zero3", "fsdp2") else 1
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES)
    if shared.sharding in ("zero2", "zero3"):
        # ZeRO steps from a flat copy of its own, even where the weights are already in float32.
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
    shape: ModelShape, setup: PlainSetup, shared: Distribution, *, trainable: int, weight_bytes: float
) -> float:
    """Buffers for gathered weights and for gradients to send."""
    learned = ELEMENT_BYTES[setup.dtype] if setup.method == "full" else ELEMENT_BYTES[setup.adapter_dtype]
    bucket = min(BUCKET_ELEMENTS, trainable) * learned
    if shared.sharding == "zero2":
        return 2 * bucket
    a_weight = weight_bytes / max(total_parameters(shape), 1)
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
    """Seconds of transfers between GPU and host: of one pass, and of the end of a step."""

    a_pass: float
    a_step: float
    adam: float


def transfers(
    machine: Machine, shared: Distribution, setup: PlainSetup, *, trainable: int, base_bytes: float
) -> HostTransfers:
    """Return what offloading adds to a pass and to a step."""
    if shared.offload == "none" or machine.gpu is None:
        return HostTransfers(0.0, 0.0, 0.0)
    pcie = machine.gpu.pcie_gb_s * PCIE_SHARE * 1e9
    full = setup.method == "full"
    width = ELEMENT_BYTES[setup.dtype] if full else ELEMENT_BYTES[setup.adapter_dtype]
    gradients = trainable * width / shared.gpus / pcie
    fetched = 0.0
    if shared.offload == "weights":
        # Forward and backward each fetch a GPU's own part; the rest comes from the other GPUs.
        moved_bytes = trainable * width if full else base_bytes
        fetched = 2 * moved_bytes / shared.gpus / pcie
    back = trainable * width / shared.gpus / pcie if shared.offload == "optimizer" else 0.0
    return HostTransfers(a_pass=fetched + gradients, a_step=back, adam=adam_seconds(machine, trainable))


def adam_seconds(machine: Machine, trainable: int) -> float:
    """All processes step at once and share the memory bandwidth."""
    rate = machine.cpu.bandwidth_gb_s if machine.cpu is not None else GUESSED_HOST_GB_S
    return trainable * ADAM_TRAFFIC / (rate * HOST_BANDWIDTH_SHARE * 1e9)


class PlainRun(NamedTuple):
    """What the cost of a plain step depends on besides its setup."""

    shape: ModelShape
    architecture: str
    trainable: int
    half: Precision
    """Precision of products under autocast."""
    rates: StepRates
    machine: Machine
    predicted: float = 1.0
    """Share of the tokens whose logits are computed."""
    correction: float = 1.0
    """Ratio of a traced peak to the computed one of the same step."""

    def base_bytes(self, setup: PlainSetup) -> float:
        """Bytes of the base as stored."""
        return float(total_parameters(self.shape) * ELEMENT_BYTES[setup.dtype])


def plain_step_parts(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, passes: int
) -> dict[str, float]:
    """Return the seconds of an optimizer step: the passes, communication between GPUs and with the host, the
    update.
    """
    # With autocast, products are computed in 16 bits whatever the weights are stored in.
    worked = setup.model_copy(update={"dtype": run.half}) if setup.autocast else setup
    once = plain_step(run.shape, setup, rates=run.rates, architecture=run.architecture).once_per_step
    a_pass = plain_step(run.shape, worked, rates=run.rates, architecture=run.architecture).parts
    computing = sum(a_pass.values()) * passes
    base = run.base_bytes(worked)
    sent = _sending_seconds(run, worked, shared, base=base, passes=passes)
    moved = transfers(run.machine, shared, setup, trainable=run.trainable, base_bytes=base)
    waiting = exposed(computing, sent + moved.a_pass * passes)
    update = sum(once.values()) / (shared.gpus if shared.sharding not in ("none", "ddp") else 1)
    parts = {name: seconds * passes for name, seconds in a_pass.items()}
    link_share = sent / (sent + moved.a_pass * passes) if sent else 0.0
    parts["link between GPUs"] = waiting * link_share
    parts["host transfers"] = waiting * (1 - link_share) + moved.a_step
    parts["optimizer"] = moved.adam if shared.offload != "none" else update
    return {name: seconds for name, seconds in parts.items() if seconds}


def exposed(computing: float, moving: float) -> float:
    """Return the time that the GPU waits for transfers: those that do not overlap with computation, or take
    longer.
    """
    return max(moving - computing, 0.0) + NOT_HIDDEN * min(moving, computing)


def _sending_seconds(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, base: float, passes: int
) -> float:
    """Gradients once per step (DDP), or in every pass if weights are sharded."""
    if shared.gpus < 2:
        return 0.0
    gb_s = link_rate(run.machine)
    width = ELEMENT_BYTES[setup.dtype] if setup.method == "full" else ELEMENT_BYTES[setup.adapter_dtype]
    whole = link_seconds(run.trainable * width, gpus=shared.gpus, gb_s=gb_s)
    if shared.sharding == "ddp":
        return whole
    if shared.sharding == "zero2":
        # Half of an all-reduce in every pass, and the updated weights once.
        return whole / 2 * passes + whole / 2
    sharded = run.trainable * width if setup.method == "full" else base
    gathered = link_seconds(sharded, gpus=shared.gpus, gb_s=gb_s) / 2
    return (2 * gathered + whole / 2) * passes


def link_seconds(bytes: float, *, gpus: int, gb_s: float) -> float:
    """A ring all-reduce: every GPU sends and receives 2 (n - 1) / n of the bytes, one way at `gb_s`."""
    if gpus < 2:
        return 0.0
    return 2 * (gpus - 1) / gpus * bytes / (gb_s * 1e9)


def link_rate(machine: Machine) -> float:
    """GB/s between two GPUs: as stated, by NVLink where they are bridged, else through the host."""
    if machine.link_gb_s is not None:
        return machine.link_gb_s
    return machine.gpu.pcie_gb_s * LINK_SHARE if machine.gpu is not None else 10.0


STEPS = 2


def plain_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> MemoryPeak:
    """Return the peak of a GPU, by purpose."""
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
    """Return the memory trace of two steps."""
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
    """Return the peak of a stream, with the allocator's reserved memory."""
    allocator = Allocator(expandable=expandable)
    blocks = {}
    for event in trace.events:
        if event >= 0:
            blocks[event] = allocator.alloc(trace.sizes[event])
        else:
            allocator.free(blocks.pop(~event))
    # A block that is not worth cutting is given whole, and counted so.
    allocated = float(allocator.allocated_peak)
    workspace = trace.peak.parts.get("workspace", 0.0) + max(0.0, allocated - trace.peak.allocated)
    parts = {**trace.peak.parts, "workspace": workspace}
    return trace.peak.model_copy(
        update={"allocated": allocated, "reserved": float(allocator.reserved_peak), "parts": parts}
    )


FEW, MORE = 1, 2
"""Numbers of layers that are computed tensor by tensor."""
FIRST_ANCHOR, ANCHOR_STEP = 256, 4
"""Token counts that are computed exactly: 256, 1,024, 4,096 …"""
MOST_BEYOND = 0.2
"""Largest share that the allocator was seen to add to the allocated bytes of a large model."""
FOREACH_TEMPORARIES = 1.0
"""Temporaries of the foreach kernels, as a share of the optimizer's states."""


def quick_peak(shape: ModelShape, setup: PlainSetup, *, architecture: str, trainable: int) -> MemoryPeak:
    """Extrapolate linearly from small cases."""
    # Where all weights are learned, the optimizer's own moment hides the passes: it is added apart.
    is_separate = setup.method == "full" and setup.optimizer != "sgd"
    measured_setup = setup.model_copy(update={"optimizer": "sgd"}) if is_separate else setup
    tokens = measured_setup.rows * measured_setup.tokens
    low = FIRST_ANCHOR
    while low * ANCHOR_STEP < tokens:
        low *= ANCHOR_STEP
    high = low * ANCHOR_STEP
    below, above = (_all_layers(shape, measured_setup, anchor, architecture) for anchor in (low, high))
    peak = _line(below, above, share=(tokens - low) / (high - low))
    return _with_optimizer(peak, setup, trainable=trainable) if is_separate else peak


def _all_layers(shape: ModelShape, setup: PlainSetup, tokens: int, architecture: str) -> MemoryPeak:
    """Extrapolate all adapted layers from a few of them, and the frozen ones below, which keep only their
    weights.
    """
    few, two = (_anchor(shape, setup, tokens, layers, architecture) for layers in (FEW, MORE))
    share = (setup.adapted_layers - FEW) / (MORE - FEW)
    peak = _line(few, two, share=share)
    reserved = peak.reserved
    if setup.checkpointed:
        # What the allocator adds then grows with what passes, not with what stays.
        unallocated_share = (two.reserved - two.allocated) / max(_passing(two), 1.0)
        grown = min(unallocated_share * _passing(peak), MOST_BEYOND * peak.allocated)
        reserved = max(reserved, peak.allocated + grown)
    below = shape.layers - setup.adapted_layers
    a_layer = (two.parts.get("weights", 0.0) - few.parts.get("weights", 0.0)) / (MORE - FEW)
    frozen = below * a_layer
    return MemoryPeak(
        allocated=peak.allocated + frozen,
        reserved=reserved + frozen,
        parts={**peak.parts, "weights": peak.parts.get("weights", 0.0) + frozen},
        phase=peak.phase,
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
    """Extrapolate linearly through two peaks, never below zero."""

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
    """The states on top of the passes, or the optimizer's own moment if that is higher."""
    states = trainable * STATES_BYTES.get(setup.optimizer, ADAM_BYTES * ELEMENT_BYTES[setup.dtype] / 4)
    passing = peak.allocated + states
    gradients = float(trainable * ELEMENT_BYTES[setup.dtype])
    weights = peak.parts.get("weights", 0.0)
    moment = states * FOREACH_TEMPORARIES if setup.optimizer == "adamw_foreach" else 0.0
    stepping = weights + gradients + states + moment
    unallocated = peak.reserved - peak.allocated
    if stepping <= passing:
        parts = {**peak.parts, "optimizer": states}
        return MemoryPeak(allocated=passing, reserved=passing + unallocated, parts=parts, phase=peak.phase)
    parts = {"weights": weights, "gradients": gradients, "optimizer": states, "workspace": moment}
    # Of what the passes took, the allocator gives nothing back.
    reserved = max(stepping, passing) + unallocated
    return MemoryPeak(allocated=stepping, reserved=reserved, parts=parts, phase="optimizer")


def peak_of_each(
    run: PlainRun, setup: PlainSetup, shared: Distribution, *, exact: bool = False
) -> MemoryPeak:
    """Return the peak of each GPU that shares the run. `exact`: tensor by tensor, else extrapolated."""
    own_setup = passing_setup(setup) if is_cut_up(setup, shared) else setup
    if exact:
        single_peak = plain_peak(run.shape, own_setup, architecture=run.architecture)
    else:
        single_peak = quick_peak(run.shape, own_setup, architecture=run.architecture, trainable=run.trainable)
    if run.correction != 1.0:
        single_peak = single_peak.times(run.correction)
    if run.predicted != 1.0:
        single_peak = single_peak.plus(
            {"logits": -single_peak.parts.get("logits", 0.0) * (1 - run.predicted)}
        )
    return share(single_peak, run.shape, setup, shared, trainable=run.trainable)
