"""The peak memory of a training step of any decoder of transformers, without a card and without weights.

In: the model's config and a PlainSetup. Out: a MemoryTrace of two steps: the second one finds the
optimizer's states. Follows every storage on the `meta` device from its creation to its release; what
kernels allocate inside one operation is added by shape. `reserved` is what was allocated, until the
stream is replayed.
"""

import gc
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graftwork.costmodel.stream import (
    CUBLAS_WORKSPACE,
    AllocationStream,
    AttentionSizes,
    MemoryTrace,
    Weight,
    dequantised_sizes,
    flash_backward_sizes,
    keep_states,
    take_step,
    tile_places,
)
from graftwork.costmodel.trace.model import CastMode, build_model, cuda_autocast
from graftwork.records.plan import PlainSetup

ATTENTION = "graftwork_traced"


def register_attention() -> None:
    """Let transformers find the traced attention by its name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, traced_attention)


def traced_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal flash attention, as `sdpa` runs it on a card where no mask is given."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(low), key.to(low), value.to(low)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, return_debug_mask=False, scale=scaling
    )[0]
    return out.transpose(1, 2).contiguous(), None


def is_product(func: Callable[..., Any]) -> bool:
    """Whether it goes to cuBLAS."""
    return getattr(func, "__name__", "").split(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "gemm_4bit")


def bytes_before(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """What an operation takes before its results, and gives back after them."""
    if getattr(func, "__name__", "").startswith("gemm_4bit"):
        return dequantised_sizes(math.prod(args[2]), args[0].element_size())
    return []


def hidden_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """What an operation takes and gives back before it returns, besides its results."""
    name = getattr(func, "__name__", "")
    if name.startswith("_scaled_dot_product_flash_attention_backward"):
        query, key = args[1], args[2]
        rows, heads, queries, width = query.shape
        return flash_backward_sizes(
            AttentionSizes(rows, queries, key.shape[2], heads, key.shape[1], width, query.element_size())
        )
    if name.startswith("embedding_dense_backward"):
        # The positions sorted by token, and where they came from.
        return [args[1].numel() * 8] * 2
    return []


class FusedLoss(torch.autograd.Function):
    """Head and loss in one, a tile of places at a time; the gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, low: torch.dtype, trained: bool
    ) -> torch.Tensor:
        places, width = hidden.shape
        tile = tile_places(places, width, weight.shape[0])
        gradient = torch.empty_like(hidden)
        weight_gradient = torch.empty_like(weight) if trained else None
        losses = torch.empty(places, dtype=torch.float32, device=hidden.device)
        same = hidden.dtype == weight.dtype == low
        shared = torch.empty(tile, weight.shape[0], dtype=low, device=hidden.device) if same else None
        for start in range(0, places, tile):
            part = hidden[start : start + tile]
            if shared is not None:
                # Where nothing is cast, all tiles share one buffer and write in place.
                logits = torch.mm(part, weight.t(), out=shared[: part.shape[0]])
                torch.mm(logits, weight, out=gradient[start : start + tile])
            else:
                logits = part.to(low) @ weight.to(low).t()
                gradient[start : start + tile] = logits @ weight.to(low)
            if weight_gradient is not None:
                weight_gradient += logits.t() @ part.to(low)
            del logits
        ctx.save_for_backward(gradient, weight_gradient)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        gradient, weight_gradient = ctx.saved_tensors
        return gradient, weight_gradient, None, None


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
    """Whether backward adds to a gradient without other references, which a dispatch mode hides from it."""
    if torch.is_grad_enabled() or not all(isinstance(argument, torch.Tensor) for argument in args[:2]):
        return False
    first, second = args[:2]
    same = first.shape == second.shape and first.dtype == second.dtype
    storage = first.untyped_storage()
    dense = storage.nbytes() == first.numel() * first.element_size()
    return bool(same and dense and torch._C._storage_Use_Count(storage._cdata) == HELD_ONCE)


STEPS = 2


def trace_run(config: dict[str, Any], setup: PlainSetup) -> MemoryTrace:
    """Two steps, as the memory sees them."""
    register_attention()
    attention = ATTENTION if setup.attention == "flash" else "sdpa"
    casts = CastMode(_low_type(setup)) if setup.autocast else None

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # A layer that runs again finds autocast left, and the mode suspended by the call to `backward`.
        return nullcontext(), cuda_autocast(casts)

    model: Any = build_model(config, setup, device="meta", attention=attention, contexts=contexts)
    stream = AllocationStream()
    stream.enter("setup")
    vocabulary = model.config.vocab_size
    follower = Follower(stream, vocabulary=vocabulary, tokens=setup.rows * setup.tokens)
    _hold_model(model, follower)
    _mark_layers(model, stream)
    trained = [p for p in model.parameters() if p.requires_grad]
    weights: list[Weight] = [(p.numel(), p.element_size()) for p in trained]
    ids = torch.empty(setup.rows, setup.tokens, dtype=torch.int64, device="meta")
    follower.add(ids, part="activations")
    gc.collect()
    gc.disable()
    try:
        for step in range(STEPS):
            _follow_passes(model, ids, setup, follower, casts)
            stream.enter("optimizer")
            if step == 0:
                keep_states(stream, weights, setup.optimizer)
            take_step(stream, weights, setup.optimizer)
            for parameter in trained:
                parameter.grad = None
    finally:
        gc.enable()
    return stream.finish()


def _hold_model(model: Any, follower: Follower) -> None:
    for parameter in model.parameters():
        follower.add(
            parameter, part="adapters" if parameter.requires_grad and _is_adapter(model) else "weights"
        )
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            for part in (state.absmax, state.code, state.offset, state.state2.absmax):
                follower.add(part, part="weights")
    for buffer in model.buffers():
        follower.add(buffer, part="weights")


def _mark_layers(model: Any, stream: AllocationStream) -> None:
    """Let the stream know when backward leaves the head and the loss and enters the layers."""

    def before_head(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].requires_grad:
            given[0].register_hook(lambda _: stream.enter("layers"))  # type: ignore[no-untyped-call]

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.get_output_embeddings().register_forward_pre_hook(before_head)


def _is_adapter(model: Any) -> bool:
    return hasattr(model, "peft_config")


def _low_type(setup: PlainSetup) -> torch.dtype:
    kind: torch.dtype = getattr(torch, setup.dtype if setup.dtype != "float32" else "bfloat16")
    return kind


def _follow_passes(
    model: Any, ids: torch.Tensor, setup: PlainSetup, follower: Follower, casts: CastMode | None
) -> None:
    """Forward, loss and backward of one micro-batch."""
    with follower:
        follower.stream.enter("forward")
        follower.thread = "forward"
        with cuda_autocast(casts):
            loss = _loss(model, ids, setup)
        follower.stream.enter("backward")
        follower.thread = "backward"
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            if parameter.grad is not None:
                follower.rename(parameter.grad, "gradients")
    del loss


def _loss(model: Any, ids: torch.Tensor, setup: PlainSetup) -> torch.Tensor:
    if setup.loss == "plain":
        loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(input_ids=ids, use_cache=False)[0]
    weight = inner.get_output_embeddings().weight
    kind = _low_type(setup) if setup.autocast else hidden.dtype
    head_and_loss: Any = FusedLoss
    places = hidden.view(-1, hidden.shape[-1])
    fused: torch.Tensor = head_and_loss.apply(places, weight, kind, weight.requires_grad)
    return fused
