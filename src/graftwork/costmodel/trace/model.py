"""A decoder with its adapters as transformers, PEFT and bitsandbytes set it up, on any device; and autocast.

In: a config and a PlainSetup. Out: the model, ready for a step. On `meta` nothing is stored, and
autocast, which that device ignores, is applied by a mode that casts arguments as CUDA's does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from graftwork.costmodel.stream import QUANTISED_BLOCK, SCALES_BLOCK
from graftwork.records.errors import EnvironmentLacks
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
    """The model on `device`, in training mode. `contexts`: what layers run and run again within."""
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
    """All weights; or those of the upper layers alone, where not all are meant."""
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
    chosen = {str(at) for at in range(layers - setup.adapted_layers, layers)} if setup.experts else set()
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == STACKED and chosen & set(name.split("."))
    ]


def checkpoint_layers(model: Any, count: int, *, contexts: Contexts | None = None) -> None:
    """Let the lower `count` layers keep only their input."""
    if not count:
        return
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    how: dict[str, Any] = {"use_reentrant": False, **({"context_fn": contexts} if contexts else {})}
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    for place, layer in enumerate(find_layers(model)):
        layer.gradient_checkpointing = place < count


def put_in_four_bits(model: Any, setup: PlainSetup, *, device: str) -> None:
    """Every linear layer but the head in NF4, its scales in 8 bits; the rest in float32 where asked."""
    try:
        import bitsandbytes as bnb
    except ImportError as missing:
        raise EnvironmentLacks(
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
    made: nn.Module = bnb.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=kind,
        quant_type="nf4",
        device="meta",
    )
    if device == "meta":
        made.weight = _empty_four_bits(bnb, linear, kind, module=made)
    else:
        weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4", module=made)
        made.weight = weight.to(device)
    made.bias = linear.bias
    return made


def _empty_four_bits(bnb: Any, linear: nn.Linear, kind: torch.dtype, *, module: nn.Module) -> Any:
    """What quantising leaves: codes, a byte of scale for 64, a scale of these for 256, small tables."""
    quant_state: Any = bnb.functional.QuantState

    count = linear.weight.numel()
    blocks = -(-count // QUANTISED_BLOCK)

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
        blocksize=QUANTISED_BLOCK,
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
