"""One new token for each row on a processor, without the overhead of the modules around the products.

In: a model of a family with Llama's blocks, and the cache of its slots. Out: logits, as the model itself
gives them up to rounding. Linear layers are called as they are, so that adapters act.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from graftwork.model.blocks import AttentionRule, attention_rule, head_width, norm_epsilon
from graftwork.model.families.family import BlockLayout
from graftwork.model.families.registry import find_family
from graftwork.model.generate.cache import SlotCache


class _Block(NamedTuple):
    """The parts of one block, as modules: which weights and adapters act may change between passes."""

    q: Any
    k: Any
    v: Any
    out: Any
    gate: Any
    up: Any
    down: Any
    before_attention: Any
    before_mlp: Any
    q_norm: Any
    k_norm: Any


class LeanPass:
    """Made once for a model; call `run` for each token. All in float32."""

    def __init__(self, model: Any) -> None:
        decoder = model.model
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._norm, self._head = decoder.norm, _head_product(model.lm_head)
        self._epsilon = norm_epsilon(model.config)
        self._width = head_width(model.config)
        self._layers = decoder.layers

    @classmethod
    def of(cls, model: Any) -> "LeanPass | None":
        """None for other blocks than Llama's, other numbers than float32, and on a card."""
        family = find_family(getattr(model.config, "model_type", None))
        if family is None or family.block != BlockLayout() or not family.plain_logits:
            return None
        weight = next(model.parameters())
        layers = model.model.layers
        if weight.device.type != "cpu" or weight.dtype != torch.float32 or family.head_norms == "width":
            return None
        # SmolLM3 leaves the positions of some blocks out.
        plain = all(
            attention_rule(layer) == AttentionRule() and getattr(layer.self_attn, "use_rope", True)
            for layer in layers
        )
        return cls(model) if plain and _is_silu(layers[0].mlp.act_fn) else None

    def run(self, tokens: Tensor, positions: Tensor, cache: SlotCache, columns: int) -> Tensor:
        """Logits behind a token of each of the first slots. `tokens` and `positions` are [rows]."""
        x = self._embed(tokens)
        cos, sin = self._rotary(x[:, None], positions[:, None])
        seen = torch.arange(columns) <= positions[:, None]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[:, None, None]
        half = self._width // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            block = _take_apart(layer)
            normed = self._rms(x, block.before_attention)
            turned, value = self._project(block, normed, cos, sin)
            keys, values = cache.write_tokens(number, turned[:, -value.shape[1] :], value, positions, columns)
            query = turned[:, : -value.shape[1]].view(len(x), value.shape[1], -1, self._width)
            mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            x = x + block.out.forward(mixed.reshape(len(x), -1))
            normed = self._rms(x, block.before_mlp)
            x = x + block.down.forward(silu(block.gate.forward(normed)).mul_(block.up.forward(normed)))
        return self._head(self._rms(x, self._norm))

    def _project(self, block: _Block, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [rows, heads and groups, width], turned by their positions; values."""
        rows, width = len(x), self._width
        query = block.q.forward(x).view(rows, -1, width)
        key = block.k.forward(x).view(rows, -1, width)
        if block.q_norm is not None:
            query, key = self._rms(query, block.q_norm), self._rms(key, block.k_norm)
        both = torch.cat((query, key), dim=1)
        # sin has the sign of the halves that change places.
        turned = torch.addcmul(both * cos, both.roll(width // 2, dims=-1), sin)
        return turned, block.v.forward(x).view(rows, -1, width)

    def _rms(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, norm.weight.shape, norm.weight, self._epsilon)


def _head_product(head: Any) -> Callable[[Tensor], Tensor]:
    """With few rows and a vocabulary of columns, oneDNN takes two thirds of the usual time."""
    if type(head) is not nn.Linear or not _has_onednn():
        return head.forward  # type: ignore[no-any-return]
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, head.weight, head.bias, "none", [], "")


def _has_onednn() -> bool:
    """Whether this build of torch offers the product: tried on a small one."""
    try:
        y = torch.ops.mkldnn._linear_pointwise(torch.ones(2, 3), torch.ones(4, 3), None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, torch.full((2, 4), 3.0))


def _is_silu(activation: Any) -> bool:
    probe = torch.linspace(-4, 4, 64)
    return torch.allclose(activation(probe), silu(probe), atol=1e-6)


def _take_apart(layer: Any) -> _Block:
    attention, mlp = layer.self_attn, layer.mlp
    return _Block(
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        layer.input_layernorm,
        layer.post_attention_layernorm,
        getattr(attention, "q_norm", None),
        getattr(attention, "k_norm", None),
    )
