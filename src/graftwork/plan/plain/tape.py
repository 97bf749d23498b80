"""Tensors that are only sizes, and the backward pass over them. Pure.

A storage is written to the stream when it is made and when the last reference to it goes, as PyTorch frees
it; so the code that uses these must hold and drop its variables as transformers' own does. Knows nothing
of models.
"""

import heapq
import sys
from collections.abc import Callable, Sequence

from graftwork.model.trace.sizes import CUBLAS_WORKSPACE
from graftwork.model.trace.stream import AllocationStream

ONLY_THE_BUFFER = 2
"""References that `sys.getrefcount` sees where nobody else holds a storage: its tensor, and the call."""


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
        """It looks at another tensor, which it keeps alive: nothing can be added to it in place."""

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
        if self.learning and any(one.edge for one in inputs):
            result.edge = (Node([one.edge for one in inputs], back), 0)
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
        """Add to what is there: in place, where nobody else holds it."""
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
