"""The parts of any causal decoder of transformers: the decoder, its blocks, its head, their linear layers.

Input: a model. Output: its parts, found by what they are and not by what one family calls them; and a reader
that gives the model's logits for chosen hidden states only. Some families change the logits after their head
(a cap, a scale). Those that are known are followed; whether a model does what we think is tried once; and
what does something else is read by its own forward, whole. Knows no adapters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from graftwork.model.families import family_or_llama
from graftwork.model.shape import ROUTERS
from graftwork.records.errors import UserError

_TRIED: "WeakKeyDictionary[Any, bool]" = WeakKeyDictionary()


@dataclass(frozen=True)
class DecoderParts:
    """`blocks_path` is the name of `blocks` within the model."""

    decoder: Any
    head: Any
    blocks: nn.ModuleList
    blocks_path: str


@dataclass(frozen=True)
class LogitsReader:
    """`decoder(...)` gives `last_hidden_state`; `logits` makes logits of any rows of it."""

    decoder: Callable[..., Any]
    logits: Callable[[Tensor], Tensor]


def decoder_parts(model: Any) -> DecoderParts:
    """Return the parts; raises a clear error if the model is not a causal decoder."""
    decoder, head = _decoder_and_head(model)
    lists = [(path, part) for path, part in model.named_modules() if isinstance(part, nn.ModuleList)]
    inside = {id(part) for part in decoder.modules()}
    candidates = [(path, part) for path, part in lists if id(part) in inside and len(part)]
    if not candidates:
        raise _no_decoder(model, "it has no list of blocks")
    # Of lists within lists (experts of a block), the outer one comes first and wins a tie.
    path, blocks = max(candidates, key=lambda entry: len(entry[1]))
    outer = next((entry for entry in candidates if path.startswith(f"{entry[0]}.")), (path, blocks))
    return DecoderParts(decoder=decoder, head=head, blocks=outer[1], blocks_path=outer[0])


def block_linears(model: Any) -> Iterator[tuple[int, str, Any]]:
    """(block, path, layer) of each linear layer of the blocks, without routers. Does not look inside adapters
    and quantized weights that replaced a layer: any module with `in_features` counts as a linear layer.
    """
    parts = decoder_parts(model)
    for number, block in enumerate(parts.blocks):
        within: list[str] = []
        for path, module in block.named_modules():
            if any(path.startswith(f"{outer}.") for outer in within):
                continue
            # nn.Linear, its replacement, or the transposed layer of GPT-2.
            has_sizes = hasattr(module, "in_features") and hasattr(module, "out_features")
            if (has_sizes or is_transposed(module)) and path.rsplit(".", 1)[-1] not in ROUTERS:
                within.append(path)
                yield number, f"{parts.blocks_path}.{number}.{path}", module


def is_transposed(module: Any) -> bool:
    """GPT-2's Conv1D: a linear layer whose weight is stored as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def layer_sizes(module: Any) -> tuple[int, int]:
    """(inputs, outputs)."""
    if is_transposed(module):
        return int(module.weight.shape[0]), int(module.weight.shape[1])
    return int(module.in_features), int(module.out_features)


def logits_reader(model: Any) -> LogitsReader:
    """Return how to read hidden states and logits without building the logits of every token."""
    decoder, head = _decoder_and_head(model)
    ending = logits_ending(model.config)
    plain = family_or_llama(getattr(model.config, "model_type", None)).plain_logits and ending.plain
    if not plain:
        if model not in _TRIED:
            _TRIED[model] = head_is_followed(model)
        if not _TRIED[model]:
            return LogitsReader(decoder=_Whole(model), logits=lambda logits: logits)
    if ending.plain:
        return LogitsReader(decoder=decoder, logits=head)
    return LogitsReader(decoder=decoder, logits=lambda hidden: ending.of(head(hidden)))


class _Whole:
    """A model with an unknown transformation of logits: its own logits are used in place of hidden states."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = model.config

    def __call__(self, **arguments: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self._model(**arguments).logits)


@torch.no_grad()
def head_is_followed(model: Any) -> bool:
    """Return whether the model's own logits are what we compute from its hidden states. The head is made to
    return a ramp from -100 to 100 once: this shows what the model does after its head, whatever its weights
    are. The input of the head must be the decoder's last hidden state.
    """
    decoder, head = _decoder_and_head(model)
    ending = logits_ending(model.config)
    tokens = torch.tensor([[1, 2, 3]], device=next(model.parameters()).device)
    head_inputs: list[Tensor] = []
    ramps: list[Tensor] = []

    def replace_with_ramp(_module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        head_inputs.append(inputs[0])
        ramp = torch.linspace(-100, 100, output.shape[-1], device=output.device).to(output.dtype)
        ramps.append(ramp.expand_as(output))
        return ramps[-1]

    hook = head.register_forward_hook(replace_with_ramp)
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
        hidden = decoder(input_ids=tokens, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    if len(head_inputs) != 1 or head_inputs[0].shape != hidden.shape or logits.shape != ramps[0].shape:
        return False
    return _close(head_inputs[0], hidden) and _close(logits, ending.of(ramps[0]))


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=1e-2, atol=1e-2 * float(other.abs().max()))


def _decoder_and_head(model: Any) -> tuple[Any, Any]:
    decoder = getattr(model, "base_model", None)
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if get_head is not None else None
    if decoder is None or decoder is model:
        raise _no_decoder(model, "it has no decoder below its head")
    if head is None:
        raise _no_decoder(model, "it has no head that gives logits")
    return decoder, head


class LogitsEnding(NamedTuple):
    """What a family does to the logits after its head."""

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    @property
    def plain(self) -> bool:
        return self == LogitsEnding()

    def of(self, logits: Tensor) -> Tensor:
        if self.cap is not None:
            return torch.tanh(logits / self.cap) * self.cap
        return logits / self.divisor if self.divisor != 1 else logits * self.multiplier

    def apply_(self, logits: Tensor) -> Tensor:
        """The same in place."""
        if self.cap is not None:
            return logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits if self.plain else logits.mul_(self.multiplier / self.divisor)

    def backward_(self, d: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the head's output, in place; the logits are overwritten."""
        if self.cap is not None:
            return d.mul_(logits.div_(self.cap).square_().neg_().add_(1))
        return d if self.plain else d.mul_(self.multiplier / self.divisor)


def logits_ending(config: Any) -> LogitsEnding:
    """Return how a family transforms its logits, if it is known to."""
    kind = getattr(config, "model_type", "")
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        return LogitsEnding(cap=cap)
    if kind.startswith("granite"):
        return LogitsEnding(divisor=config.logits_scaling)
    if kind.startswith("cohere"):
        return LogitsEnding(multiplier=config.logit_scale)
    return LogitsEnding()


def _no_decoder(model: Any, why: str) -> UserError:
    return UserError(
        f"{type(model).__name__} is not a causal decoder",
        why=why,
        fix="use a model that transformers loads as AutoModelForCausalLM (Llama, Qwen, Mistral, …)",
    )
