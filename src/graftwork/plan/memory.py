"""Peak memory of training an adapter, by parts, in bytes. Pure.

The formulas are those of a decoder with RMSNorm and a gated MLP, trained in one dtype of `width`
bytes: what the backward pass needs of each layer, counted tensor by tensor.
"""

from graftwork.records.base import Record
from graftwork.records.plan import ModelShape, Workload

ADAM_STATES = 2
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
        weights=parameters * width,
        adapter=2 * trainable * width,
        optimizer=ADAM_STATES * trainable * width,
        activations=FRAGMENTATION * padded * work.adapted_layers * layer_bytes(shape, work, width=width),
        logits=3 * replies * shape.vocab_size * 4,
    )


def layer_bytes(shape: ModelShape, work: Workload, *, width: int) -> float:
    """What one token leaves in one adapted layer for the backward pass."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = 4 * h  # input and normed hidden state, twice a layer
    attention = 3 * q + 4 * kv + 2 * h  # q, k, v before and after rotation, output, residual
    mlp = 4 * i + h  # gate, its activation, up, their product
    adapters = len(work.targets) * work.rank
    return width * (norms + attention + mlp + adapters) + 4 * shape.heads
