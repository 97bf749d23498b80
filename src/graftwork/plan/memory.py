"""Peak memory of training an adapter, by parts, in bytes. Pure.

The formulas are those of a decoder with RMSNorm and a gated MLP, trained in one dtype of `width`
bytes: what the backward pass needs of each layer, counted tensor by tensor.
"""

from graftwork.model.shape import linear_sizes
from graftwork.records.base import Record
from graftwork.records.plan import ModelShape, Workload

ADAM_STATES = 2
NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Codes, a byte for the scale of 64, and the scale of 256 of these."""

RUNTIME_GIB = 0.50
"""Interpreter, torch and transformers, resident, before the model is loaded (measured on CPU)."""


FRAGMENTATION = 1.35
"""What the C library's allocator takes beyond the activations asked of it (measured on CPU)."""


class MemoryParts(Record):
    """Bytes by what they are for."""

    runtime: float
    weights: float
    adapter: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.runtime + self.weights + self.adapter + self.optimizer + self.activations + self.logits


def training_memory(
    shape: ModelShape, work: Workload, *, parameters: int, trainable: int, width: int
) -> MemoryParts:
    """The peak, which is where the loss meets the longest batch."""
    longest = sorted(work.lengths)[-work.batch_rows :]
    padded = (max(longest) - work.shared_tokens) * len(longest) + work.shared_tokens
    replies = work.trained_tokens / max(len(work.lengths), 1) * len(longest)
    return MemoryParts(
        runtime=RUNTIME_GIB * 2**30,
        weights=weight_bytes(shape, work, parameters=parameters, width=width),
        # What is trained is kept in float32, with its gradient; full weights were counted already.
        adapter=(1 if work.method == "full" else 2) * trainable * 4,
        optimizer=ADAM_STATES * trainable * 4,
        activations=FRAGMENTATION * padded * work.adapted_layers * layer_bytes(shape, work, width=width),
        logits=3 * replies * shape.vocab_size * 4,
    )


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
