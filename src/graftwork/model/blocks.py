"""What graft's own training steps read from a loaded decoder: layout, attention, activation, positions.

In: a transformers model of a family with a BlockLayout. Out: facts by block. Knows no training step.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from graftwork.model.families.family import BlockLayout
from graftwork.model.families.registry import family_or_llama

Activation = Literal["silu", "gelu_pytorch_tanh", "gelu"]


class AttentionRule(NamedTuple):
    """None: the scale is one over the root of the width, there is no window, no cap."""

    scale: float | None = None
    window: int | None = None
    """Tokens that a token sees, itself included."""
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
    """How a block's attention scores. Families keep the window in the attention or in the config."""
    attention = layer.self_attn
    config = attention.config
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    else:
        chosen = getattr(config, "use_sliding_window", True)
        window = getattr(config, "sliding_window", None) if chosen else None
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
    """By what the block's own function does: families name it in different ways."""
    mlp = layer.mlp
    own = next(getattr(mlp, name) for name in ("act_fn", "activation_fn", "act") if hasattr(mlp, name))
    probe = torch.linspace(-4, 4, 64)
    names: tuple[Activation, ...] = get_args(Activation)
    return next(name for name in names if torch.allclose(activate(probe, name), own(probe), atol=1e-6))


def pairs_to_halves(x: Tensor) -> Tensor:
    """Neighbouring values that are turned together, moved half a head apart. Scores do not change by it."""
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
        """The place of a block's pair in what `of` gives."""
        return self._kinds.index(self._name(layer))

    def of(self, x: Tensor, positions: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        """[tokens, width] each, of hidden states [tokens, hidden]."""
        return [self._pair(name, x, positions) for name in self._kinds]

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

    def _pair(self, name: str, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        more = (name,) if name not in ("", self.NONE) else ()
        cos, sin = self._rotary(x[None], positions[None], *more)
        cos, sin = cos[0], sin[0]
        if self._interleaved:
            cos, sin = (torch.cat((pair[:, ::2], pair[:, ::2]), dim=1) for pair in (cos, sin))
        if name == self.NONE:
            # Turned by nothing.
            return torch.ones_like(cos), torch.zeros_like(sin)
        return cos, sin
