"""Follows every storage from the operation that makes it to the moment that nothing holds it.

In: operations on the `meta` device, forward and backward. Out: a Stream. What a kernel takes inside one
operation is not seen there and is added by shape; see `kernels`.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graftwork.model.trace.kernels import bytes_before, hidden_bytes, is_product
from graftwork.model.trace.sizes import CUBLAS_WORKSPACE
from graftwork.model.trace.stream import AllocationStream

HELD_ONCE = 2
"""The tensor itself, and the look at its storage."""


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, what comes and goes is written to the stream under the part that it is for."""

    def __init__(self, stream: AllocationStream, *, vocabulary: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream
        self.thread = "forward"
        """Backward runs in a thread of its own, whose first product takes a workspace of its own."""
        self._workspaces: set[str] = set()
        self._logits = vocabulary * tokens
        self._known: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.add.Tensor and _adds_in_place(args):
            return args[0].add_(args[1])
        before = [self.stream.take(size, "workspace") for size in bytes_before(func, args)]
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                self.add(tensor)
        if sizes := hidden_bytes(func, args):
            self.stream.use_together(sizes)
        for number in reversed(before):
            self.stream.give_back(number)
        if is_product(func) and self.thread not in self._workspaces:
            self._workspaces.add(self.thread)
            self.stream.take(CUBLAS_WORKSPACE, "workspace")
        return result

    def add(self, tensor: torch.Tensor, *, part: str | None = None) -> None:
        """Note the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        if id(storage) in self._known:
            return
        size = storage.nbytes()
        if size == 0:
            return
        if part is None:
            part = "activations" if torch.is_grad_enabled() else "workspace"
            if tensor.numel() == self._logits:
                part = "logits"
        number = self.stream.take(size, part)
        self._known[id(storage)] = (number, weakref.ref(storage, self._forget(id(storage), number)))

    def rename(self, tensor: torch.Tensor, part: str) -> None:
        known = self._known.get(id(tensor.untyped_storage()))
        if known:
            self.stream.parts[known[0]] = part

    def _forget(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.stream.give_back(number)

        return gone


def _adds_in_place(args: tuple[Any, ...]) -> bool:
    """Whether backward adds to a gradient that nobody else holds: a mode keeps it from seeing that."""
    if torch.is_grad_enabled() or not all(isinstance(one, torch.Tensor) for one in args[:2]):
        return False
    first, second = args[:2]
    same = first.shape == second.shape and first.dtype == second.dtype
    storage = first.untyped_storage()
    dense = storage.nbytes() == first.numel() * first.element_size()
    return bool(same and dense and torch._C._storage_Use_Count(storage._cdata) == HELD_ONCE)
