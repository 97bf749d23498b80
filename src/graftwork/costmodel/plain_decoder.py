"""Decoders as transformers, PEFT and bitsandbytes run them, on tensors that are only sizes. Pure.

A storage is written to the stream when it is made and when the last reference to it goes, as PyTorch frees
it. So variables are held and dropped in the order in which the originals do it: that is what a peak is made
of. What a family has otherwise than Llama is its recipe in `model/families.py`.
"""

import heapq
import sys
from collections.abc import Callable, Sequence

from graftwork.costmodel.allocations import (
    CUBLAS_WORKSPACE,
    QUANTIZED_BLOCK,
    SCALES_BLOCK,
    AllocationStream,
    AttentionSizes,
    dequantized_sizes,
    flash_backward_sizes,
    tile_places,
)
from graftwork.model.families import ModelFamily, PlainRecipe, Widths
from graftwork.model.shape import expert_adapter_parameters, expert_parameters
from graftwork.records.base import ELEMENT_BYTES
from graftwork.records.plan import ModelShape, PlainSetup

ONLY_THE_BUFFER = 2
"""Return value of `sys.getrefcount` for a storage without other references: its tensor and the call."""


class Storage:
    """Bytes on the GPU until the last reference to them is dropped."""

    __slots__ = ("number", "stream")

    def __init__(self, stream: AllocationStream, size: int, part: str) -> None:
        self.stream = stream
        self.number = stream.take(size, part) if size else -1

    def __del__(self) -> None:
        if self.number >= 0:
            self.stream.give_back(self.number)


Back = Callable[["list[Tensor]"], "Sequence[Tensor | None]"]


class Node:
    """A node of the backward graph: takes the gradients of its results, returns those of its inputs."""

    __slots__ = ("back", "edges", "order")
    count = 0

    def __init__(self, edges: "Sequence[tuple[Node, int] | None]", back: Back) -> None:
        self.edges, self.back = edges, back
        Node.count += 1
        self.order = Node.count

    def __lt__(self, other: "Node") -> bool:
        return self.order > other.order


class Tensor:
    """`count` elements of `width` bytes. `edge` leads to the node that its gradient goes to, if any."""

    __slots__ = ("count", "edge", "is_view", "storage", "width")

    def __init__(
        self, storage: Storage, count: int, width: int, edge: tuple[Node, int] | None = None
    ) -> None:
        self.storage, self.count, self.width, self.edge = storage, count, width, edge
        self.is_view = False
        """True for a view of another tensor, which it keeps alive: nothing can be added to it in place."""

    def seen_otherwise(self) -> "Tensor":
        self.is_view = True
        return self


class Tape:
    """Creates tensors, and runs the backward pass."""

    def __init__(self, stream: AllocationStream) -> None:
        self.stream = stream
        self.learning = True
        """If False, nothing is saved for a backward pass."""
        self.part = "activations"
        self.ahead: list[Tensor] = []
        """Gradients that existed before a layer was recomputed, from the first scale in the backward pass."""
        self._going_back = False
        self._workspaces: dict[bool, Storage] = {}
        self.muted = False
        """If True, tensors are not really created: recomputation stops once nothing more is saved."""

    def new(self, count: int, width: int, *, part: str | None = None) -> Tensor:
        size = 0 if self.muted else count * width
        return Tensor(Storage(self.stream, size, part or self.part), count, width)

    def multiply_matrices(self) -> None:
        """A thread's first product allocates the library's workspace permanently; backward has its own
        thread.
        """
        if self._going_back not in self._workspaces and not self.muted:
            self._workspaces[self._going_back] = Storage(self.stream, CUBLAS_WORKSPACE, "workspace")

    def warm_up(self) -> None:
        """Both threads have allocated their workspaces, as after a first step."""
        for backward in (False, True):
            self._workspaces[backward] = Storage(self.stream, CUBLAS_WORKSPACE, "workspace")

    def made(self, result: Tensor, inputs: Sequence[Tensor], back: Back) -> Tensor:
        """Return `result`, linked to the inputs that need a gradient."""
        if self.learning and any(tensor.edge for tensor in inputs):
            result.edge = (Node([tensor.edge for tensor in inputs], back), 0)
        return result

    def leaf(self, weight: "Weight") -> Tensor:
        """A weight as a tensor: trained ones accumulate their gradient."""
        assert weight.storage is not None
        tensor = Tensor(weight.storage, weight.count, weight.width)
        if weight.trained and self.learning:
            if weight.node is None:
                weight.node = Node([], lambda grads: weight.collect(self, grads))
                weight.node.order = 0
            tensor.edge = (weight.node, 0)
        return tensor

    def backward(self, root: tuple[Node, int], gradient: Tensor | None) -> None:
        """Run from the root to every leaf, in reverse order of creation."""
        waits: dict[Node, int] = {}
        visited, stack = {root[0]}, [root[0]]
        while stack:
            for edge in stack.pop().edges:
                if edge is not None:
                    waits[edge[0]] = waits.get(edge[0], 0) + 1
                    if edge[0] not in visited:
                        visited.add(edge[0])
                        stack.append(edge[0])
        del visited
        buffers: dict[Node, dict[int, Tensor]] = {root[0]: {} if gradient is None else {root[1]: gradient}}
        gradient = None
        ready = [root[0]]
        root = (ready[0], 0)
        learning, part, back = self.learning, self.part, self._going_back
        self.learning, self.part, self._going_back = False, "workspace", True
        while ready:
            node = heapq.heappop(ready)
            buffer = buffers.pop(node, {})
            grads = [buffer[key] for key in sorted(buffer)]
            del buffer
            results = node.back(grads)
            del grads
            edges, node.edges = node.edges, []
            if node.order:
                node.back = _used
            for index, edge in enumerate(edges):
                if edge is None:
                    continue
                if index < len(results) and results[index] is not None:
                    self._accumulate(buffers.setdefault(edge[0], {}), edge[1], results, index)
                waits[edge[0]] -= 1
                if not waits[edge[0]]:
                    heapq.heappush(ready, edge[0])
            del results, edges, node
        self.learning, self.part, self._going_back = learning, part, back

    def _accumulate(
        self, buffer: dict[int, Tensor], key: int, results: "Sequence[Tensor | None]", index: int
    ) -> None:
        """Accumulate, in place where there is no other reference."""
        gradient = results[index]
        assert gradient is not None
        if key not in buffer:
            # The tensor may be shared with another edge; its storage is what counts.
            buffer[key] = Tensor(gradient.storage, gradient.count, gradient.width)
            buffer[key].is_view = gradient.is_view
        elif buffer[key].is_view or sys.getrefcount(buffer[key].storage) > ONLY_THE_BUFFER:
            buffer[key] = self.new(gradient.count, gradient.width)


def _used(_: "list[Tensor]") -> "Sequence[Tensor | None]":
    return ()


class Weight:
    """A parameter: allocated from the start, with a gradient from the backward pass to the next step."""

    __slots__ = ("count", "gradient", "node", "storage", "trained", "width")

    def __init__(self, count: int, width: int, *, trained: bool = False) -> None:
        self.count, self.width, self.trained = count, width, trained
        self.storage: Storage | None = None
        self.gradient: Tensor | None = None
        self.node: Node | None = None

    def collect(self, tape: Tape, grads: list[Tensor]) -> "Sequence[Tensor | None]":
        if self.gradient is None:
            self.gradient = grads[0]
            tape.stream.parts[self.gradient.storage.number] = "gradients"
        self.node = None
        return ()


def cast(tape: Tape, x: Tensor, width: int) -> Tensor:
    if x.width == width:
        return x
    old_width = x.width
    return tape.made(tape.new(x.count, width), [x], lambda grads: [_cast_back(tape, grads, old_width)])


def _cast_back(tape: Tape, grads: list[Tensor], width: int) -> Tensor:
    gradient = grads.pop()
    return gradient if gradient.width == width else tape.new(gradient.count, width)


def clone(tape: Tape, x: Tensor) -> Tensor:
    return tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])


def scale(tape: Tape, x: Tensor) -> Tensor:
    """Multiply by a number."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        return [tape.ahead.pop() if tape.ahead else tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def turned(tape: Tape, x: Tensor) -> Tensor:
    """A view whose gradient has another layout and must be copied."""
    view = Tensor(x.storage, x.count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(grads[0].count, grads[0].width)])


def part_of(tape: Tape, x: Tensor, count: int) -> Tensor:
    """A slice: its gradient is as large as the whole."""
    whole, view = x.count, Tensor(x.storage, count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(whole, grads[0].width)])


def halves(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of one split: their gradients are concatenated."""
    first, second = (Tensor(x.storage, x.count // 2, x.width) for _ in range(2))
    tape.made(first, [x], lambda grads: [tape.new(2 * grads[0].count, grads[0].width)])
    if first.edge is not None:
        second.edge = (first.edge[0], 1)
    return first, second


def join(tape: Tape, parts: list[Tensor]) -> Tensor:
    """Concatenated; the gradients are views of the whole's."""
    result = tape.new(sum(part.count for part in parts), max(part.width for part in parts))
    counts = [part.count for part in parts]

    def back(grads: list[Tensor]) -> list[Tensor]:
        whole = grads.pop()
        return [Tensor(whole.storage, count, whole.width).seen_otherwise() for count in counts]

    return tape.made(result, parts, back)


def add(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    result = tape.new(max(a.count, b.count), max(a.width, b.width))
    widths = a.width, b.width
    needed = a.edge is not None, b.edge is not None

    def back(grads: list[Tensor]) -> list[Tensor | None]:
        gradient = grads.pop()
        both = zip(widths, needed, strict=True)
        return [
            _cast_back(tape, [gradient], width) if needs_gradient else None for width, needs_gradient in both
        ]

    return tape.made(result, [a, b], back)


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Each factor is saved for the other's gradient, which is summed if the factor was broadcast."""
    result = tape.new(max(a.count, b.count), max(a.width, b.width))
    saved = (a.storage if b.edge else None, b.storage if a.edge else None)
    needed = ((a.count, a.width, a.edge is not None), (b.count, b.width, b.edge is not None))

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor | None]:
        raw = [
            tape.new(grads[0].count, grads[0].width) if needs_gradient else None
            for *_, needs_gradient in needed
        ]
        grads.pop()
        for index, (count, width, _wanted) in enumerate(needed):
            gradient = raw[index]
            if gradient is not None and gradient.count != count:
                raw[index] = gradient = tape.new(count, gradient.width)
            if gradient is not None and gradient.width != width:
                raw[index] = tape.new(count, width)
            del gradient
        return raw

    return tape.made(result, [a, b], back)


def activate(tape: Tape, x: Tensor) -> Tensor:
    """SiLU or GELU: the input is saved."""
    saved = x.storage

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor]:
        return [tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def mean_square(tape: Tape, x: Tensor, rows: int) -> Tensor:
    """x.pow(2).mean(-1): backward holds four tensors as large as x at once."""
    saved = x.storage
    squares = tape.new(x.count, x.width)
    result = tape.new(rows, x.width)
    del squares
    count, width = x.count, x.width

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor]:
        grads.clear()
        spread = tape.new(count, width)
        power, doubled = tape.new(count, width), tape.new(count, width)
        gradient = tape.new(count, width)
        del spread, power, doubled
        return [gradient]

    return tape.made(result, [x], back)


def inverse_root(tape: Tape, x: Tensor) -> Tensor:
    shifted = tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])
    result = tape.new(shifted.count, shifted.width)
    saved = result.storage

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor]:
        temporary = [tape.new(grads[0].count, grads[0].width) for _ in range(2)]
        gradient = tape.new(grads[0].count, grads[0].width)
        temporary.clear()
        return [gradient]

    return tape.made(result, [shifted], back)


def linear(
    tape: Tape, x: Tensor, weight: Tensor, *, outputs: int, bias: Tensor | None = None, last: bool = False
) -> Tensor:
    """A product with a weight: the input is saved if the weight is trained, the weight if the input needs a
    gradient. `last`: nothing after it is saved, so that recomputation ends here.
    """
    inputs = weight.count // outputs
    tokens = x.count // inputs
    tape.muted |= last
    result = tape.new(tokens * outputs, x.width)
    tape.multiply_matrices()
    saved = (x.storage if weight.edge else None, weight.storage if x.edge else None)
    needed = x.edge is not None, weight.edge is not None, bias is not None and bias.edge is not None
    size = weight.count

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor | None]:
        width = grads[0].width
        of_bias = tape.new(outputs, width) if needed[2] else None
        of_weight = tape.new(size, width).seen_otherwise() if needed[1] else None
        if needed[1]:
            tape.multiply_matrices()
        of_input = tape.new(tokens * inputs, width).seen_otherwise() if needed[0] else None
        tape.multiply_matrices()
        return [of_input, of_weight, of_bias]

    return tape.made(result, [x, weight, *([bias] if bias else [])], back)


def embed(tape: Tape, weight: Tensor, *, tokens: int, hidden: int) -> Tensor:
    size = weight.count
    result = tape.new(tokens * hidden, weight.width)

    def back(grads: list[Tensor]) -> list[Tensor]:
        gradient = tape.new(size, grads[0].width)
        tape.stream.use_together([tokens * 8] * 2)
        return [gradient]

    return tape.made(result, [weight], back)


FLOAT = 4


class Machinery:
    """What all modules of a step share: the tape, the setting, and the casts that autocast caches."""

    def __init__(self, tape: Tape, setup: PlainSetup) -> None:
        self.tape, self.setup = tape, setup
        self.low = min(ELEMENT_BYTES[setup.dtype], 2)
        self.places = setup.rows * setup.tokens
        self.again = False
        """True while a layer is recomputed."""
        self._casts: dict[int, Tensor] = {}

    def as_low(self, weight: Weight) -> Tensor:
        """A weight as autocast passes it to a product: casts of trained float32 weights are cached."""
        tensor = self.tape.leaf(weight)
        if not self.setup.autocast or weight.width == self.low:
            return tensor
        if not weight.trained or not self.tape.learning:
            return cast(self.tape, tensor, self.low)
        if id(weight) not in self._casts:
            self._casts[id(weight)] = cast(self.tape, tensor, self.low)
        return self._casts[id(weight)]

    def forget_casts(self) -> None:
        self._casts.clear()

    def product(
        self, x: Tensor, weight: Weight, *, outputs: int, bias: Weight | None = None, last: bool = False
    ) -> Tensor:
        tape = self.tape
        if self.setup.autocast:
            x = cast(tape, x, self.low)
        low_bias = self.as_low(bias) if bias is not None else None
        return linear(tape, x, self.as_low(weight), outputs=outputs, bias=low_bias, last=last and self.again)


class Linear:
    """A linear layer, optionally in 4 bits, optionally with adapters."""

    def __init__(
        self,
        sizes: tuple[int, int],
        setup: PlainSetup,
        *,
        bias: bool = False,
        adapted: bool = False,
        trained: bool = False,
    ) -> None:
        self.inputs, self.outputs = sizes
        count, width = sizes[0] * sizes[1], ELEMENT_BYTES[setup.dtype]
        self.four = setup.method == "qlora"
        self.last = False
        """True for the last module of its layer."""
        self.weights = [Weight((count + 1) // 2, 1)] if self.four else [Weight(count, width, trained=trained)]
        if self.four:
            blocks = -(-count // QUANTIZED_BLOCK)
            self.weights += [
                Weight(blocks, 1),
                Weight(16, 4),
                Weight(1, 4),
                Weight(-(-blocks // SCALES_BLOCK), 4),
            ]
        self.bias: Weight | None = None
        if bias:
            wide = FLOAT if self.four and setup.kbit_upcast else width
            self.bias = Weight(self.outputs, wide, trained=trained)
            self.weights.append(self.bias)
        self.adapter: tuple[Weight, Weight] | None = None
        self.magnitude: Weight | None = None
        if adapted:
            wide = ELEMENT_BYTES[setup.adapter_dtype]
            self.adapter = (
                Weight(sizes[0] * setup.rank, wide, trained=True),
                Weight(sizes[1] * setup.rank, wide, trained=True),
            )
            self.weights += self.adapter
            if setup.method == "dora":
                self.magnitude = Weight(sizes[1], wide, trained=True)
                self.weights.append(self.magnitude)

    def run(self, shared: Machinery, hidden: Tensor) -> Tensor:
        """Arguments are referenced by the call until it returns."""
        x = hidden
        result = self._base(shared, x)
        if self.adapter is None:
            return result
        tape, setup = shared.tape, shared.setup
        if self.four:
            result = clone(tape, result)
        kind = result.width
        if not self.four or not setup.autocast:
            x = cast(tape, x, self.adapter[0].width)
        if self.magnitude is not None:
            return cast(tape, self._dora(shared, x, result), kind)
        if not self.four:
            result = add(tape, result, self._adapted(shared, x))
            return cast(tape, result, kind)
        output = self._adapted(shared, x)
        if not setup.autocast:
            output = cast(tape, output, kind)
        return add(tape, result, output)

    def _adapted(self, shared: Machinery, x: Tensor) -> Tensor:
        assert self.adapter is not None
        down, up = self.adapter
        narrow = shared.product(x, down, outputs=shared.setup.rank)
        return scale(shared.tape, shared.product(narrow, up, outputs=self.outputs, last=self.last))

    def _base(self, shared: Machinery, x: Tensor) -> Tensor:
        if not self.four:
            last = self.last and self.adapter is None
            return shared.product(x, self.weights[0], outputs=self.outputs, bias=self.bias, last=last)
        kind = x.width
        low = cast(shared.tape, x, shared.low)
        result = cast(shared.tape, self._four_bits(shared, low), kind)
        del low
        return result

    def _four_bits(self, shared: Machinery, x: Tensor) -> Tensor:
        """The weights are dequantized to half precision in the forward pass and again in the backward
        pass.
        """
        tape, weights = shared.tape, self.inputs * self.outputs
        whole = [tape.new(size, 1, part="workspace") for size in dequantized_sizes(weights, x.width)]
        result = tape.new(x.count // self.inputs * self.outputs, x.width)
        tape.multiply_matrices()
        del whole
        count = x.count

        def back(grads: list[Tensor]) -> list[Tensor]:
            whole = [tape.new(size, 1) for size in dequantized_sizes(weights, grads[0].width)]
            del whole[0]
            return [tape.new(count, grads[0].width)]

        return tape.made(result, [x], back)

    def _dora(self, shared: Machinery, x: Tensor, result: Tensor) -> Tensor:
        """The adapter's product as a full weight, its norm, and the output scaled by both."""
        tape, setup = shared.tape, shared.setup
        assert self.adapter is not None
        assert self.magnitude is not None
        down, up = self.adapter
        ones = tape.new(self.inputs * self.inputs, down.width)
        whole = shared.product(shared.product(ones, down, outputs=setup.rank), up, outputs=self.outputs)
        del ones
        whole = cast(tape, whole, x.width)
        summed = _detached_norm(tape, whole, x.width)
        ratio = scale(tape, tape.leaf(self.magnitude))
        del whole, summed
        outside = shared.product(shared.product(x, down, outputs=setup.rank), up, outputs=self.outputs)
        extra = add(
            tape, multiply(tape, scale(tape, ratio), result), scale(tape, multiply(tape, ratio, outside))
        )
        return add(tape, result, extra)


def _detached_norm(tape: Tape, whole: Tensor, width: int) -> Tensor:
    scaled = tape.new(whole.count, width)
    summed = tape.new(whole.count, width)
    del scaled
    return summed


class Norm:
    """RMSNorm in float32. Styles differ in when the weight is applied and when the result is cast back."""

    def __init__(self, size: int, setup: PlainSetup, *, style: str = "llama", trained: bool = False) -> None:
        width = FLOAT if setup.method == "qlora" and setup.kbit_upcast else ELEMENT_BYTES[setup.dtype]
        self.size, self.style = size, style
        self.last = False
        """True for the last module of its layer."""
        self.weight = Weight(size, width, trained=trained)
        self.weights = [self.weight]

    def run(self, shared: Machinery, x: Tensor) -> Tensor:
        tape, kind, rows = shared.tape, x.width, x.count // self.size
        hidden = cast(tape, x, FLOAT)
        if self.style == "gemma":
            output = multiply(tape, hidden, inverse_root(tape, mean_square(tape, hidden, rows)))
            del hidden
            output = multiply(tape, output, scale(tape, cast(tape, tape.leaf(self.weight), FLOAT)))
            return cast(tape, output, kind)
        variance = mean_square(tape, hidden, rows)
        hidden = multiply(tape, hidden, inverse_root(tape, variance))
        if self.style == "olmo2":
            tape.muted |= self.last and shared.again
            return cast(tape, multiply(tape, tape.leaf(self.weight), hidden), kind)
        return multiply(tape, tape.leaf(self.weight), cast(tape, hidden, kind))


def rotate(shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions: half of each head is rotated."""
    tape = shared.tape
    cos, sin = waves
    first = multiply(tape, x, cos)
    return add(tape, first, multiply(tape, _half_turned(tape, x), sin))


def _half_turned(tape: Tape, x: Tensor) -> Tensor:
    first_half, second_half = part_of(tape, x, x.count // 2), part_of(tape, x, x.count // 2)
    return join(tape, [scale(tape, second_half), first_half])


def rotate_part(shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """As Phi-3 does it: the rotated part and the rest are concatenated, though there is no rest."""
    tape = shared.tape
    inner, untouched = part_of(tape, x, x.count), Tensor(x.storage, 0, x.width)
    return join(tape, [rotate(shared, inner, waves), untouched])


def attend(
    shared: Machinery, q: Tensor, k: Tensor, v: Tensor, shape: ModelShape, *, in_order: bool = True
) -> Tensor:
    """Flash attention: saves queries, keys, values, the output and the row sums."""
    tape, setup = shared.tape, shared.setup
    if setup.autocast:
        q, k, v = cast(tape, q, shared.low), cast(tape, k, shared.low), cast(tape, v, shared.low)
    out = tape.new(q.count, q.width)
    sums = tape.new(setup.rows * shape.heads * setup.tokens, FLOAT)
    seed, offset = tape.new(2, 8), tape.new(1, 8)
    saved: list[Storage] = [value.storage for value in (q, k, v, out, sums, seed, offset)]
    counts = q.count, k.count, v.count
    del sums, seed, offset

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor]:
        width = grads[0].width
        gradients = [tape.new(count, width) for count in counts]
        sizes = AttentionSizes(
            setup.rows, setup.tokens, setup.tokens, shape.heads, shape.kv_heads, shape.head_dim, width
        )
        tape.stream.use_together(flash_backward_sizes(sizes, deterministic=setup.deterministic))
        return gradients

    result = tape.made(out, [q, k, v], back)
    return result if in_order else clone(tape, result)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _expert_weights(shape: ModelShape, setup: PlainSetup, *, adapted: bool, trained: bool) -> list[Weight]:
    """Weights of the experts that a token is not routed to, and the adapters of all of them."""
    if not shape.experts:
        return []
    idle = (shape.experts - shape.experts_used) * expert_parameters(shape) + shape.experts * shape.hidden_size
    weights = [Weight(idle, ELEMENT_BYTES[setup.dtype], trained=trained)]
    if adapted and setup.experts:
        learned = expert_adapter_parameters(shape, setup.rank)
        weights.append(Weight(learned, ELEMENT_BYTES[setup.adapter_dtype], trained=True))
        # Each layer keeps its changed stack for the backward pass, and makes the gradient of it there.
        weights.append(Weight(shape.experts * expert_parameters(shape), min(ELEMENT_BYTES[setup.dtype], 2)))
    return weights


class PlainBlock:
    """One layer."""

    def __init__(self, shape: ModelShape, setup: PlainSetup, family: ModelFamily, *, adapted: bool) -> None:
        full = setup.method == "full" and adapted
        # A token goes through some experts, as through one wide MLP; the others are weights and no work.
        inner = shape.experts_used * shape.expert_inner if shape.experts else shape.intermediate_size
        h, i, d = shape.hidden_size, inner, shape.head_dim
        q, kv = shape.heads * d, shape.kv_heads * d
        self.recipe = recipe = family.recipe or PlainRecipe()
        self.shape = shape
        self.linears = {
            name: Linear(
                size,
                # Stacked experts are not linear layers: they are not quantized to four bits.
                setup
                if not shape.experts or name in ATTENTION
                else setup.model_copy(update={"method": "lora"}),
                bias=name in family.biased,
                adapted=adapted and not full and name in setup.targets,
                trained=full,
            )
            for name, size in family.linears(Widths(h, i, q, kv)).items()
        }
        self.linears["down_proj"].last = not recipe.norm_after
        self.norms = [Norm(h, setup, style=recipe.norm, trained=full) for _ in range(2)]
        self.norms[1].last = recipe.norm_after
        widths = {"head": (d, d), "width": (q, kv)}.get(family.head_norms, ())
        self.head_norms = [Norm(width, setup, style=recipe.norm, trained=full) for width in widths]
        modules: list[Linear | Norm] = [*self.linears.values(), *self.head_norms, *self.norms]
        self.weights = [weight for module in modules for weight in module.weights]
        self.weights += _expert_weights(shape, setup, adapted=adapted and not full, trained=full)

    def run(self, shared: Machinery, hidden: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
        """Arguments are referenced by the call until it returns."""
        residual = x = hidden
        if not self.recipe.norm_after:
            x = self.norms[0].run(shared, x)
        x = self._attention(shared, x, waves)
        if self.recipe.norm_after:
            x = self.norms[0].run(shared, x)
        x = add(shared.tape, residual, x)
        residual = x
        if not self.recipe.norm_after:
            x = self.norms[1].run(shared, x)
        x = self._mlp(shared, x)
        if self.recipe.norm_after:
            x = self.norms[1].run(shared, x)
        return add(shared.tape, residual, x)

    def _attention(self, shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self._projected(shared, x)
        turn = rotate_part if self.recipe.fused else rotate
        q, k = turn(shared, q, waves), turn(shared, k, waves)
        out = attend(shared, q, k, v, self.shape, in_order=not self.recipe.fused)
        return self.linears["o_proj"].run(shared, out)

    def _projected(self, shared: Machinery, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tape, shape = shared.tape, self.shape
        if self.recipe.fused:
            whole = self.linears["qkv_proj"].run(shared, x)
            counts = [shared.places * heads * shape.head_dim for heads in (shape.heads, shape.kv_heads)]
            q, k, v = (part_of(tape, whole, count) for count in (counts[0], counts[1], counts[1]))
            return turned(tape, q), turned(tape, k), v
        q = self.linears["q_proj"].run(shared, x)
        if self.head_norms:
            q = self.head_norms[0].run(shared, q)
        q = turned(tape, q)
        k = self.linears["k_proj"].run(shared, x)
        if self.head_norms:
            k = self.head_norms[1].run(shared, k)
        return q, turned(tape, k), self.linears["v_proj"].run(shared, x)

    def _mlp(self, shared: Machinery, x: Tensor) -> Tensor:
        tape = shared.tape
        if self.recipe.fused:
            up = self.linears["gate_up_proj"].run(shared, x)
            gate, up = halves(tape, up)
            up = multiply(tape, up, activate(tape, gate))
            return self.linears["down_proj"].run(shared, up)
        gate = activate(tape, self.linears["gate_proj"].run(shared, x))
        up = self.linears["up_proj"].run(shared, x)
        inner = multiply(tape, gate, up)
        del gate, up
        return self.linears["down_proj"].run(shared, inner)


class PlainDecoder:
    """All of it, ready for steps."""

    def __init__(self, shape: ModelShape, setup: PlainSetup, family: ModelFamily) -> None:
        self.shape, self.setup = shape, setup
        self.recipe = recipe = family.recipe or PlainRecipe()
        width = FLOAT if setup.method == "qlora" and setup.kbit_upcast else ELEMENT_BYTES[setup.dtype]
        whole = setup.method == "full" and setup.adapted_layers >= shape.layers
        self.embedding = Weight(shape.vocab_size * shape.hidden_size, width, trained=whole)
        first = shape.layers - setup.adapted_layers
        self.blocks = [
            PlainBlock(shape, setup, family, adapted=layer >= first) for layer in range(shape.layers)
        ]
        self.norm = Norm(shape.hidden_size, setup, style=recipe.norm, trained=whole)
        self.head = self.embedding
        if not shape.tied_embeddings:
            self.head = Weight(shape.vocab_size * shape.hidden_size, width, trained=whole)
        inside = [weight for block in self.blocks for weight in block.weights]
        outside = [self.norm.weight] if self.head is self.embedding else [self.norm.weight, self.head]
        self.weights = [self.embedding, *inside, *outside]

    def hidden_states(self, shared: Machinery) -> Tensor:
        tape, setup = shared.tape, self.setup
        x = embed(tape, tape.leaf(self.embedding), tokens=shared.places, hidden=self.shape.hidden_size)
        if self.recipe.scaled_embedding:
            x = scale(tape, x)
        embedded = x  # held by its name until the last layer is through
        count = setup.tokens * self.shape.head_dim
        tape.multiply_matrices()  # positions times frequencies
        waves = (tape.new(count, x.width), tape.new(count, x.width))
        for layer, block in enumerate(self.blocks):
            if layer < setup.checkpointed:
                x = _run_again_later(block, shared, x, waves)
            else:
                x = block.run(shared, x, waves)
        result = self.norm.run(shared, x)
        del embedded
        return result

    def plain_loss(self, shared: Machinery) -> Tensor:
        """Logits in float32 and their log-softmax, saved until their gradient is computed."""
        tape, vocabulary = shared.tape, self.shape.vocab_size
        hidden = self.hidden_states(shared)
        part, tape.part = tape.part, "logits"
        logits = shared.product(hidden, self.head, outputs=vocabulary)
        whole = cast(tape, logits, FLOAT)
        logs = tape.new(whole.count, FLOAT)
        saved = logs.storage

        def back(grads: list[Tensor], _: object = saved) -> list[Tensor]:
            before = tape.new(shared.places * vocabulary, FLOAT, part="logits")
            gradient = tape.new(shared.places * vocabulary, FLOAT, part="logits")
            del before
            return [gradient]

        tape.part = part
        loss = tape.made(tape.new(1, FLOAT), [whole], back)
        del logs, whole  # the loss returns before the model does
        del hidden
        return loss

    def fused_loss(self, shared: Machinery) -> Tensor:
        """Compute the loss one tile of positions at a time, with the gradient in the forward pass."""
        tape, shape = shared.tape, self.shape
        hidden = self.hidden_states(shared)
        head = tape.leaf(self.head)
        width = shared.low if self.setup.autocast else hidden.width
        tile = tile_places(shared.places, shape.hidden_size, shape.vocab_size)
        gradient = tape.new(hidden.count, hidden.width)
        of_head = tape.new(head.count, head.width) if head.edge else None
        losses = tape.new(shared.places, FLOAT)
        same = head.width == hidden.width == width
        # Where nothing is cast, all tiles share one buffer.
        logits = tape.new(tile * shape.vocab_size, width, part="logits") if same else None
        tape.multiply_matrices()
        for _ in range(0, shared.places, tile):
            self._fused_tile(shared, tile, width, same=same, trained=of_head is not None)
        gradients = [gradient, of_head]

        def back(grads: list[Tensor], _: object = gradients) -> list[Tensor | None]:
            return list(gradients)

        del logits, gradient, of_head, losses
        return tape.made(tape.new(1, FLOAT), [hidden, head], back)

    def _fused_tile(self, shared: Machinery, tile: int, width: int, *, same: bool, trained: bool) -> None:
        tape, shape = shared.tape, self.shape
        size = shape.vocab_size * shape.hidden_size
        if not same:
            copied = tape.new(size, width, part="workspace")
            logits = tape.new(tile * shape.vocab_size, width, part="logits")
            del copied
            tape.stream.use_together([size * width, tile * shape.hidden_size * width])
            del logits
        if trained:
            tape.stream.use(size * width)


def _run_again_later(block: PlainBlock, shared: Machinery, x: Tensor, waves: tuple[Tensor, Tensor]) -> Tensor:
    """Save only the input; the layer is recomputed in the backward pass, and then saves everything."""
    tape = shared.tape
    tape.learning = False
    result = block.run(shared, x, waves)
    tape.learning = True
    saved, count, width, needs = x.storage, x.count, x.width, x.edge is not None
    trained = any(weight.trained for weight in block.weights)
    if not needs and not trained:
        return result

    def back(grads: list[Tensor], _: object = saved) -> list[Tensor | None]:
        collected: list[Tensor] = []
        recomputed = Tensor(saved, count, width)
        if needs:
            recomputed.edge = (Node([], lambda given: _pass_on(collected, given)), 0)
        learning, part = tape.learning, tape.part
        tape.learning, tape.part = True, "activations"
        shared.again = True
        tape.ahead = _ahead_of_running(block, shared, count)
        # A norm at the end takes its gradient in float32 before it asks for what was kept.
        widened = tape.new(count, FLOAT) if block.recipe.norm_after and width != FLOAT else None
        output = block.run(shared, recomputed, waves)
        shared.again = tape.muted = False
        del widened
        shared.forget_casts()
        root = output.edge
        del output, recomputed
        assert root is not None
        tape.backward(root, grads.pop())
        tape.learning, tape.part = learning, part
        return [collected.pop()] if collected else [None]

    result.edge = (Node([x.edge], back), 0)
    return result


def _ahead_of_running(block: PlainBlock, shared: Machinery, count: int) -> list[Tensor]:
    """A layer is recomputed when its saved tensors are first needed: the adapter's scale comes after that."""
    down = block.linears["down_proj"]
    if down.adapter is None or block.recipe.norm_after:
        return []
    width = shared.low if shared.setup.autocast else down.adapter[0].width
    return [shared.tape.new(count, width)]


def _pass_on(collected: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
    collected.append(grads.pop())
    return []
