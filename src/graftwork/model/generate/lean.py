"""Prompts, and one new token for each row: the products without the modules around them.

Input: a model of a family with Llama's blocks, and the cache of its slots. Output: logits, as the model
itself gives them up to rounding. Linear layers are called as they are, so that adapters act. On a CPU prompts
lie side by side, without padding. On a GPU one more token takes half of the kernels of the model's own pass,
each of which takes longer to follow the last one than to compute.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from graftwork.model.blocks import (
    AttentionRule,
    attend_to_slots,
    attention_rule,
    has_onednn_products,
    head_width,
    look_back,
    norm_epsilon,
)
from graftwork.model.families import BlockLayout, find_family
from graftwork.model.generate.cache import SlotCache


class LeanPass:
    """Created once per model; call `run` for each token, and on a CPU `read` for prompts."""

    def __init__(self, model: Any) -> None:
        decoder = model.model
        self.on_gpu: bool = model.lm_head.weight.device.type != "cpu"
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._norm = decoder.norm
        self._head: Callable[[Tensor], Tensor] = model.lm_head.forward
        if not self.on_gpu and type(model.lm_head) is nn.Linear and has_onednn_products():
            # With few rows and a vocabulary of columns, oneDNN takes two thirds of the usual time.
            head, multiply = model.lm_head, torch.ops.mkldnn._linear_pointwise
            self._head = lambda x: multiply(x, head.weight, head.bias, "none", [], "")
        self._epsilon = norm_epsilon(model.config)
        self._width = head_width(model.config)
        self._layers = decoder.layers

    @classmethod
    def of(cls, model: Any) -> "LeanPass | None":
        """None for other blocks than Llama's, and on a CPU for other types than float32."""
        family = find_family(getattr(model.config, "model_type", None))
        if family is None or family.block != BlockLayout() or not family.plain_logits:
            return None
        weight = next(model.parameters())
        layers = model.model.layers
        usable = weight.device.type == "cuda" or (weight.device.type, weight.dtype) == (
            "cpu",
            torch.float32,
        )
        if not usable or family.head_norms == "width":
            return None
        # SmolLM3 leaves the positions of some blocks out.
        plain = all(
            attention_rule(layer) == AttentionRule() and getattr(layer.self_attn, "use_rope", True)
            for layer in layers
        )
        probe = torch.linspace(-4, 4, 64)
        has_silu = torch.allclose(layers[0].mlp.act_fn(probe), silu(probe), atol=1e-6)
        return cls(model) if plain and has_silu else None

    def run(self, tokens: Tensor, positions: Tensor, cache: SlotCache, columns: int) -> Tensor:
        """Logits after a token of each of the first slots. `tokens` and `positions` are [rows]."""
        x = self._embed(tokens)
        cos, sin = self._rotary(x[:, None], positions[:, None])
        unseen = torch.arange(columns, device=x.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=cache.dtype, device=x.device)
        mask = mask.masked_fill_(unseen, float("-inf"))
        half = self._width // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed = self._rms(x, layer.input_layernorm)
            query, key, value = (
                product.forward(normed).view(len(x), -1, self._width)
                for product in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if getattr(attention, "q_norm", None) is not None:
                query, key = self._rms(query, attention.q_norm), self._rms(key, attention.k_norm)
            both, groups = torch.cat((query, key), dim=1), value.shape[1]
            # sin has the sign of the halves that change places.
            turned = torch.addcmul(both * cos, both.roll(half, dims=-1), sin)
            keys, values = cache.write_tokens(number, turned[:, -groups:], value, positions, columns)
            mixed = attend_to_slots(turned[:, :-groups], keys, values, mask, on_gpu=self.on_gpu)
            x = x + attention.o_proj.forward(mixed.reshape(len(x), -1))
            normed = self._rms(x, layer.post_attention_layernorm)
            x = x + mlp.down_proj.forward(
                silu(mlp.gate_proj.forward(normed)).mul_(mlp.up_proj.forward(normed))
            )
        return self._head(self._rms(x, self._norm))

    def read(
        self,
        parts: Sequence[tuple[int, list[int], int]],
        cache: SlotCache,
        *,
        choose: Callable[[Tensor], None],
    ) -> Tensor:
        """Logits after the last token of each part: a slot, the tokens that it reads, and the number it holds
        before them. `choose` gets the slot of each token of the next products, whose adapter applies to it.
        """
        slots = torch.tensor([slot for slot, tokens, _ in parts for _ in tokens])
        choose(slots)
        x = self._embed(torch.tensor([token for _, tokens, _ in parts for token in tokens]))
        sizes = [len(tokens) for _, tokens, _ in parts]
        ranges = [torch.arange(start, start + len(tokens)) for _, tokens, start in parts]
        positions, ends = torch.cat(ranges), torch.tensor(sizes).cumsum(0) - 1
        cos, sin = (turn[0][:, None] for turn in self._rotary(x[None], positions[None]))
        half = self._width // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed = self._rms(x, layer.input_layernorm)
            key = self._turn(attention.k_proj(normed), getattr(attention, "k_norm", None), cos, sin)
            value = attention.v_proj(normed).view(len(x), -1, self._width)
            cache.write_prompts(number, key, value, slots, positions)
            if number == len(self._layers) - 1:
                # Nothing looks at the other tokens any more.
                choose(slots[ends])
                x, normed, cos, sin, sizes = x[ends], normed[ends], cos[ends], sin[ends], [1] * len(parts)
            query = self._turn(attention.q_proj(normed), getattr(attention, "q_norm", None), cos, sin)
            mixed = [
                look_back(queries, *cache.held(number, slot, start + len(tokens)), AttentionRule()).flatten(1)
                for queries, (slot, tokens, start) in zip(query.split_with_sizes(sizes), parts, strict=True)
            ]
            x = x + attention.o_proj(torch.cat(mixed))
            normed = self._rms(x, layer.post_attention_layernorm)
            x = x + mlp.down_proj(silu(mlp.gate_proj(normed)).mul_(mlp.up_proj(normed)))
        return self._head(self._rms(x, self._norm))

    def _turn(self, x: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(len(x), -1, self._width)
        if norm is not None:
            heads = self._rms(heads, norm)
        return torch.addcmul(heads * cos, heads.roll(self._width // 2, dims=-1), sin)

    def _rms(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, norm.weight.shape, norm.weight, self._epsilon)
