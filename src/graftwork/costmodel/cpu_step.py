"""A training step on a CPU: memory, FLOPs and seconds, of graft's own step and of the plain one. Pure.

Input: a shape, the work, the machine's memory and matrix rate. Output: bytes by parts, seconds by parts, how
many rows at a time fit, and where the step written for CPUs caches the output of frozen blocks.
"""

import math
from typing import Literal, NamedTuple

from graftwork.model.shape import (
    active_layer_parameters,
    adapter_parameters,
    layer_parameters,
    linear_sizes,
    total_parameters,
    trained_by,
)
from graftwork.records.base import GIB, NF4_BYTES
from graftwork.records.plan import CpuStepPlan, ModelShape, PlainStep, Workload

WIDTH = 4
"""Bytes per number: it computes in float32 only."""
MEMORY_SHARE = 1 / 8
"""Share of the machine's memory for packed weights, and again for hidden states."""
DISK_SHARE = 1 / 4
"""Share of the free disk for hidden states that do not fit into memory."""
OPERATIONS_PER_SECOND = 6e10
"""Floating-point rate of one thread; only used to detect a disk that is slower than recomputing."""
MEMORY_BYTES_PER_SECOND = 2e9
FILE_BYTES_PER_SECOND = 2e8
"""Write rate of a slow disk, a conservative estimate. A fast disk is only better than expected."""


class TrunkTokens(NamedTuple):
    """Tokens after the common prefix: of all rows once, and over all visits of a run."""

    distinct: int
    visited: int


def packed_bytes(shape: ModelShape, *, adapted: int, method: str) -> int:
    """Bytes of one copy of each frozen weight, two if gradients flow back through it: the adapted blocks and
    the head. 4-bit weights are dequantized for each product instead.
    """
    block = sum(inputs * outputs for inputs, outputs in linear_sizes(shape).values())
    block = 0 if method == "qlora" else block
    head = shape.vocab_size * shape.hidden_size
    return ((shape.layers - adapted) * block + 2 * (adapted * block + head)) * WIDTH


def states_bytes(shape: ModelShape, distinct_tokens: int) -> int:
    """The frozen blocks' output of all rows."""
    return distinct_tokens * shape.hidden_size * WIDTH


def choose_kept(
    shape: ModelShape,
    tokens: TrunkTokens,
    *,
    adapted: int,
    memory_bytes: float,
    disk_bytes: float,
    threads: int,
) -> Literal["memory", "file", "nowhere"]:
    """Choose the nearest storage that is large enough and faster than recomputing."""
    block = sum(inputs * outputs for inputs, outputs in linear_sizes(shape).values())
    recompute_seconds = 2.0 * block * (shape.layers - adapted) / (threads * OPERATIONS_PER_SECOND)
    a_token, size = states_bytes(shape, 1), states_bytes(shape, tokens.distinct)
    if adapted >= shape.layers or tokens.visited <= tokens.distinct:
        return "nowhere"
    if size <= memory_bytes * MEMORY_SHARE:
        return "memory" if a_token / MEMORY_BYTES_PER_SECOND < recompute_seconds else "nowhere"
    if size <= disk_bytes * DISK_SHARE and 2 * a_token / FILE_BYTES_PER_SECOND < recompute_seconds:
        return "file"
    return "nowhere"


ADAM_STATES = 2

RUNTIME_GIB = 0.50
"""Resident memory of the interpreter, torch and transformers before the model is loaded (measured on CPU)."""
CPU_RUNTIME_GIB = 0.60
"""The same after the first batch: buffers of the products and of the C library (measured)."""
FRAGMENTATION = 1.35
"""Memory that the C library's allocator takes, relative to the activations requested (measured on CPU)."""
HEAP_GIB, MOST_HEAP_SHARE = 0.18, 0.5
"""Freed memory that the heap retains, for the step that is written for CPUs: about constant, whatever the
activations (measured with SmolLM2: 0.12 to 0.23 GiB at 0.6 to 1.3 GiB of activations), and at most a share of
them.
"""
UNEVEN_REPLIES = 2.0
"""How much more than its share of a step's replies some rows of it may have (guessed)."""
HOST_SPREAD = 1.2
"""Factor on the computed peak of the host."""
MOST_SCATTERED = 2.0
"""Upper bound of `scattered`. Not measured beyond 36 batches an epoch; earlier runs correct it."""


def training_memory(
    shape: ModelShape,
    work: Workload,
    *,
    parameters: int,
    trainable: int,
    width: int,
    checkpointed: bool = False,
) -> dict[str, float]:
    """Return the bytes at the peak, which is where the loss of the longest batch is computed, by purpose.
    `checkpointed`: blocks of the plain step keep only their input, and are recomputed one at a time.
    """
    longest = sorted(work.lengths)[-work.batch_size :]
    mean_replies = work.trained_tokens / max(len(work.lengths), 1) * len(longest)
    replies = max(work.most_replies, mean_replies)
    step_bytes = _step_bytes(shape, work, longest, replies=replies, width=width, checkpointed=checkpointed)
    return {
        "runtime": (RUNTIME_GIB if work.cpu_step is None else CPU_RUNTIME_GIB) * GIB,
        "weights": float(weight_bytes(shape, work, parameters=parameters, width=width)),
        # The CPU's own copies of frozen weights.
        "packed": float(step_bytes.get("packed", 0)),
        # What is trained is kept in float32, with its gradient; full weights were counted already.
        "adapter": (1.0 if work.method == "full" else 2.0) * trainable * 4,
        "optimizer": float(ADAM_STATES * trainable * 4),
        # Output of the frozen blocks that waits for the next epoch.
        "states": float(step_bytes.get("states", 0)),
        "activations": step_bytes["activations"],
        "logits": float(3 * replies * shape.vocab_size * 4),
    }


def _step_bytes(
    shape: ModelShape,
    work: Workload,
    longest: list[int],
    *,
    replies: float,
    width: int,
    checkpointed: bool,
) -> dict[str, float]:
    """Return the bytes that depend on the kind of step."""
    cpu_step = work.cpu_step
    if cpu_step is None:
        padded = (max(longest) - work.shared_tokens) * len(longest) + work.shared_tokens
        saved = padded * work.adapted_layers * layer_bytes(shape, work, width=width)
        if checkpointed:
            # Nothing is shared by the rows then.
            inputs = work.adapted_layers * shape.hidden_size * width
            saved = max(longest) * len(longest) * (inputs + layer_bytes(shape, work, width=width))
        return {"activations": FRAGMENTATION * saved}
    saved = cpu_activations(shape, work, longest, replies=replies)
    waiting = states_bytes(shape, cpu_step.distinct_tokens) if cpu_step.kept == "memory" else 0
    steps = math.ceil(len(work.lengths) / work.batch_size)
    return {
        "packed": packed_bytes(shape, adapted=work.adapted_layers, method=work.method)
        if cpu_step.packed
        else 0,
        "states": waiting,
        "activations": saved * scattered(steps)
        if waiting
        else saved + min(HEAP_GIB * GIB, MOST_HEAP_SHARE * saved),
    }


def scattered(steps: int) -> float:
    """Return the factor by which the heap exceeds the activations, if cached states are allocated between
    them. Measured: 1.49 after six batches had left their states, 1.85 after 36, in two runs.
    """
    return min(1.07 + 0.216 * math.log(1 + steps), MOST_SCATTERED)


def cpu_activations(shape: ModelShape, work: Workload, longest: list[int], *, replies: float) -> float:
    """Activations that the CPU step saves for the backward pass, tensor by tensor, in float32. Rows are
    packed without padding, after their shared prefix; the last token of a row is not read; the last block is
    only computed where a reply is predicted.
    """
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows, shared = len(longest), work.shared_tokens
    tokens = max(sum(longest) - shared * (rows - 1) - rows, rows)
    grafts = len(work.targets) * work.rank
    entered = 2 * h + 2 * kv  # hidden state and normed, keys and values
    finished = 2 * h + 3 * q + 4 * i + shape.heads + grafts  # queries, mixed twice, residual and normed, MLP
    # Every row lays the beginning's keys and values before its own.
    copied = rows * shared * 2 * kv
    blocks = (work.adapted_layers - 1) * (tokens * (entered + finished) + copied)
    last = tokens * entered + copied + min(replies, tokens) * (finished + 2 * h)
    return 4.0 * (blocks + last)


def weight_bytes(shape: ModelShape, work: Workload, *, parameters: int, width: int) -> float:
    """Bytes of the base in memory: `width` bytes per weight, 4 bits except for embeddings, or float32 if it
    is trained.
    """
    if work.method == "full":
        return parameters * 4
    if work.method != "qlora":
        return parameters * width
    small = shape.layers * sum(a * b for a, b in linear_sizes(shape).values() if a % 64 == 0)
    return (parameters - small) * width + small * NF4_BYTES


def layer_bytes(shape: ModelShape, work: Workload, *, width: int) -> float:
    """Bytes that one token saves in one adapted layer for the backward pass."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 4 * h  # input and normed hidden state, twice a layer
    attention = 3 * q + 4 * kv + 2 * h  # q, k, v before and after rotation, output, residual
    mlp = 4 * i + h  # gate, its activation, up, their product
    adapters = len(work.targets) * work.rank
    return width * (norms + attention + mlp + adapters) + 4 * shape.heads


EFFICIENCY = 0.55
"""Share of the measured matrix rate that the plain step reaches (measured)."""
OWN_EFFICIENCY, OWN_SHARED_EFFICIENCY = 0.95, 0.72
"""The same for the step that is written for CPUs: on one core (measured: 1.0 for passes in a loop, 5 % less
in runs), and on two that share it (measured in one run).
"""
PASS_TOKENS = 95
"""Overhead of a pass in tokens: weights are read from memory and small operations are called (measured:
passes of 392 to 872 tokens).
"""


PEAK_SHARE = 0.6
"""Share of the theoretical peak (clock × width) that large products reach over all cores (derived)."""
SERIAL_SHARE, OWN_SERIAL_SHARE = 0.1, 0.02
"""What each core beyond the measured ones adds to a step: many operations are small, and all cores wait at
the end of each. Fitted to one published run of transformers (Qwen3-8B with LoRA on the 48 cores of an EPYC
9454P: 35.8 minutes for a step of 20k tokens); the value for graft's own step is a guess.
"""
MEASURED_CORES = 2


def training_flops(shape: ModelShape, work: Workload) -> float:
    """Operations of the whole run."""
    return sum(flops_by_part(shape, work).values())


def flops_by_part(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Operations of the whole run: products with weights, attention, the head."""
    return _plain_flops(shape, work) if work.cpu_step is None else _own_flops(shape, work, work.cpu_step)


def _plain_flops(shape: ModelShape, work: Workload) -> dict[str, float]:
    """Forward through all layers, backward through the adapted ones; frozen weights need no gradient. The
    head only where a reply token is predicted.
    """
    tokens, layer = _read_tokens(work), active_layer_parameters(shape)
    backward = 4.0 if work.method == "full" else 2.0
    return {
        "products": tokens * layer * (2.0 * shape.layers + backward * work.adapted_layers),
        "attention": _scores(shape, work) * tokens * (shape.layers + 2 * work.adapted_layers),
        "head": (backward + 2.0) * shape.vocab_size * shape.hidden_size * work.trained_tokens * work.epochs,
    }


def _own_flops(shape: ModelShape, work: Workload, cpu_step: CpuStepPlan) -> dict[str, float]:
    """Operations of the step written for CPUs: frozen blocks once per row instead of once per epoch if their
    output is cached; the last block beyond keys and values only where a reply is predicted; adapters on top.
    """
    tokens, layer, scores = _read_tokens(work), layer_parameters(shape), _scores(shape, work)
    replies = work.trained_tokens * work.epochs
    frozen = shape.layers - work.adapted_layers
    read = cpu_step.distinct_tokens + work.shared_tokens if cpu_step.kept != "nowhere" else tokens
    adapters = adapter_parameters(shape, rank=work.rank, targets=work.targets, layers=1, ranks=work.ranks)
    # Forward and back through frozen weights; an adapter has its own gradient too.
    block = 4.0 * layer + 6.0 * adapters
    keys_and_values = 8.0 * shape.hidden_size * shape.kv_heads * shape.head_dim
    whole = tokens * (work.adapted_layers - 1) + replies
    return {
        "products": read * frozen * 2.0 * layer + whole * block + tokens * keys_and_values,
        "attention": read * frozen * scores + whole * 3.0 * scores,
        "head": 4.0 * shape.vocab_size * shape.hidden_size * replies,
    }


def validation_share(shape: ModelShape, work: Workload) -> float:
    """Time to read a token without training, as a share of a trained token's time: one forward pass through
    all blocks.
    """
    if work.cpu_step is None:
        return 0.5
    replies = work.trained_tokens / sum(work.lengths)
    read = shape.layers * (2.0 * active_layer_parameters(shape) + _scores(shape, work))
    read += 2.0 * shape.vocab_size * shape.hidden_size * replies
    return read * sum(work.lengths) * work.epochs / training_flops(shape, work)


def lost_states_share(shape: ModelShape, work: Workload) -> float:
    """Share of the time of all steps that a restarted process spends on recomputing the output of the frozen
    blocks, if it was kept in memory.
    """
    cpu_step = work.cpu_step
    if cpu_step is None or not cpu_step.restarted or cpu_step.kept == "nowhere":
        return 0.0
    frozen = shape.layers - work.adapted_layers
    recomputed = (cpu_step.distinct_tokens + work.shared_tokens) * frozen * 2.0 * layer_parameters(shape)
    return recomputed / (training_flops(shape, work) + _pass_flops(shape, work, cpu_step))


def _read_tokens(work: Workload) -> float:
    """Tokens of a run, counting the common prefix once per batch."""
    rows = len(work.lengths)
    batches = math.ceil(rows / work.batch_size)
    return float((sum(work.lengths) - work.shared_tokens * (rows - batches)) * work.epochs)


def _scores(shape: ModelShape, work: Workload) -> float:
    """Operations of one token's attention in one block."""
    mean_length = sum(work.lengths) / len(work.lengths)
    return 4.0 * mean_length * shape.heads * shape.head_dim


def seconds_per_token(
    shape: ModelShape, work: Workload, *, gflops: float, cores: float = MEASURED_CORES
) -> dict[str, float]:
    """Return the seconds of a trained token on a CPU with this matrix rate, by purpose."""
    flops = flops_by_part(shape, work)
    if work.cpu_step is not None:
        flops["passes"] = _pass_flops(shape, work, work.cpu_step)
    rate = gflops * 1e9 * reached_share(work, cores) * sum(work.lengths) * work.epochs
    return {name: operations / rate for name, operations in flops.items()}


def reached_share(work: Workload, cores: float) -> float:
    """Share of the measured matrix rate that a step reaches. `cores` is the number it gets: if other
    processes use one of two, threads hardly wait for each other.
    """
    if work.cpu_step is None:
        return EFFICIENCY / (1 + SERIAL_SHARE * max(cores - MEASURED_CORES, 0))
    shared = min(max(cores - 1, 0.0), 1.0)
    reached = OWN_EFFICIENCY + shared * (OWN_SHARED_EFFICIENCY - OWN_EFFICIENCY)
    return reached / (1 + OWN_SERIAL_SHARE * max(cores - MEASURED_CORES, 0))


def _pass_flops(shape: ModelShape, work: Workload, cpu_step: CpuStepPlan) -> float:
    """Return the fixed cost of all passes of a run, as operations."""
    frozen = shape.layers - work.adapted_layers if cpu_step.kept == "nowhere" else 0
    a_token = layer_parameters(shape) * (4.0 * work.adapted_layers + 2.0 * frozen)
    return PASS_TOKENS * a_token * math.ceil(len(work.lengths) / work.batch_size) * work.epochs


def choose_host_micro_batches(
    shape: ModelShape, work: Workload, *, limit_gib: float, width: int, checkpointed: bool = False
) -> PlainStep | None:
    """Return the largest number of rows per micro-batch that fits into memory; None if all rows of a step
    fit.
    """
    rows, trainable = work.batch_size, trained_by(shape, work)
    while True:
        parts = training_memory(
            shape,
            with_rows(work, rows),
            parameters=total_parameters(shape),
            trainable=trainable,
            width=width,
            checkpointed=checkpointed,
        )
        if rows == 1 or sum(parts.values()) * HOST_SPREAD <= limit_gib * GIB:
            break
        rows //= 2
    if rows == work.batch_size and not checkpointed:
        return None
    return PlainStep(micro_rows=rows, checkpointed=checkpointed, peak_gib=sum(parts.values()) / GIB)


def with_rows(work: Workload, rows: int) -> Workload:
    """Return the work with `rows` rows per pass, for estimates of memory."""
    share = min(1.0, UNEVEN_REPLIES * rows / work.batch_size)
    return work.model_copy(update={"batch_size": rows, "most_replies": round(work.most_replies * share)})
