"""Peak memory of training an adapter, by parts, in bytes. Pure.

The formulas are those of a decoder with RMSNorm and a gated MLP, trained in one dtype of `width`
bytes: what the backward pass needs of each layer, counted tensor by tensor.
"""

import math

from graftwork.model.processor_step import packed_bytes, states_bytes
from graftwork.model.shape import linear_sizes
from graftwork.records.base import Record
from graftwork.records.plan import ModelShape, Workload
from graftwork.records.units import GIB

ADAM_STATES = 2
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Codes, a byte for the scale of 64, and the scale of 256 of these."""

RUNTIME_GIB = 0.50
"""Interpreter, torch and transformers, resident, before the model is loaded (measured on CPU)."""
PROCESSOR_RUNTIME_GIB = 0.60
"""The same once a batch went through: buffers of the products and of the C library (measured)."""
FRAGMENTATION = 1.35
"""What the C library's allocator takes beyond the activations asked of it (measured on CPU)."""
MOST_SCATTERED = 2.0
"""Not measured beyond 36 batches an epoch: there, earlier runs must say it."""


class MemoryParts(Record):
    """Bytes by what they are for."""

    runtime: float
    weights: float
    packed: float = 0.0
    """The processor's own copies of frozen weights."""
    adapter: float
    optimizer: float
    states: float = 0.0
    """Output of the frozen blocks that waits for the next epoch."""
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return float(sum(self.model_dump().values()))


def training_memory(
    shape: ModelShape,
    work: Workload,
    *,
    parameters: int,
    trainable: int,
    width: int,
    checkpointed: bool = False,
) -> MemoryParts:
    """The peak, which is where the loss meets the longest batch. `checkpointed`: blocks of the plain step
    keep only their input, and one at a time has the rest."""
    longest = sorted(work.lengths)[-work.batch_rows :]
    mean_replies = work.trained_tokens / max(len(work.lengths), 1) * len(longest)
    replies = max(work.most_replies, mean_replies)
    return MemoryParts(
        runtime=(RUNTIME_GIB if work.processor is None else PROCESSOR_RUNTIME_GIB) * GIB,
        weights=weight_bytes(shape, work, parameters=parameters, width=width),
        # What is trained is kept in float32, with its gradient; full weights were counted already.
        adapter=(1 if work.method == "full" else 2) * trainable * 4,
        optimizer=ADAM_STATES * trainable * 4,
        logits=3 * replies * shape.vocab_size * 4,
        **_step_bytes(shape, work, longest, replies=replies, width=width, checkpointed=checkpointed),
    )


def _step_bytes(
    shape: ModelShape,
    work: Workload,
    longest: list[int],
    *,
    replies: float,
    width: int,
    checkpointed: bool,
) -> dict[str, float]:
    """What depends on which step is taken."""
    own = work.processor
    if own is None:
        padded = (max(longest) - work.shared_tokens) * len(longest) + work.shared_tokens
        kept = padded * work.adapted_layers * layer_bytes(shape, work, width=width)
        if checkpointed:
            # Nothing is shared by the rows then.
            inputs = work.adapted_layers * shape.hidden_size * width
            kept = max(longest) * len(longest) * (inputs + layer_bytes(shape, work, width=width))
        return {"activations": FRAGMENTATION * kept}
    kept = processor_activations(shape, work, longest, replies=replies)
    waiting = states_bytes(shape, own.distinct_tokens) if own.kept == "memory" else 0
    steps = math.ceil(len(work.lengths) / work.batch_rows)
    return {
        "packed": packed_bytes(shape, adapted=work.adapted_layers) if own.packed else 0,
        "states": waiting,
        "activations": kept * (scattered(steps) if waiting else FRAGMENTATION),
    }


def scattered(steps: int) -> float:
    """What activations take of the heap, over what is asked for, where states come to lie between them.

    Measured: 1.49 when six batches had left their states, 1.85 when 36 had, in two runs.
    """
    return min(1.07 + 0.216 * math.log(1 + steps), MOST_SCATTERED)


def processor_activations(shape: ModelShape, work: Workload, longest: list[int], *, replies: float) -> float:
    """What the processor's step keeps of a batch for its way back, tensor by tensor, in float32.

    Rows lie side by side without padding, behind their common beginning; the last token of a row is not
    read; the last block is followed only where a reply is predicted.
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
    """The base as it is held: in `width` bytes, in 4 bits but for embeddings, or in float32 to be learned."""
    if work.method == "full":
        return parameters * 4
    if work.method != "qlora":
        return parameters * width
    small = shape.layers * sum(a * b for a, b in linear_sizes(shape).values() if a % 64 == 0)
    return (parameters - small) * width + small * NF4_BYTES


def layer_bytes(shape: ModelShape, work: Workload, *, width: int) -> float:
    """What one token leaves in one adapted layer for the backward pass."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 4 * h  # input and normed hidden state, twice a layer
    attention = 3 * q + 4 * kv + 2 * h  # q, k, v before and after rotation, output, residual
    mlp = 4 * i + h  # gate, its activation, up, their product
    adapters = len(work.targets) * work.rank
    return width * (norms + attention + mlp + adapters) + 4 * shape.heads
