"""A model moved onto a GPU, block by block, its frozen weights in the form that the plan chose.

Input: a transformers model in host memory. Output: the same model, intact for other code, and the frozen
weights side by side as the fast decoder wants them: layers hold views of them, so that nothing is there
twice. The GPU never holds more than one block that is not yet converted.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from graftwork.model.adapters.lora import LoraLinear
from graftwork.model.blocks import (
    RotaryPositions,
    attention_rule,
    find_activation,
    head_width,
    layout_of,
    norm_epsilon,
)
from graftwork.model.families import BlockLayout
from graftwork.model.nf4 import LEVELS, Nf4Linear, Nf4Weight, can_quantize, quantize_linear
from graftwork.model.parts import logits_ending
from graftwork.records.plan import Tuning
from graftwork.train.gpu.block import BlockShape, BlockWeights
from graftwork.train.gpu.decoder import EmbeddingAndHead, GpuDecoder
from graftwork.train.gpu.fused import NormWeights
from graftwork.train.gpu.linear import (
    EightBitLinear,
    FourBitWeight,
    FrozenWeight,
    LoraGroup,
    WholeWeight,
    quantize_eight,
)
from graftwork.train.host_memory import host_buffer

FrozenWeights = tuple[list[dict[str, FrozenWeight]], FrozenWeight]
"""The frozen weights of each block by product, and the head."""


def load_quantized(model: Any, tuning: Tuning, *, device: str) -> FrozenWeights:
    """Move the model; its frozen weights are converted on the way."""
    blocks = []
    groups = linear_groups(layout_of(model))
    for layer in model.model.layers:
        blocks.append({name: _group(layer, paths, tuning, device) for name, paths in groups.items()})
    embedding = model.model.embed_tokens
    tied = model.lm_head.weight is embedding.weight
    head: FrozenWeight
    if tuning.head == "eight":
        head = quantize_eight([model.lm_head.weight], None, turned=tuning.turned, device=device)
        model.lm_head = EightBitLinear(head, start=0, rows=head.codes.shape[0], dtype=model.dtype)
    if tuning.host_embedding:
        if tied and tuning.head == "whole":
            model.lm_head.weight = nn.Parameter(embedding.weight.detach().to(device), requires_grad=False)
        model.model.embed_tokens = HostEmbedding(
            embedding.weight.detach().cpu(),
            device=device,
            scale=getattr(embedding, "scalar_embed_scale", 1.0),
        )
    model.to(device)
    if tuning.head == "whole":
        head = WholeWeight(model.lm_head.weight.detach(), None)
    _LOADED[model] = blocks, head
    return _LOADED[model]


_LOADED: "WeakKeyDictionary[Any, FrozenWeights]" = WeakKeyDictionary()


def frozen_weights_of(model: Any) -> FrozenWeights:
    """The quantized weights of this model, which may come from an earlier run."""
    return _LOADED[model]


class HostEmbedding(nn.Module):
    """The embedding stays in host memory; the rows of a batch are transferred. A GPU reads them there
    directly.
    """

    def __init__(self, table: Tensor, *, device: str, scale: float = 1.0) -> None:
        super().__init__()
        # Kept out of parameters and buffers: moving the model must not move it.
        if device.startswith("cuda"):
            buffer = host_buffer(table.numel(), table.dtype, pinned=True)
            table = buffer.view(table.shape).copy_(table)
        self._table = [table]
        self._pinned = device.startswith("cuda") and self.weight.is_pinned()
        self._scale = torch.tensor(scale, dtype=table.dtype)
        self._device = device

    @property
    def weight(self) -> Tensor:
        return self._table[0]

    def forward(self, tokens: Tensor) -> Tensor:
        if self._pinned and tokens.is_cuda:
            from graftwork.train.gpu.kernels import gather_rows

            rows = gather_rows(self.weight, tokens)
        else:
            rows = nn.functional.embedding(tokens.to(self.weight.device), self.weight)
        rows = rows if self._scale == 1 else rows * self._scale
        return rows.to(self._device, non_blocking=True)


def _group(layer: Any, paths: tuple[str, ...], tuning: Tuning, device: str) -> FrozenWeight:
    linears = [layer.get_submodule(path) for path in paths]
    if tuning.form == "four" and all(
        isinstance(linear, Nf4Linear) or can_quantize(linear.weight) for linear in linears
    ):
        parts: list[Nf4Weight] = []
        four_biases: list[Tensor] = []
        for path, linear in zip(paths, linears, strict=True):
            four = linear if isinstance(linear, Nf4Linear) else quantize_linear(linear, device=device)
            _replace(layer, path, four)
            parts.append(four.quantized)
            four_biases += [] if four.bias is None else [four.bias.detach()]
        joined = torch.cat(four_biases) if four_biases else None
        return FourBitWeight(tuple(parts), torch.tensor(LEVELS, device=device), joined)
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([b.detach() for b in biases]).to(device)
    weights, start = [linear.weight.detach() for linear in linears], 0
    if tuning.form == "eight":
        shared = quantize_eight(weights, bias, turned=tuning.turned, device=device)
        for path, linear in zip(paths, linears, strict=True):
            height, dtype = linear.out_features, linear.weight.dtype
            _replace(layer, path, EightBitLinear(shared, start=start, rows=height, dtype=dtype))
            start += height
        return shared
    weight = torch.cat([part.to(device) for part in weights])
    for linear in linears:
        rows = slice(start, start + linear.out_features)
        linear.weight = nn.Parameter(weight[rows], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[rows], requires_grad=False)
        start += linear.out_features
    return WholeWeight(weight, bias)


def _replace(layer: Any, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(layer.get_submodule(parent), leaf, module)


def build_decoder(model: Any, frozen: FrozenWeights, tuning: Tuning, *, compiled: bool) -> GpuDecoder:
    inner, layout = model.model, layout_of(model)
    frozen_blocks, head = frozen
    final_norm = _norm_weights(inner.norm, layout)
    assert final_norm is not None
    positions = RotaryPositions(inner, interleaved=layout.interleaved)
    multiplier = getattr(inner, "embedding_multiplier", 1.0)
    embed: Callable[[Tensor], Tensor] = inner.embed_tokens
    outside = EmbeddingAndHead(
        embed=embed if multiplier == 1 else lambda tokens: embed(tokens) * multiplier,
        rotary=positions.of,
        final_norm=final_norm,
        head=head,
        # Not the type of the model, which is that of its first parameter: of an adapter, where
        # all weights before it are in 8 bits.
        dtype=inner.norm.weight.dtype,
        ending=logits_ending(model.config),
    )
    shapes = [_block_shape(model.config, layer, layout, positions.kind(layer)) for layer in inner.layers]
    blocks = [_block(layer, layout, part) for layer, part in zip(inner.layers, frozen_blocks, strict=True)]
    return GpuDecoder(blocks, outside, shapes, tuning, compiled=compiled)


def _block_shape(config: Any, layer: Any, layout: BlockLayout, turn: int) -> BlockShape:
    return BlockShape(
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_width=head_width(config),
        epsilon=norm_epsilon(config),
        activation=find_activation(layer),
        gated=layout.gated,
        parallel=layout.parallel,
        interleaved=layout.interleaved,
        residual=getattr(layer, "residual_multiplier", 1.0),
        attention=attention_rule(layer),
        turn=turn,
    )


def linear_groups(layout: BlockLayout) -> dict[str, tuple[str, ...]]:
    """The paths of the layers that read the same input, by product."""
    return {"qkv": layout.qkv, "out": (layout.out,), "gate_up": layout.gate_up, "down": (layout.down,)}


def _block(layer: Any, layout: BlockLayout, frozen: dict[str, Any]) -> BlockWeights:
    grafts = {
        name: _lora_group([layer.get_submodule(path) for path in paths])
        for name, paths in linear_groups(layout).items()
    }
    attention = layer.self_attn

    def norm(path: str | None) -> NormWeights | None:
        return None if path is None else _norm_weights(layer.get_submodule(path), layout)

    return BlockWeights(
        before_attention=norm(layout.before_attention),
        before_mlp=norm(layout.before_mlp),
        after_attention=norm(layout.after_attention),
        after_mlp=norm(layout.after_mlp),
        query_norm=_norm_weights(getattr(attention, "q_norm", None), layout),
        key_norm=_norm_weights(getattr(attention, "k_norm", None), layout),
        **frozen,
        qkv_graft=grafts["qkv"],
        out_graft=grafts["out"],
        gate_up_graft=grafts["gate_up"],
        down_graft=grafts["down"],
    )


def _norm_weights(norm: Any, layout: BlockLayout) -> NormWeights | None:
    if norm is None:
        return None
    weight: Tensor = norm.weight.detach()
    if layout.norm == "rms_plus_one":
        # In 16 bits the sum would lose most of what was stored.
        weight = 1 + weight.float()
    bias: Tensor | None = getattr(norm, "bias", None)
    return NormWeights(weight, None if bias is None else bias.detach(), centered=layout.norm == "layer")


def _lora_group(layers: list[Any]) -> LoraGroup:
    """The adapters of one product."""
    adapted = [
        (index, layer)
        for index, layer in enumerate(layers)
        if isinstance(layer, LoraLinear) and layer.active in layer.scales
    ]
    return LoraGroup(
        a=tuple(layer.lora_A[str(layer.active)] for _, layer in adapted),
        b=tuple(layer.lora_B[str(layer.active)] for _, layer in adapted),
        scales=tuple(layer.scales[str(layer.active)] for _, layer in adapted),
        outs=tuple(layer.out_features for layer in layers),
        places=tuple(index for index, _ in adapted),
    )
