"""The tensors of graft's own step on a GPU: sizes, and what each operation allocates and frees. Pure.

Input: a decoder's shape, a tuning, what is trained. Output: widths and groups of products that share an
input; and pieces (norms, frozen products, adapters, attention) that mirror `train/gpu` if nothing is
compiled. Recipes write an operation down: `wide+4` allocates four bytes an element under a name, `wide-`
frees them, `out` stays. What a family has besides Llama's parts is inferred from the parameters of its
blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

from graftwork.costmodel.allocator import BLOCK
from graftwork.model.families import BlockLayout, find_family
from graftwork.model.shape import layer_parameters, layout_of_shape, linear_sizes
from graftwork.records.plan import ModelShape, Tuning


class TensorMemory(Protocol):
    """Allocates memory: either a tally, or the replayed allocator."""

    def alloc(self, size: int) -> Any: ...

    def free(self, block: Any) -> None: ...


class ByteTally:
    """Adds up allocations, and remembers the peak and the largest piece."""

    def __init__(self) -> None:
        self.now = self.most = self.largest = 0

    def alloc(self, size: int) -> int:
        size = max(-(-size // BLOCK), 1) * BLOCK
        self.now += size
        self.most = max(self.most, self.now)
        self.largest = max(self.largest, size)
        return size

    def free(self, block: int) -> None:
        self.now -= block


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers that read one input, and the rank of the adapter of each."""

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
        """Bytes of the gradients of A and B of each layer, in float32."""
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
    norms_before: bool
    """Norms of the inputs of attention and MLP."""
    norms_after: bool
    """Norms of the outputs of attention and MLP (OLMo2 instead of those before; Gemma 2 and 3 have both)."""
    norms: int
    """Number of norms of the hidden state in a block."""
    norm_bias: bool
    layout: BlockLayout
    even: bool
    """All rows of a pass have the same length."""
    compiled: bool
    capped: bool = False
    """Attention caps its scores, in graft's own kernels."""

    @property
    def changes_output(self) -> bool:
        """Whether the output of attention and MLP is normed or scaled before it is added."""
        return self.norms_after or self.layout.scaled_residual

    @property
    def has_gate_kernel(self) -> bool:
        return self.layout.gated and self.layout.activation == "silu"

    @property
    def q(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def groups(self) -> Iterator[LinearGroup]:
        return iter((self.qkv, self.out, self.gate_up, self.down))


class NormPlaces(NamedTuple):
    """Where a block has norms: before attention and MLP, after them, on queries and keys; and whether
    queries, keys and values have a bias.
    """

    before: bool
    after: bool
    heads: Literal["none", "each", "all"]
    bias: bool


def norm_places(shape: ModelShape) -> NormPlaces:
    """By the family; if the shape names none, by the parameters of a block beyond a plain Llama's."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    family = find_family(shape.architecture)
    if family is None:
        products = sum(a * b for a, b in linear_sizes(shape).values())
        extra = layer_parameters(shape) - products - 2 * shape.hidden_size
        heads: Literal["none", "each", "all"] = "each" if extra == 2 * shape.head_dim else "none"
        wide = extra == q + kv
        return NormPlaces(not wide, wide, "all" if wide else heads, extra == q + 2 * kv)
    layout = layout_of_shape(shape)
    names: dict[str, Literal["none", "each", "all"]] = {"none": "none", "head": "each", "width": "all"}
    return NormPlaces(
        before=layout.before_attention is not None,
        after=layout.after_attention is not None,
        heads=names[family.head_norms],
        bias=bool(family.biased),
    )


def sizes_of(
    shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int, even: bool = True
) -> StepSizes:
    """Adapters are assumed to have one rank and to be on all linear layers of the adapted blocks."""
    linears, layout, norms = linear_sizes(shape), layout_of_shape(shape), norm_places(shape)
    widths = sum(a + b for a, b in linears.values())
    rank = max(round(trainable / max(adapted * widths, 1)), 1) if trainable else 0
    family = find_family(shape.architecture)
    biased = () if family is None else family.biased

    def group(name: str, paths: tuple[str, ...]) -> LinearGroup:
        leaves = [path.rsplit(".", 1)[-1] for path in paths]
        return LinearGroup(
            inputs=linears[leaves[0]][0],
            outs=tuple(linears[leaf][1] for leaf in leaves),
            rank=rank,
            bias=leaves[0] in biased if biased else norms.bias and name == "qkv",
        )

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
        head_norms=norms.heads,
        norms_before=norms.before,
        norms_after=norms.after,
        norms=2 if family is None else family.norms,
        norm_bias=family is not None and family.norm_bias,
        layout=layout,
        even=even,
        compiled=tuning.compiled,
        capped=layout.capped,
        qkv=group("qkv", layout.qkv),
        out=group("out", (layout.out,)),
        gate_up=group("gate_up", layout.gate_up),
        down=group("down", (layout.down,)),
    )


HALF, WORD = 2, 4

CODES = "out+1"
GATE_BACKWARD = "gated+2 out+4"
OTHER_GATE_BACKWARD = "gated+2 right+2 mixed+2 left+2 mixed- out+4 left- right-"
"""Allocations of the backward pass of activations without a kernel of their own."""
UNGATED_BACKWARD = "gated+2 out+2"


@lru_cache(maxsize=64)
def _read(recipe: str) -> tuple[tuple[str, float], ...]:
    """(name, bytes per element), or None if it is freed."""
    steps = []
    for token in recipe.split():
        name, _, size = token.partition("+")
        steps.append((name, float(size)) if size else (name.rstrip("-"), 0.0))
    return tuple(steps)


def follow(memory: TensorMemory, recipe: str, elements: int) -> dict[str, Any]:
    """Follow a recipe; returns what is left at the end, by name."""
    blocks: dict[str, Any] = {}
    for name, size in _read(recipe):
        if size:
            blocks[name] = memory.alloc(int(size * elements))
        else:
            memory.free(blocks.pop(name))
    return blocks


def free_all(memory: TensorMemory, blocks: Iterable[Any]) -> None:
    """Free these in order; None entries were never allocated."""
    for block in blocks:
        if block is not None:
            memory.free(block)


def norm(memory: TensorMemory, elements: int) -> Any:
    """Cost of a norm, its backward pass, rotary positions or the gate: one kernel, one result."""
    return memory.alloc(HALF * elements)


def layer_norm(memory: TensorMemory, elements: int, rows: int, *, keeps: bool = False) -> Any:
    """A norm of mean and variance: its result; its backward pass recomputes both."""
    outputs = [memory.alloc(HALF * elements), memory.alloc(HALF * rows), memory.alloc(HALF * rows)]
    if not keeps:
        free_all(memory, outputs[1:])
        return outputs[0]
    result = memory.alloc(HALF * elements)
    free_all(memory, outputs)
    return result


def numbers(memory: TensorMemory, group: LinearGroup) -> Any:
    """Dequantize a 4-bit weight."""
    return memory.alloc(HALF * group.weights)


def product(memory: TensorMemory, sizes: StepSizes, group: LinearGroup, tokens: int) -> Any:
    """x Wᵀ, and its bias."""
    if sizes.form == "eight":
        weight = follow(memory, CODES, tokens * group.inputs)["out"]
    else:
        weight = numbers(memory, group) if sizes.form == "four" else None
    y = memory.alloc(HALF * tokens * group.out)
    if weight is not None and sizes.form == "four":
        memory.free(weight)
    if group.bias:
        plain, y = y, memory.alloc(HALF * tokens * group.out)
        memory.free(plain)
    if weight is not None and sizes.form == "eight":
        memory.free(weight)
    return y


def turned_product(memory: TensorMemory, sizes: StepSizes, group: LinearGroup, tokens: int) -> Any:
    """y W."""
    if sizes.form == "eight":
        return eight_turned(memory, tokens, group.out, group.inputs, turned=sizes.turned)
    weight = numbers(memory, group) if sizes.form == "four" else None
    dx = memory.alloc(HALF * tokens * group.inputs)
    free_all(memory, [weight])
    return dx


def eight_turned(memory: TensorMemory, tokens: int, wide: int, narrow: int, *, turned: bool) -> Any:
    codes = follow(memory, CODES, tokens * wide)["out"]
    return codes_turned(memory, tokens, wide, narrow, codes, turned=turned)


def codes_turned(
    memory: TensorMemory, tokens: int, wide: int, narrow: int, codes: Any, *, turned: bool
) -> Any:
    """The product of codes with a transposed weight, which is transposed first unless it is stored so."""
    weight = None if turned else memory.alloc(wide * narrow)
    dx = memory.alloc(HALF * tokens * narrow)
    free_all(memory, [weight])
    memory.free(codes)
    return dx


def hold_stacks(memory: TensorMemory, group: LinearGroup) -> None:
    """The adapters of one product, stacked in half precision, and buffers for their gradients in float32."""
    if group.rank:
        memory.alloc(HALF * group.ranks * group.inputs)
        memory.alloc(HALF * group.ranks * group.out)
        memory.alloc(WORD * group.ranks * group.inputs)
        for out in group.outs:
            memory.alloc(WORD * group.rank * out)


def grafted_product(
    memory: TensorMemory, sizes: StepSizes, group: LinearGroup, tokens: int
) -> tuple[Any, Any]:
    """The output, and the thin product of the adapter."""
    y = product(memory, sizes, group, tokens)
    if not group.rank:
        return y, None
    return y, memory.alloc(HALF * tokens * group.ranks)


def input_gradient(
    memory: TensorMemory, sizes: StepSizes, group: LinearGroup, tokens: int, base: Any = None
) -> tuple[Any, Any]:
    dx = turned_product(memory, sizes, group, tokens) if base is None else base
    if not group.rank:
        return dx, None
    return dx, memory.alloc(HALF * tokens * group.ranks)


def attend(memory: TensorMemory, sizes: StepSizes, tokens: int) -> list[Any]:
    """The attention output first, then the log-sum-exp of each row."""
    return [memory.alloc(HALF * tokens * sizes.q), memory.alloc(WORD * tokens * sizes.heads)]


def attend_backward(memory: TensorMemory, sizes: StepSizes, tokens: int, sums: Any) -> list[Any]:
    """Gradients of queries, keys and values, and the workspace of the kernel. cuDNN's, for rows of one
    length: queries' gradients and sums in float32; if heads share keys and values, those of each head before
    they are summed. graft's own kernel: one sum per query.
    """
    gradients = [memory.alloc(HALF * tokens * width) for width in (sizes.q, sizes.kv, sizes.kv)]
    if sizes.capped or not sizes.even:
        along = memory.alloc(WORD * tokens * sizes.heads)
        free_all(memory, [along, sums])
        return gradients
    room = WORD * tokens * (sizes.q + sizes.heads) + 256
    if sizes.kv_heads != sizes.heads:
        room += 2 * HALF * tokens * sizes.q
    free_all(memory, [memory.alloc(room), sums])
    return gradients
