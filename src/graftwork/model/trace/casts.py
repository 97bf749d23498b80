"""Autocast as it is on CUDA, for the `meta` device, which ignores it.

Casts the arguments of what PyTorch lists as low precision, as float32 and as widest, and remembers the
casts of trained weights until the context ends, as the original does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

LOW = frozenset(
    [
        "linear",
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "addbmm",
        "mv",
        "einsum",
        "conv1d",
        "chain_matmul",
        "scaled_dot_product_attention",
    ]
)
HIGH = frozenset(
    [
        "pow",
        "__pow__",
        "__rpow__",
        "rsqrt",
        "softmax",
        "log_softmax",
        "cross_entropy",
        "nll_loss",
        "layer_norm",
        "norm",
        "cumsum",
        "cumprod",
        "sum",
        "prod",
        "exp",
        "log",
        "log2",
        "log10",
        "log1p",
        "expm1",
        "reciprocal",
        "softplus",
        "gelu_backward",
        "mse_loss",
        "l1_loss",
        "cosh",
        "sinh",
        "tan",
        "acos",
        "asin",
        "dist",
        "renorm",
        "group_norm",
        "cosine_similarity",
    ]
)
WIDEST = frozenset(
    ["addcdiv", "addcmul", "bilinear", "cross", "dot", "vdot", "index_put", "stack", "cat", "tensordot"]
)


class CastMode(TorchFunctionMode):
    """Changes the types of arguments on their way in."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self._cached: dict[int, torch.Tensor] = {}
        self._inside = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._inside or not torch.is_autocast_enabled("cuda"):
            return func(*args, **kwargs)
        target = self._target(name, args)
        if target is None:
            return func(*args, **kwargs)
        self._inside = True
        try:
            args, kwargs = tree_map(lambda value: self._cast(value, target), (args, kwargs))
            return func(*args, **kwargs)
        finally:
            self._inside = False

    def _target(self, name: str, args: tuple[Any, ...]) -> torch.dtype | None:
        if name in LOW:
            return self.low
        if name in HIGH:
            return torch.float32
        if name in WIDEST:
            flat = args[0] if isinstance(args[0], (list, tuple)) else args
            kinds = {value.dtype for value in flat if isinstance(value, torch.Tensor)}
            return torch.float32 if len(kinds) > 1 and torch.float32 in kinds else None
        return None

    def _cast(self, value: Any, target: torch.dtype) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == target:
            return value
        if value.dtype == torch.float64:
            return value
        if not (
            target == self.low and value.dtype == torch.float32 and value.requires_grad and value.is_leaf
        ):
            return value.to(target)
        if id(value) not in self._cached:
            self._cached[id(value)] = value.to(target)
        return self._cached[id(value)]

    def forget(self) -> None:
        self._cached.clear()


@contextmanager
def cuda_autocast(mode: CastMode | None) -> Iterator[None]:
    """Within it, types change as under `torch.autocast("cuda")`; PEFT and bitsandbytes see it as on."""
    if mode is None:
        yield
        return
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", mode.low)
    try:
        with mode:
            yield
    finally:
        mode.forget()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
