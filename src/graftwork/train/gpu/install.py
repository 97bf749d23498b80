"""From a furnished model with adapters to the decoder that trains them.

In: the model, its frozen weights side by side, how memory is spent. Out: a Decoder over the same
tensors. Knows the names that transformers gives the parts of a block, and nothing of steps.
"""

from typing import Any

from torch import Tensor

from graftwork.model.lora import LoraLinear
from graftwork.records.plan import Tuning
from graftwork.train.gpu.block import BlockShape, BlockWeights
from graftwork.train.gpu.decoder import EmbeddingAndHead, GpuDecoder, KeepLevel, MemoryPolicy
from graftwork.train.gpu.furnish import LINEAR_GROUPS, FrozenWeights
from graftwork.train.gpu.graft import LoraGroup


def build_decoder(model: Any, furnished: FrozenWeights, thrift: MemoryPolicy) -> GpuDecoder:
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
        head=furnished.head,
    )
    blocks = [_block(layer, frozen) for layer, frozen in zip(inner.layers, furnished.blocks, strict=True)]
    return GpuDecoder(blocks, outside, shape, thrift)


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
    """The adapters that act beside one product."""
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
