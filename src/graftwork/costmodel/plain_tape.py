"""Tensors that are only sizes, and the backward pass over them. Pure.

A storage is written to the stream when it is made and when the last reference to it goes, as PyTorch frees
it; so the code that uses these must hold and drop its variables as transformers' own does. Knows nothing
of models.
"""

import heapq
import sys
from collections.abc import Callable, Sequence

from graftwork.costmodel.stream import CUBLAS_WORKSPACE, AllocationStream

ONLY_THE_BUFFER = 2
"""What `sys.getrefcount` returns for a storage without other references: its tensor and the call."""


class Storage:
    """Bytes on the card until the last reference to them goes."""

    __slots__ = ("number", "stream")

    def __init__(self, stream: AllocationStream, size: int, part: str) -> None:
        self.stream = stream
        self.number = stream.take(size, part) if size else -1

    def __del__(self) -> None:
        if self.number >= 0:
            self.stream.give_back(self.number)


Back = Callable[["list[Tensor]"], "Sequence[Tensor | None]"]


class Node:
    """A step of the backward pass: takes the gradients of its results, gives those of its inputs."""

    __slots__ = ("back", "edges", "order")
    count = 0

    def __init__(self, edges: "Sequence[tuple[Node, int] | None]", back: Back) -> None:
        self.edges, self.back = edges, back
        Node.count += 1
        self.order = Node.count

    def __lt__(self, other: "Node") -> bool:
        return self.order > other.order


class Tensor:
    """`count` elements of `width` bytes. `edge` leads to what its gradient goes to, where it has one."""

    __slots__ = ("count", "edge", "is_view", "storage", "width")

    def __init__(
        self, storage: Storage, count: int, width: int, edge: tuple[Node, int] | None = None
    ) -> None:
        self.storage, self.count, self.width, self.edge = storage, count, width, edge
        self.is_view = False
        """It is a view of another tensor, which it keeps alive: nothing can be added to it in place."""

    def seen_otherwise(self) -> "Tensor":
        self.is_view = True
        return self


class Tape:
    """Makes tensors, and runs the backward pass."""

    def __init__(self, stream: AllocationStream) -> None:
        self.stream = stream
        self.learning = True
        """Off: nothing is kept for a backward pass."""
        self.part = "activations"
        self.ahead: list[Tensor] = []
        """Gradients that were there before a layer ran again: the first scale on the way back gave them."""
        self._going_back = False
        self._workspaces: dict[bool, Storage] = {}
        self.muted = False
        """What is made now is never really made: running a layer again stops where nothing more is kept."""

    def new(self, count: int, width: int, *, part: str | None = None) -> Tensor:
        size = 0 if self.muted else count * width
        return Tensor(Storage(self.stream, size, part or self.part), count, width)

    def multiply_matrices(self) -> None:
        """A thread's first product takes the library's workspace, for good; backward has its thread."""
        if self._going_back not in self._workspaces and not self.muted:
            self._workspaces[self._going_back] = Storage(self.stream, CUBLAS_WORKSPACE, "workspace")

    def made(self, result: Tensor, inputs: Sequence[Tensor], back: Back) -> Tensor:
        """`result`, with its way back to the inputs that need one."""
        if self.learning and any(tensor.edge for tensor in inputs):
            result.edge = (Node([tensor.edge for tensor in inputs], back), 0)
        return result

    def leaf(self, weight: "Weight") -> Tensor:
        """A weight as a tensor: trained ones collect their gradient."""
        assert weight.storage is not None
        tensor = Tensor(weight.storage, weight.count, weight.width)
        if weight.trained and self.learning:
            if weight.node is None:
                weight.node = Node([], lambda grads: weight.collect(self, grads))
                weight.node.order = 0
            tensor.edge = (weight.node, 0)
        return tensor

    def backward(self, root: tuple[Node, int], gradient: Tensor | None) -> None:
        """From the root to every leaf, the latest made first."""
        waits: dict[Node, int] = {}
        seen, stack = {root[0]}, [root[0]]
        while stack:
            for edge in stack.pop().edges:
                if edge is not None:
                    waits[edge[0]] = waits.get(edge[0], 0) + 1
                    if edge[0] not in seen:
                        seen.add(edge[0])
                        stack.append(edge[0])
        del seen
        buffers: dict[Node, dict[int, Tensor]] = {root[0]: {} if gradient is None else {root[1]: gradient}}
        gradient = None
        ready = [root[0]]
        root = (ready[0], 0)
        learning, part, back = self.learning, self.part, self._going_back
        self.learning, self.part, self._going_back = False, "workspace", True
        while ready:
            node = heapq.heappop(ready)
            held = buffers.pop(node, {})
            grads = [held[key] for key in sorted(held)]
            del held
            results = node.back(grads)
            del grads
            edges, node.edges = node.edges, []
            if node.order:
                node.back = _used
            for place, edge in enumerate(edges):
                if edge is None:
                    continue
                if place < len(results) and results[place] is not None:
                    self._accumulate(buffers.setdefault(edge[0], {}), edge[1], results, place)
                waits[edge[0]] -= 1
                if not waits[edge[0]]:
                    heapq.heappush(ready, edge[0])
            del results, edges, node
        self.learning, self.part, self._going_back = learning, part, back

    def _accumulate(
        self, buffer: dict[int, Tensor], key: int, results: "Sequence[Tensor | None]", place: int
    ) -> None:
        """Accumulate, in place where there is no other reference."""
        more = results[place]
        assert more is not None
        if key not in buffer:
            # The tensor may be shared with another edge; its storage is what counts.
            buffer[key] = Tensor(more.storage, more.count, more.width)
            buffer[key].is_view = more.is_view
        elif buffer[key].is_view or sys.getrefcount(buffer[key].storage) > ONLY_THE_BUFFER:
            buffer[key] = self.new(more.count, more.width)


def _used(_: "list[Tensor]") -> "Sequence[Tensor | None]":
    return ()


class Weight:
    """A parameter: held from the beginning, and its gradient from the backward pass to the next step."""

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
    was = x.width
    return tape.made(tape.new(x.count, width), [x], lambda grads: [_cast_back(tape, grads, was)])


def _cast_back(tape: Tape, grads: list[Tensor], width: int) -> Tensor:
    gradient = grads.pop()
    return gradient if gradient.width == width else tape.new(gradient.count, width)


def clone(tape: Tape, x: Tensor) -> Tensor:
    return tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])


def scale(tape: Tape, x: Tensor) -> Tensor:
    """By a number."""

    def back(grads: list[Tensor]) -> list[Tensor]:
        return [tape.ahead.pop() if tape.ahead else tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def negate(tape: Tape, x: Tensor) -> Tensor:
    return scale(tape, x)


def turned(tape: Tape, x: Tensor) -> Tensor:
    """A view whose gradient comes in another order and must be copied."""
    view = Tensor(x.storage, x.count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(grads[0].count, grads[0].width)])


def part_of(tape: Tape, x: Tensor, count: int) -> Tensor:
    """A slice: its gradient is as large as the whole."""
    whole, view = x.count, Tensor(x.storage, count, x.width)
    return tape.made(view, [x], lambda grads: [tape.new(whole, grads[0].width)])


def halves(tape: Tape, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two halves of one split: the gradients are put together again."""
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
        return [_cast_back(tape, [gradient], width) if wanted else None for width, wanted in both]

    return tape.made(result, [a, b], back)


def multiply(tape: Tape, a: Tensor, b: Tensor) -> Tensor:
    """Each factor is kept for the other's gradient, which is summed where the factor was spread."""
    result = tape.new(max(a.count, b.count), max(a.width, b.width))
    kept = (a.storage if b.edge else None, b.storage if a.edge else None)
    needed = ((a.count, a.width, a.edge is not None), (b.count, b.width, b.edge is not None))

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor | None]:
        raw = [tape.new(grads[0].count, grads[0].width) if wanted else None for *_, wanted in needed]
        grads.pop()
        for place, (count, width, _wanted) in enumerate(needed):
            one = raw[place]
            if one is not None and one.count != count:
                raw[place] = one = tape.new(count, one.width)
            if one is not None and one.width != width:
                raw[place] = tape.new(count, width)
            del one
        return raw

    return tape.made(result, [a, b], back)


def activate(tape: Tape, x: Tensor) -> Tensor:
    """SiLU or GELU: the input is kept."""
    kept = x.storage

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        return [tape.new(grads[0].count, grads[0].width)]

    return tape.made(tape.new(x.count, x.width), [x], back)


def mean_square(tape: Tape, x: Tensor, places: int) -> Tensor:
    """x.pow(2).mean(-1): backward holds four tensors as large as x at once."""
    kept = x.storage
    squares = tape.new(x.count, x.width)
    result = tape.new(places, x.width)
    del squares
    count, width = x.count, x.width

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        grads.clear()
        spread = tape.new(count, width)
        power, doubled = tape.new(count, width), tape.new(count, width)
        made = tape.new(count, width)
        del spread, power, doubled
        return [made]

    return tape.made(result, [x], back)


def inverse_root(tape: Tape, x: Tensor) -> Tensor:
    shifted = tape.made(tape.new(x.count, x.width), [x], lambda grads: [grads.pop()])
    result = tape.new(shifted.count, shifted.width)
    kept = result.storage

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor]:
        temporary = [tape.new(grads[0].count, grads[0].width) for _ in range(2)]
        made = tape.new(grads[0].count, grads[0].width)
        temporary.clear()
        return [made]

    return tape.made(result, [shifted], back)


def linear(
    tape: Tape, x: Tensor, weight: Tensor, *, outputs: int, bias: Tensor | None = None, last: bool = False
) -> Tensor:
    """A product with a weight: the input is kept where the weight is trained, the weight where the input is.

    `last`: nothing behind it is kept, so that running a layer again ends here.
    """
    inputs = weight.count // outputs
    places = x.count // inputs
    tape.muted |= last
    result = tape.new(places * outputs, x.width)
    tape.multiply_matrices()
    kept = (x.storage if weight.edge else None, weight.storage if x.edge else None)
    needed = x.edge is not None, weight.edge is not None, bias is not None and bias.edge is not None
    size = weight.count

    def back(grads: list[Tensor], _: object = kept) -> list[Tensor | None]:
        width = grads[0].width
        of_bias = tape.new(outputs, width) if needed[2] else None
        of_weight = tape.new(size, width).seen_otherwise() if needed[1] else None
        if needed[1]:
            tape.multiply_matrices()
        of_input = tape.new(places * inputs, width).seen_otherwise() if needed[0] else None
        tape.multiply_matrices()
        return [of_input, of_weight, of_bias]

    return tape.made(result, [x, weight, *([bias] if bias else [])], back)


def embed(tape: Tape, weight: Tensor, *, places: int, hidden: int) -> Tensor:
    size = weight.count
    result = tape.new(places * hidden, weight.width)

    def back(grads: list[Tensor]) -> list[Tensor]:
        made = tape.new(size, grads[0].width)
        tape.stream.use_together([places * 8] * 2)
        return [made]

    return tape.made(result, [weight], back)
