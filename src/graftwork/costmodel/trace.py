"""The peak memory of a training step of any decoder of transformers, without a GPU and without weights.

    python -m graftwork.costmodel.trace '{"config": {…}, "setup": {…}, "events": false}'

traces one setting in a process of its own, so that a crash of the libraries is not one of the command line;
it prints one JSON line. Input: the model's config and a PlainSetup. Output: a MemoryTrace of two steps: the
second one finds the optimizer's states. The decoder with its adapters is set up as transformers, PEFT and
bitsandbytes do it. Every storage on the `meta` device is followed from its creation to its release; what
kernels allocate inside one operation is added by shape, and autocast, which that device ignores, is applied
by a mode that casts arguments as CUDA's does. `reserved` is what was allocated, until the stream is replayed.
"""

import gc
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graftwork.costmodel.allocations import (
    CUBLAS_WORKSPACE,
    QUANTIZED_BLOCK,
    SCALES_BLOCK,
    AllocationStream,
    AttentionSizes,
    MemoryTrace,
    Weight,
    dequantized_sizes,
    flash_backward_sizes,
    keep_states,
    take_step,
    tile_places,
)
from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.records.plan import PlainSetup

STACKED = 3
"""Dimensions of a weight that holds the experts of a layer."""
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def build_model(
    config: dict[str, Any],
    setup: PlainSetup,
    *,
    device: str,
    attention: str,
    contexts: Contexts | None = None,
) -> nn.Module:
    """Build the model on `device`, in training mode. `contexts`: the contexts in which layers run and are
    recomputed.
    """
    import transformers

    kind = config["model_type"]
    stated = transformers.AutoConfig.for_model(
        kind, **{k: v for k, v in config.items() if k not in ("model_type", "_attn_implementation")}
    )
    stated._attn_implementation = attention
    with torch.device(device):
        auto: Any = transformers.AutoModelForCausalLM
        model: Any = auto.from_config(
            stated, dtype=getattr(torch, setup.dtype), attn_implementation=attention
        )
    model.train()
    if setup.method == "qlora":
        put_in_four_bits(model, setup, device=device)
    if setup.method == "full":
        train_upper_layers(model, setup.adapted_layers)
    else:
        model = add_adapters(model, setup)
    checkpoint_layers(model, setup.checkpointed, contexts=contexts)
    built: nn.Module = model
    return built


def find_layers(model: nn.Module) -> list[Any]:
    """The decoder's blocks, from the bottom."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def train_upper_layers(model: nn.Module, count: int) -> None:
    """Make all weights trainable, or only those of the upper layers."""
    layers = find_layers(model)
    if count >= len(layers):
        return
    model.requires_grad_(False)
    for layer in layers[len(layers) - count :]:
        layer.requires_grad_(True)


def add_adapters(model: Any, setup: PlainSetup) -> nn.Module:
    import peft

    layers = model.config.num_hidden_layers
    config = peft.LoraConfig(
        r=setup.rank,
        lora_alpha=2 * setup.rank,
        target_modules=list(setup.targets),
        layers_to_transform=list(range(layers - setup.adapted_layers, layers)),
        target_parameters=_stacked_parameters(model, setup) or None,
        use_dora=setup.method == "dora",
        task_type="CAUSAL_LM",
    )
    meta = next(model.parameters()).device.type == "meta"
    adapted: nn.Module = peft.get_peft_model(
        model, config, low_cpu_mem_usage=meta, autocast_adapter_dtype=False
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(getattr(torch, setup.adapter_dtype))
    return adapted


def _stacked_parameters(model: Any, setup: PlainSetup) -> list[str]:
    """The weights of experts in the adapted layers."""
    layers = model.config.num_hidden_layers
    layer_names = (
        {str(index) for index in range(layers - setup.adapted_layers, layers)} if setup.experts else set()
    )
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == STACKED and layer_names & set(name.split("."))
    ]


def checkpoint_layers(model: Any, count: int, *, contexts: Contexts | None = None) -> None:
    """Let the lower `count` layers save only their input."""
    if not count:
        return
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    options: dict[str, Any] = {"use_reentrant": False, **({"context_fn": contexts} if contexts else {})}
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for index, layer in enumerate(find_layers(model)):
        layer.gradient_checkpointing = index < count


def put_in_four_bits(model: Any, setup: PlainSetup, *, device: str) -> None:
    """Quantize every linear layer but the head to NF4, with scales in 8 bits; the rest in float32 if
    requested.
    """
    try:
        import bitsandbytes as bnb
    except ImportError as missing:
        raise EnvironmentFailure(
            "bitsandbytes is not installed",
            why="QLoRA is traced through its modules",
            fix="pip install bitsandbytes",
        ) from missing
    model.requires_grad_(False)
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child is not head:
                setattr(parent, name, _four_bits(bnb, child, setup, device=device))
    model.is_loaded_in_4bit = True
    model.is_quantized = True
    if setup.kbit_upcast:
        for parameter in model.parameters():
            if (
                parameter.dtype in (torch.bfloat16, torch.float16)
                and type(parameter).__name__ != "Params4bit"
            ):
                parameter.data = parameter.data.float()


def _four_bits(bnb: Any, linear: nn.Linear, setup: PlainSetup, *, device: str) -> nn.Module:
    kind = getattr(torch, setup.dtype)
    quantized: nn.Module = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=kind,
        quant_type="nf4",
        device="meta",
    )
    if device == "meta":
        quantized.weight = _empty_four_bits(bnb, linear, kind, module=quantized)
    else:
        weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", module=quantized
        )
        quantized.weight = weight.to(device)
    quantized.bias = linear.bias
    return quantized


def _empty_four_bits(bnb: Any, linear: nn.Linear, kind: torch.dtype, *, module: nn.Module) -> Any:
    """The tensors that quantizing leaves: codes, a byte of scale for 64, a scale of these for 256, small
    tables.
    """
    quant_state: Any = bnb.functional.QuantState

    count = linear.weight.numel()
    blocks = -(-count // QUANTIZED_BLOCK)

    def empty(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    second = quant_state(
        absmax=empty(-(-blocks // SCALES_BLOCK), torch.float32),
        code=empty(256, torch.float32),
        blocksize=SCALES_BLOCK,
        dtype=torch.float32,
    )
    state = quant_state(
        absmax=empty(blocks, torch.uint8),
        shape=linear.weight.shape,
        code=empty(16, torch.float32),
        blocksize=QUANTIZED_BLOCK,
        quant_type="nf4",
        dtype=kind,
        offset=torch.empty((), dtype=torch.float32, device="meta"),
        state2=second,
    )
    codes = empty((count + 1) // 2, torch.uint8).view(-1, 1)
    return bnb.nn.Params4bit(
        codes, requires_grad=False, quant_state=state, quant_type="nf4", module=module, bnb_quantized=True
    )


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
    """Casts arguments of operations."""

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
    """Within it, types change as under `torch.autocast("cuda")`; PEFT and bitsandbytes see it as enabled."""
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


ATTENTION = "graftwork_traced"


def register_attention() -> None:
    """Register the traced attention with transformers under its name."""
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
    """Causal flash attention, as `sdpa` runs it on a GPU without a mask."""
    if torch.is_autocast_enabled("cuda"):
        low = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(low), key.to(low), value.to(low)
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, True, return_debug_mask=False, scale=scaling
    )[0]
    return out.transpose(1, 2).contiguous(), None


def is_product(func: Callable[..., Any]) -> bool:
    """Return whether it is a cuBLAS call."""
    return getattr(func, "__name__", "").split(".")[0] in ("mm", "addmm", "bmm", "baddbmm", "gemm_4bit")


def bytes_before(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """Memory that an operation allocates before its results, and frees after them."""
    if getattr(func, "__name__", "").startswith("gemm_4bit"):
        return dequantized_sizes(math.prod(args[2]), args[0].element_size())
    return []


def hidden_bytes(func: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """Memory that an operation allocates and frees before it returns, besides its results."""
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
    """Head and loss fused, one tile of positions at a time; the gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, low: torch.dtype, trained: bool
    ) -> torch.Tensor:
        tokens, width = hidden.shape
        tile = tile_places(tokens, width, weight.shape[0])
        gradient = torch.empty_like(hidden)
        weight_gradient = torch.empty_like(weight) if trained else None
        losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
        same = hidden.dtype == weight.dtype == low
        shared = torch.empty(tile, weight.shape[0], dtype=low, device=hidden.device) if same else None
        for start in range(0, tokens, tile):
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
"""References of a live storage: the tensor itself, and the one that checks it."""


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, allocations and frees are written to the stream under their part."""

    def __init__(self, stream: AllocationStream, *, vocabulary: int, tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream
        self.thread = "forward"
        """Backward runs in its own thread, whose first product allocates a workspace."""
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
        """Record the storage of a tensor, unless it is known."""
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
        numbers = self._known.get(id(tensor.untyped_storage()))
        if numbers:
            self.stream.parts[numbers[0]] = part

    def _forget(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.stream.give_back(number)

        return gone


def _adds_in_place(args: tuple[Any, ...]) -> bool:
    """Return whether backward adds to a gradient without other references, which a dispatch mode hides from
    it.
    """
    if torch.is_grad_enabled() or not all(isinstance(argument, torch.Tensor) for argument in args[:2]):
        return False
    first, second = args[:2]
    same = first.shape == second.shape and first.dtype == second.dtype
    storage = first.untyped_storage()
    dense = storage.nbytes() == first.numel() * first.element_size()
    return bool(same and dense and torch._C._storage_Use_Count(storage._cdata) == HELD_ONCE)


STEPS = 2


def trace_run(config: dict[str, Any], setup: PlainSetup) -> MemoryTrace:
    """Return the memory trace of two steps."""
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
    has_adapter = hasattr(model, "peft_config")
    for parameter in model.parameters():
        follower.add(parameter, part="adapters" if parameter.requires_grad and has_adapter else "weights")
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            for part in (state.absmax, state.code, state.offset, state.state2.absmax):
                follower.add(part, part="weights")
    for buffer in model.buffers():
        follower.add(buffer, part="weights")


def _mark_layers(model: Any, stream: AllocationStream) -> None:
    """Let the stream know when backward enters the layers after the head and the loss."""

    def before_head(_: Any, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].requires_grad:
            given[0].register_hook(lambda _: stream.enter("layers"))  # type: ignore[no-untyped-call]

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.get_output_embeddings().register_forward_pre_hook(before_head)


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
    rows = hidden.view(-1, hidden.shape[-1])
    fused: torch.Tensor = head_and_loss.apply(rows, weight, kind, weight.requires_grad)
    return fused


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the requested trace."""
    trace = trace_run(question["config"], PlainSetup.model_validate(question["setup"]))
    line: dict[str, Any] = {"peak": trace.peak.model_dump(), "phases": trace.phases}
    if question.get("events"):
        line |= {"sizes": trace.sizes, "events": trace.events}
    return line


def main() -> int:
    """Print the answer, or the error."""
    try:
        line = answer(json.loads(sys.argv[1]))
    except GraftError as mistake:
        print(json.dumps(mistake.as_json()))
        return mistake.exit_code
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
