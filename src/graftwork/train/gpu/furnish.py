"""A model moved onto a card, block by block, its frozen weights in the form that the plan chose.

In: a transformers model in host memory. Out: the same model, whole to whoever uses it as such, and the
frozen weights side by side as the fast decoder wants them: layers hold views of them, so that nothing
is there twice. The card never holds more than one block in another form than the last.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from graftwork.model.nf4 import LEVELS, Nf4Linear, can_quantize, quantize_linear
from graftwork.records.plan import Tuning
from graftwork.train.gpu.eight_linear import EightBitLinear
from graftwork.train.gpu.frozen import (
    EightBitWeight,
    FourBitWeight,
    FrozenWeight,
    Nf4Part,
    WholeWeight,
    quantize_eight,
)

LINEAR_GROUPS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class FrozenWeights:
    """The frozen weights of each block by group, and the head."""

    blocks: tuple[dict[str, FrozenWeight], ...]
    head: FrozenWeight


def load_quantized(model: Any, tuning: Tuning, *, device: str) -> FrozenWeights:
    """Move the model; what is frozen in its blocks and its head changes form on the way."""
    blocks = []
    for layer in model.model.layers:
        blocks.append({name: _group(layer, paths, tuning, device) for name, paths in LINEAR_GROUPS.items()})
    embedding = model.model.embed_tokens
    tied = model.lm_head.weight is embedding.weight
    head: FrozenWeight
    if tuning.head == "eight":
        head = quantize_eight(model.lm_head.weight.detach().to(device), None, turned=tuning.turned)
        model.lm_head = EightBitLinear(head, begin=0, rows=head.codes.shape[0], dtype=model.dtype)
    if tuning.host_embedding:
        if tied and tuning.head == "whole":
            model.lm_head.weight = nn.Parameter(embedding.weight.detach().to(device), requires_grad=False)
        model.model.embed_tokens = HostEmbedding(embedding.weight.detach().cpu(), device=device)
    model.to(device)
    if tuning.head == "whole":
        head = WholeWeight(model.lm_head.weight.detach(), None)
    _LOADED[model] = FrozenWeights(tuple(blocks), head)
    return _LOADED[model]


_LOADED: "WeakKeyDictionary[Any, Furnished]" = WeakKeyDictionary()


def frozen_weights_of(model: Any) -> FrozenWeights:
    """What `furnish` made of this model, which may have been for an earlier run."""
    return _LOADED[model]


class HostEmbedding(nn.Module):
    """The table stays in host memory; the rows of a batch travel."""

    def __init__(self, table: Tensor, *, device: str) -> None:
        super().__init__()
        # Kept out of parameters and buffers: whoever moves the model must not move it.
        self._table = [table]
        self._device = device

    @property
    def weight(self) -> Tensor:
        return self._table[0]

    def forward(self, tokens: Tensor) -> Tensor:
        rows = nn.functional.embedding(tokens.to(self.weight.device), self.weight)
        return rows.to(self._device, non_blocking=True)


def _group(layer: Any, paths: tuple[str, ...], tuning: Tuning, device: str) -> FrozenWeight:
    linears = [layer.get_submodule(path) for path in paths]
    if tuning.form == "four" and all(can_be_four(linear) for linear in linears):
        return _four(layer, paths, linears, device)
    weight = torch.cat([linear.weight.detach() for linear in linears]).to(device)
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases]).to(device)
    if tuning.form == "eight":
        return _eight(layer, paths, linears, quantize_eight(weight, bias, turned=tuning.turned))
    begin = 0
    for linear in linears:
        rows = slice(begin, begin + linear.out_features)
        linear.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[rows], requires_grad=False)
        begin += linear.out_features
    return WholeWeight(weight, bias)


def can_be_four(linear: Any) -> bool:
    return isinstance(linear, Nf4Linear) or can_quantize(linear.weight)


def _four(layer: Any, paths: tuple[str, ...], linears: list[Any], device: str) -> FourBitWeight:
    parts: list[Nf4Part] = []
    biases: list[Tensor] = []
    for path, linear in zip(paths, linears, strict=True):
        four = linear if isinstance(linear, Nf4Linear) else quantize_linear(linear, device=device)
        _replace(layer, path, four)
        parts.append(Nf4Part(four.codes, four.scale_codes, four.chunk_scales, four.offset))
        biases += [] if four.bias is None else [four.bias.detach()]
    bias = torch.cat(biases) if biases else None
    return FourBitWeight(tuple(parts), torch.tensor(LEVELS, device=device), bias)


def _eight(layer: Any, paths: tuple[str, ...], linears: list[Any], shared: EightBitWeight) -> EightBitWeight:
    begin = 0
    for path, linear in zip(paths, linears, strict=True):
        rows = linear.out_features
        _replace(layer, path, EightBitLinear(shared, begin=begin, rows=rows, dtype=linear.weight.dtype))
        begin += rows
    return shared


def _replace(layer: Any, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(layer.get_submodule(parent), leaf, module)
