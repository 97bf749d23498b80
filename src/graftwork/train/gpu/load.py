"""A model moved onto a card, block by block, its frozen weights in the form that the plan chose.

In: a transformers model in host memory. Out: the same model, intact for other code, and the
frozen weights side by side as the fast decoder wants them: layers hold views of them, so that nothing
is there twice. The card never holds more than one block in another form than the last.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from graftwork.model.adapters.lora import LoraLinear
from graftwork.model.nf4 import LEVELS, Nf4Linear, can_quantize, quantize_linear
from graftwork.records.plan import Tuning
from graftwork.train.gpu.block import BlockShape, BlockWeights
from graftwork.train.gpu.decoder import EmbeddingAndHead, GpuDecoder, KeepLevel, MemoryPolicy
from graftwork.train.gpu.lora import LoraGroup
from graftwork.train.gpu.quantized import (
    EightBitLinear,
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


_LOADED: "WeakKeyDictionary[Any, FrozenWeights]" = WeakKeyDictionary()


def frozen_weights_of(model: Any) -> FrozenWeights:
    """The quantized weights of this model, which may come from an earlier run."""
    return _LOADED[model]


class HostEmbedding(nn.Module):
    """The table stays in host memory; the rows of a batch travel."""

    def __init__(self, table: Tensor, *, device: str) -> None:
        super().__init__()
        # Kept out of parameters and buffers: moving the model must not move it.
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
    weight = torch.cat([linear.weight.detach().to(device) for linear in linears])
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


def build_decoder(model: Any, frozen: FrozenWeights, policy: MemoryPolicy) -> GpuDecoder:
    config, inner = model.config, model.model
    shape = BlockShape(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        epsilon=config.rms_norm_eps,
    )
    outside = EmbeddingAndHead(
        embed=inner.embed_tokens,
        rotary=lambda x, positions: _first(inner.rotary_emb(x[None], positions[None])),
        final_norm=inner.norm.weight,
        head=frozen.head,
    )
    blocks = [_block(layer, frozen) for layer, frozen in zip(inner.layers, frozen.blocks, strict=True)]
    return GpuDecoder(blocks, outside, shape, policy)


def memory_policy(tuning: Tuning, *, layers: int, compiled: bool) -> MemoryPolicy:
    """The levels of the blocks from the top down: keep, lean, again."""
    again = max(layers - tuning.keep - tuning.lean, 0)
    order: tuple[tuple[KeepLevel, int], ...] = (
        ("again", again),
        ("lean", tuning.lean),
        ("keep", tuning.keep),
    )
    levels = [level for level, count in order for _ in range(count)]
    return MemoryPolicy(
        levels=tuple(levels[-layers:]),
        chunk_tokens=tuning.chunk_tokens,
        head_tokens=tuning.head_tokens,
        compiled=compiled,
    )


def _first(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0][0], pair[1][0]


def _block(layer: Any, frozen: dict[str, Any]) -> BlockWeights:
    grafts = {
        name: _lora_group([layer.get_submodule(path) for path in paths])
        for name, paths in LINEAR_GROUPS.items()
    }
    attention = layer.self_attn
    return BlockWeights(
        **_norms(layer),
        query_norm=_weight(getattr(attention, "q_norm", None)),
        key_norm=_weight(getattr(attention, "k_norm", None)),
        **frozen,
        qkv_graft=grafts["qkv"],
        out_graft=grafts["out"],
        gate_up_graft=grafts["gate_up"],
        down_graft=grafts["down"],
    )


def _norms(layer: Any) -> dict[str, Any]:
    """Norms before attention and MLP, or behind them: one name of transformers means both."""
    behind = getattr(layer, "post_feedforward_layernorm", None)
    attention = layer.post_attention_layernorm
    return {
        "before_attention": _weight(getattr(layer, "input_layernorm", None)),
        "before_mlp": _weight(attention if behind is None else None),
        "after_attention": _weight(None if behind is None else attention),
        "after_mlp": _weight(behind),
    }


def _weight(norm: Any) -> Tensor | None:
    weight: Tensor | None = None if norm is None else norm.weight.detach()
    return weight


def _lora_group(layers: list[Any]) -> LoraGroup:
    """The adapters of one product."""
    adapted = [
        (place, layer)
        for place, layer in enumerate(layers)
        if isinstance(layer, LoraLinear) and layer.active in layer.scales
    ]
    return LoraGroup(
        a=tuple(layer.lora_A[str(layer.active)] for _, layer in adapted),
        b=tuple(layer.lora_B[str(layer.active)] for _, layer in adapted),
        scales=tuple(layer.scales[str(layer.active)] for _, layer in adapted),
        outs=tuple(layer.out_features for layer in layers),
        places=tuple(place for place, _ in adapted),
    )
