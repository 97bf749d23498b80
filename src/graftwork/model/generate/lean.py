"""Prompts, and one new token for each row: the products without the modules around them.

In: a model of a family with Llama's blocks, and the cache of its slots. Out: logits, as the model itself
gives them up to rounding. Linear layers are called as they are, so that adapters act. On a processor prompts
lie side by side, without padding. On a card one more token takes half of the kernels of the model's own pass,
each of which takes longer to follow the last one than to compute.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
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


class PromptPart(NamedTuple):
    """Tokens that one slot reads, behind what it holds already."""

    slot: int
    tokens: list[int]
    start: int


class LeanPass:
    """Made once for a model; call `run` for each token, and on a processor `read` for prompts."""

    def __init__(self, model: Any) -> None:
        decoder = model.model
        self.on_card: bool = model.lm_head.weight.device.type != "cpu"
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._norm = decoder.norm
        self._head = model.lm_head.forward if self.on_card else _head_product(model.lm_head)
        self._epsilon = norm_epsilon(model.config)
        self._width = head_width(model.config)
        self._layers = decoder.layers

    @classmethod
    def of(cls, model: Any) -> "LeanPass | None":
        """None for other blocks than Llama's, and on a processor for other numbers than float32."""
        family = find_family(getattr(model.config, "model_type", None))
        if family is None or family.block != BlockLayout() or not family.plain_logits:
            return None
        weight = next(model.parameters())
        layers = model.model.layers
        known = weight.device.type == "cuda" or (weight.device.type, weight.dtype) == ("cpu", torch.float32)
        if not known or family.head_norms == "width":
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
        unseen = torch.arange(columns, device=x.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=cache.dtype, device=x.device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, None, None]
        half = self._width // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            block = _take_apart(layer)
            normed = self._rms(x, block.before_attention)
            turned, value = self._project(block, normed, cos, sin)
            keys, values = cache.write_tokens(number, turned[:, -value.shape[1] :], value, positions, columns)
            query = turned[:, : -value.shape[1]].view(len(x), value.shape[1], -1, self._width)
            mixed = self._attend(query, keys, values, mask)
            x = x + block.out.forward(mixed.reshape(len(x), -1))
            normed = self._rms(x, block.before_mlp)
            x = x + block.down.forward(silu(block.gate.forward(normed)).mul_(block.up.forward(normed)))
        return self._head(self._rms(x, self._norm))

    def read(
        self, parts: Sequence[PromptPart], cache: SlotCache, *, choose: Callable[[Tensor], None]
    ) -> Tensor:
        """Logits behind the last token of each part. `choose` gets the slot of each token of the next
        products: the adapter of its slot has to act on it."""
        slots = torch.tensor([part.slot for part in parts for _ in part.tokens])
        choose(slots)
        x = self._embed(torch.tensor([token for part in parts for token in part.tokens]))
        sizes = [len(part.tokens) for part in parts]
        places = [torch.arange(part.start, part.start + len(part.tokens)) for part in parts]
        positions, ends = torch.cat(places), torch.tensor(sizes).cumsum(0) - 1
        cos, sin = (turn[0][:, None] for turn in self._rotary(x[None], positions[None]))
        half = self._width // 2
        sin = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
        for number, layer in enumerate(self._layers):
            block = _take_apart(layer)
            normed = self._rms(x, block.before_attention)
            key = self._turn(block.k(normed), block.k_norm, cos, sin)
            value = block.v(normed).view(len(x), -1, self._width)
            cache.write_prompts(number, key, value, slots, positions)
            if number == len(self._layers) - 1:
                # Nothing looks at the other tokens any more.
                choose(slots[ends])
                x, normed, cos, sin, sizes = x[ends], normed[ends], cos[ends], sin[ends], [1] * len(parts)
            query = self._turn(block.q(normed), block.q_norm, cos, sin)
            mixed = [
                _look_back(asked, *cache.held(number, part.slot, part.start + len(part.tokens)))
                for asked, part in zip(query.split_with_sizes(sizes), parts, strict=True)
            ]
            x = x + block.out(torch.cat(mixed))
            normed = self._rms(x, block.before_mlp)
            x = x + block.down(silu(block.gate(normed)).mul_(block.up(normed)))
        return self._head(self._rms(x, self._norm))

    def _attend(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """The heads of a group are as tokens of one head, so that its keys are read once."""
        if not self.on_card:
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        mask = mask.expand(*query.shape[:3], mask.shape[-1])
        with sdpa_kernel(_CARD_BACKENDS):
            return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def _turn(self, x: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.view(len(x), -1, self._width)
        if norm is not None:
            heads = self._rms(heads, norm)
        return torch.addcmul(heads * cos, heads.roll(self._width // 2, dims=-1), sin)

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


_CARD_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The first takes a mask; others would be chosen before it, and take none or plan for each shape."""


def _look_back(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[tokens, heads, width], the last ones of [groups, columns, width]; out: [tokens, heads and width].

    Heads that share keys ask together, so that keys and values need not be copied for each.
    """
    tokens, heads, width = query.shape
    groups, columns, _ = keys.shape
    asked = query.view(tokens, groups, -1, width).permute(1, 2, 0, 3).reshape(1, groups, -1, width)
    small = tokens * columns <= SMALL_MASK
    mask = (_causal_mask if small else _causal_mask.__wrapped__)(tokens, columns, heads // groups)
    mixed = scaled_dot_product_attention(asked, keys[None], values[None], attn_mask=mask)
    return mixed.view(groups, -1, tokens, width).permute(2, 0, 1, 3).reshape(tokens, heads * width)


SMALL_MASK = 2**16
"""Places of a mask that is kept for the next block."""


@lru_cache(maxsize=128)
def _causal_mask(tokens: int, columns: int, times: int) -> Tensor:
    mask = torch.full((tokens, columns), float("-inf")).triu(columns - tokens + 1)
    return mask.repeat(times, 1)[None, None]


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
