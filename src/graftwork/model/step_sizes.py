"""The numbers that the tensors of a training step on a card are made of. Pure.

In: a decoder's shape, how a step is tuned, what is trained. Out: widths, groups of products that share
an input, their adapters. What a family has beside Llama's parts is told from the parameters that its
blocks have beyond them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from graftwork.model.shape import layer_parameters, linear_sizes
from graftwork.records.plan import ModelShape, Tuning

BLOCK = 512
"""Bytes that the allocator rounds up to."""

GROUPS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}


class TensorMemory(Protocol):
    """Whatever can be asked for memory: a tally, or an allocator that is replayed."""

    def alloc(self, size: int) -> Any: ...

    def free(self, block: Any) -> None: ...


class ByteTally:
    """Adds up what is there, and remembers the most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def alloc(self, size: int) -> int:
        size = max(-(-size // BLOCK), 1) * BLOCK
        self.now += size
        self.most = max(self.most, self.now)
        return size

    def free(self, block: int) -> None:
        self.now -= block


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read one input, and the rank of the adapter beside each."""

    inputs: int
    outs: tuple[int, ...]
    rank: int
    bias: bool = False

    @property
    def out(self) -> int:
        return sum(self.outs)

    @property
    def ranks(self) -> int:
        return self.rank * len(self.outs)

    @property
    def weights(self) -> int:
        return self.inputs * self.out

    @property
    def gradient_bytes(self) -> list[int]:
        """Of A and B of each layer, in float32."""
        return [4 * self.rank * width for out in self.outs for width in (self.inputs, out) if self.rank]


@dataclass(frozen=True)
class StepSizes:
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    qkv: LinearGroup
    out: LinearGroup
    gate_up: LinearGroup
    down: LinearGroup
    form: Literal["whole", "eight", "four"]
    head: Literal["whole", "eight"]
    turned: bool
    head_norms: Literal["none", "each", "all"]
    """Norms of queries and keys: none, of each head (Qwen3), of all heads of a token (OLMo2)."""
    norms_behind: bool
    """Norms stand behind attention and MLP instead of before them (OLMo2)."""
    even: bool
    """All rows of a pass have one length."""
    compiled: bool

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def groups(self) -> Iterator[LinearGroup]:
        return iter((self.qkv, self.out, self.gate_up, self.down))

    @property
    def adapter_parameters(self) -> int:
        """Of one block."""
        return sum(g.rank * (g.inputs * len(g.outs) + g.out) for g in self.groups)


def sizes_of(
    shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int, even: bool = True
) -> StepSizes:
    """Adapters are taken to be of one rank, on all linear layers of the adapted blocks."""
    linears = linear_sizes(shape)
    widths = sum(a + b for a, b in linears.values())
    rank = max(round(trainable / max(adapted * widths, 1)), 1) if trainable else 0
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    beside = layer_parameters(shape) - sum(a * b for a, b in linears.values()) - 2 * shape.hidden_size
    bias = beside == q + 2 * kv
    groups = {
        name: LinearGroup(
            inputs=linears[paths[0]][0],
            outs=tuple(linears[path][1] for path in paths),
            rank=rank,
            bias=bias and name == "qkv",
        )
        for name, paths in GROUPS.items()
    }
    return StepSizes(
        hidden=shape.hidden_size,
        inner=shape.intermediate_size,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocab_size,
        form=tuning.form,
        head=tuning.head,
        turned=tuning.turned,
        head_norms="each" if beside == 2 * shape.head_dim else "all" if beside == q + kv else "none",
        norms_behind=beside == q + kv,
        even=even,
        compiled=tuning.compiled,
        **groups,
    )
