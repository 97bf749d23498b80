"""One block of a known decoder on tokens side by side: Llama, Qwen2, Qwen3, Mistral and their kin.

In: hidden states [tokens, width]. Out: those of the next block, for all places or only for those that
anybody asks for: in the last block, where a reply is predicted. Calls the block's own norms and
activation; products go the way that they are given. Does not know trunk or loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from graftwork.train.cpu.products import Product, frozen_product, trainable_product

KNOWN_LAYERS = ("LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "MistralDecoderLayer")
SMALL_MASK = 2**16
"""Places of a mask that is kept for the next layer; larger ones are cheaper made than held."""

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class KeysValues:
    """[tokens, groups, width] each."""

    keys: Tensor
    values: Tensor


class CpuBlock:
    """`learns`: the gradient flows through it."""

    def __init__(self, layer: Any, *, learns: bool, packed: bool) -> None:
        self._layer = layer
        self._width = int(layer.self_attn.head_dim)
        make = trainable_product if learns else frozen_product
        self._product: dict[str, Product] = {
            name: make(getattr(layer.self_attn if name[0] in "qkvo" else layer.mlp, name), packed=packed)
            for name in LINEARS
        }

    def read(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> tuple[Tensor, KeysValues]:
        """The normed input, which queries are made of, and keys and values of all tokens."""
        normed = self._layer.input_layernorm(x)
        keys = self._heads(self._product["k_proj"](normed))
        if hasattr(self._layer.self_attn, "k_norm"):
            keys = self._layer.self_attn.k_norm(keys)
        return normed, KeysValues(rotate(keys, *turn), self._heads(self._product["v_proj"](normed)))

    def query(self, normed: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        queries = self._heads(self._product["q_proj"](normed))
        if hasattr(self._layer.self_attn, "q_norm"):
            queries = self._layer.self_attn.q_norm(queries)
        return rotate(queries, *turn)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """From mixed values to the block's output."""
        x = x + self._product["o_proj"](mixed.flatten(1))
        normed = self._layer.post_attention_layernorm(x)
        gate, up = self._product["gate_proj"](normed), self._product["up_proj"](normed)
        return x + self._product["down_proj"](self._layer.mlp.act_fn(gate) * up)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._width)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [tokens, heads, width]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]


def attend(queries: Sequence[Tensor], known: Sequence[KeysValues], shared: KeysValues | None) -> Tensor:
    """Each row's last tokens look at the shared beginning and at their own row up to themselves."""
    mixed = []
    for query, own in zip(queries, known, strict=True):
        keys, values = own.keys, own.values
        if shared is not None:
            keys, values = torch.cat((shared.keys, keys)), torch.cat((shared.values, values))
        mixed.append(_attend_row(query, keys, values))
    return torch.cat(mixed)


def _attend_row(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Heads that share keys ask together, so that keys and values need not be copied for each."""
    asking, heads, width = query.shape
    groups = keys.shape[1]
    together = (
        query.view(asking, groups, heads // groups, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
    )
    look_back = _look_back if asking * keys.shape[0] <= SMALL_MASK else _look_back.__wrapped__
    mask = look_back(asking, keys.shape[0], heads // groups, query.dtype)
    mixed = scaled_dot_product_attention(
        together[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
    )
    return mixed[0].view(groups, -1, asking, width).permute(2, 0, 1, 3).reshape(asking, heads, width)


@lru_cache(maxsize=64)
def _look_back(asking: int, seen: int, times: int, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, -inf where not; the queries are the last of the tokens."""
    forbidden = torch.full((asking, seen), float("-inf"), dtype=dtype).triu(seen - asking + 1)
    return forbidden.repeat(times, 1)[None, None]
