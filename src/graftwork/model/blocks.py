"""What graft's own passes read from a loaded decoder (layout, attention, activation, positions) and share.

Input: a transformers model of a family with a BlockLayout. Output: facts by block, and attention as CPUs do
it fastest. Knows no training step.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from graftwork.model.families import BlockLayout, family_or_llama

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu"]


class AttentionRule(NamedTuple):
    """Defaults: the scale is one over the root of the width, no window, no cap."""

    scale: float | None = None
    window: int | None = None
    """Tokens that a token attends to, itself included."""
    cap: float | None = None


def layout_of(model: Any) -> BlockLayout:
    layout = family_or_llama(model.config.model_type).block
    assert layout is not None, model.config.model_type
    return layout


def head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def norm_epsilon(config: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
    return float(next(getattr(config, name) for name in names if hasattr(config, name)))


def attention_rule(layer: Any) -> AttentionRule:
    """Return the attention rule of a block. Families keep the window in the attention or in the config."""
    attention = layer.self_attn
    config = attention.config
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        is_sliding = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if is_sliding else None
    return AttentionRule(
        scale=None if attention.scaling == attention.head_dim**-0.5 else float(attention.scaling),
        window=window,
        cap=getattr(attention, "attn_logit_softcapping", None),
    )


def activate(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return silu(x)
    return gelu(x, approximate="tanh" if activation == "gelu_pytorch_tanh" else "none")


def find_activation(layer: Any) -> Activation:
    """Find the activation by its behavior: families name it differently."""
    mlp = layer.mlp
    activation = next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name))
    probe = torch.linspace(-4, 4, 64)
    names: tuple[Activation, ...] = get_args(Activation)
    return next(name for name in names if torch.allclose(activate(probe, name), activation(probe), atol=1e-6))


PACKED_FOR = 64
"""Number of tokens that oneDNN's layout of a weight is optimized for; measured, it is as good at 30 as at
1,000.
"""


@cache
def has_onednn_products() -> bool:
    """Return whether this build of torch supports packed weights: tried on a small product."""
    try:
        weight, x = torch.ones(4, 3), torch.ones(2, 3)
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        y = torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, torch.full((2, 4), 3.0))


SMALL_MASK = 2**16
"""Size of a mask that is cached for the next layer; larger ones are cheaper to recreate than to keep."""


def look_back(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of the last tokens [tokens, heads, width] to the cache [groups, columns, width]. Heads that
    share keys are processed together, so that keys and values need not be copied for each.
    """
    tokens, heads, width = query.shape
    groups, columns, _ = keys.shape
    together = (
        query.view(tokens, groups, heads // groups, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
    )
    make_mask = _causal_mask if tokens * columns <= SMALL_MASK else _causal_mask.__wrapped__
    window = None if rule.window is None or rule.window >= columns else rule.window
    mask = make_mask(tokens, columns, heads // groups, query.dtype, window)
    if rule.cap is None:
        mixed = scaled_dot_product_attention(
            together[None], keys[None], values[None], attn_mask=mask, scale=rule.scale
        )[0]
    else:
        scale = width**-0.5 if rule.scale is None else rule.scale
        scores = torch.tanh(together @ keys.transpose(1, 2) * (scale / rule.cap)) * rule.cap
        mixed = torch.softmax(scores + mask[0], dim=-1) @ values
    return mixed.view(groups, -1, tokens, width).permute(2, 0, 1, 3).reshape(tokens, heads, width)


@lru_cache(maxsize=128)
def _causal_mask(tokens: int, columns: int, times: int, dtype: torch.dtype, window: int | None) -> Tensor:
    """0 if a query may attend, -inf if not; the queries are the last of the tokens."""
    # What is kept from a generation is used in training too.
    with torch.inference_mode(False):
        forbidden = torch.full((tokens, columns), float("-inf"), dtype=dtype).triu(columns - tokens + 1)
        if window is not None:
            outside = torch.full((tokens, columns), float("-inf"), dtype=dtype)
            forbidden += outside.tril(columns - tokens - window)
        return forbidden.repeat(times, 1)[None, None]


GPU_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The first one takes a mask; others would be preferred to it, but take none or plan for each shape."""


def attend_to_slots(
    query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, *, on_gpu: bool, scale: float | None = None
) -> Tensor:
    """[rows, heads, width] against [rows, groups, columns, width]: the heads of a group are treated as tokens
    of one head, so that its keys are read once. `bias` is [rows, columns].
    """
    rows, heads, width = query.shape
    grouped = query.view(rows, keys.shape[1], -1, width)
    mask = bias[:, None, None]
    if not on_gpu:
        mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    else:
        mask = mask.expand(*grouped.shape[:3], mask.shape[-1])
        with sdpa_kernel(GPU_BACKENDS):
            mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return mixed.reshape(rows, heads, width)


def pairs_to_halves(x: Tensor) -> Tensor:
    """Move neighboring values that are rotated together half a head apart. Scores stay the same."""
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [tokens, heads, width]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


class RotaryPositions:
    """Cosines and sines for each kind of block: one for all, one for each type of attention, or none."""

    NONE = "none"

    def __init__(self, decoder: Any, *, interleaved: bool) -> None:
        self._rotary, self._interleaved = decoder.rotary_emb, interleaved
        self._kinds: list[str] = list(dict.fromkeys(self._name(layer) for layer in decoder.layers))

    def kind(self, layer: Any) -> int:
        """Index of a block's pair in the result of `of`."""
        return self._kinds.index(self._name(layer))

    def of(self, x: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """[tokens, width] each, of hidden states [tokens, hidden]."""
        pairs = []
        for name in self._kinds:
            layer_types = (name,) if name not in ("", self.NONE) else ()
            cos, sin = (turn[0] for turn in self._rotary(x[None], positions[None], *layer_types))
            if self._interleaved:
                cos, sin = (torch.cat((pair[:, ::2], pair[:, ::2]), dim=1) for pair in (cos, sin))
            # Without rotary positions: turned by nothing.
            turned = (torch.ones_like(cos), torch.zeros_like(sin)) if name == self.NONE else (cos, sin)
            pairs.append(turned)
        return pairs

    def _name(self, layer: Any) -> str:
        attention = layer.self_attn
        rotates = getattr(attention, "use_rope", True)
        if attention.config.model_type == "cohere2":
            rotates = attention.sliding_window is not None
        if not rotates:
            return self.NONE
        if not isinstance(getattr(self._rotary, "rope_type", None), dict):
            return ""
        names = ("layer_type", "attention_type")
        return str(next(getattr(attention, name) for name in names if hasattr(attention, name)))
