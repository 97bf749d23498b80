"""Products with frozen weights on a CPU, and their adapters, with a custom backward.

In: a linear layer, with or without an adapter. Out: a function of [tokens, width]. The weight never
changes, so it is laid out once as oneDNN's kernels want it: at the few dozen tokens of a row that is
a third faster than laying it out at every product. Packed copies cost memory; the caller decides.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from graftwork.costmodel.processor import FILE_BYTES_A_SECOND, MEMORY_BYTES_A_SECOND
from graftwork.files.disk import make_folder
from graftwork.model.adapters.lora import LoraLinear
from graftwork.records.dataset import Row
from graftwork.train.objectives.epochs import shared_tokens

PACKED_FOR = 64
"""Tokens that the layout is made for; measured, it is as good at 30 as at 1,000."""

Product = Callable[[Tensor], Tensor]


def pack_product(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Product:
    """x -> x Wᵀ + bias."""
    if not (packed and can_pack()):
        return lambda x: nn.functional.linear(x, weight, bias)
    laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x: multiply(x, laid_out, bias, "none", [], "")


def can_pack() -> bool:
    """Whether this build of torch lays weights out: tried on a small product."""
    try:
        weight, x = torch.ones(4, 3), torch.ones(2, 3)
        laid_out = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
        y = torch.ops.mkldnn._linear_pointwise(x, laid_out, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(y, torch.full((2, 4), 3.0))


def frozen_product(layer: Any, *, packed: bool) -> Product:
    """Of a layer through which nothing flows back."""
    if type(layer) is nn.Linear:
        return pack_product(layer.weight, layer.bias, packed=packed)
    return layer  # type: ignore[no-any-return]


def trainable_product(layer: Any, *, packed: bool) -> Product:
    """Of a layer through which the gradient flows: frozen, or with one acting adapter."""
    base = layer.base_layer if isinstance(layer, LoraLinear) else layer
    if type(base) is not nn.Linear:
        return layer  # type: ignore[no-any-return]
    forward = pack_product(base.weight, base.bias, packed=packed)
    back = pack_product(base.weight.t().contiguous(), None, packed=True) if packed and can_pack() else None
    turned = back if back is not None else lambda g: g @ base.weight
    if base is layer:
        return lambda x: _apply(_FrozenProduct, x, forward, turned)
    name = layer.active
    if name not in layer.scales or name in layer.lora_magnitude_vector:
        return layer  # type: ignore[no-any-return]
    a, b, scale = layer.lora_A[name], layer.lora_B[name], layer.scales[name]
    return lambda x: _apply(_LoraProduct, x, a, b, scale, forward, turned)


def _apply(function: Any, *arguments: Any) -> Tensor:
    return function.apply(*arguments)  # type: ignore[no-any-return]


class _FrozenProduct(torch.autograd.Function):
    """y = W x. Keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Product, turned: Product) -> Tensor:
        ctx.turned = turned
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.turned(gradients[0]), None, None


class _LoraProduct(torch.autograd.Function):
    """y = W x + s · B (A x), added up in place; keeps x and A x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, forward: Product, turned: Product
    ) -> Tensor:
        low = x @ a.t()
        y = forward(x).addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, low, a, b)
        ctx.scale, ctx.turned = scale, turned
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        g: Tensor = gradients[0]
        x, low, a, b = ctx.saved_tensors
        thin = (g @ b).mul_(ctx.scale)
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = ctx.turned(g).addmm_(thin, a)
        return for_x, thin.t() @ x, (low.t() @ g).t().mul(ctx.scale), None, None, None


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


@dataclass(frozen=True)
class CacheLoad:
    """What the trunk would have to give over a run."""

    distinct_tokens: int
    visited_tokens: int
    bytes_a_token: int
    operations_a_token: float
    """Multiplications and additions of one token through the frozen blocks."""

    @property
    def bytes(self) -> int:
        return self.distinct_tokens * self.bytes_a_token


@dataclass(frozen=True)
class CacheBudget:
    memory_bytes: float
    disk_bytes: float
    operations_a_second: float


@dataclass(frozen=True)
class CacheChoice:
    place: Literal["memory", "file", "nowhere"]
    why: str


def choose_cache(load: CacheLoad, budget: CacheBudget) -> CacheChoice:
    """The nearest place that is large enough and faster than computing again. Pure."""
    again = load.operations_a_token / budget.operations_a_second
    from_memory = load.bytes_a_token / MEMORY_BYTES_A_SECOND
    # Written once and read at each later visit.
    from_file = 2 * load.bytes_a_token / FILE_BYTES_A_SECOND
    size = f"{load.bytes / 2**20:.0f} MiB of hidden states"
    if load.operations_a_token == 0:
        return CacheChoice("nowhere", "no block below the adapters")
    if load.visited_tokens <= load.distinct_tokens:
        return CacheChoice("nowhere", "no row is seen twice")
    if load.bytes <= budget.memory_bytes and from_memory < again:
        return CacheChoice("memory", f"{size} instead of computing them again")
    if budget.memory_bytes < load.bytes <= budget.disk_bytes and from_file < again:
        return CacheChoice("file", f"{size} are more than memory allows")
    return CacheChoice("nowhere", f"{size} are too many to keep, or as fast computed again")


class HiddenStateCache(Protocol):
    def get(self, number: int) -> Tensor | None: ...

    def put(self, number: int, state: Tensor) -> None: ...


class NoCache:
    def get(self, number: int) -> Tensor | None:
        return None

    def put(self, number: int, state: Tensor) -> None: ...


class MemoryCache:
    def __init__(self) -> None:
        self._states: dict[int, Tensor] = {}

    def get(self, number: int) -> Tensor | None:
        return self._states.get(number)

    def put(self, number: int, state: Tensor) -> None:
        self._states[number] = state


class FileCache:
    """A mapped file that has no name any more: whatever ends the process also frees the disk."""

    def __init__(self, folder: Path, *, lengths: tuple[int, ...], width: int, dtype: torch.dtype) -> None:
        make_folder(folder)
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._spans = list(pairwise(ends))
        self._held = [False] * len(lengths)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="trunk-") as file:
            self._mapped = torch.from_file(file.name, shared=True, size=ends[-1] * width, dtype=dtype)
        self._mapped = self._mapped.view(ends[-1], width)

    def get(self, number: int) -> Tensor | None:
        begin, end = self._spans[number]
        return self._mapped[begin:end] if self._held[number] else None

    def put(self, number: int, state: Tensor) -> None:
        begin, end = self._spans[number]
        self._mapped[begin:end] = state
        self._held[number] = True


class FrozenLayers:
    def __init__(
        self, decoder: Any, first: int, rows: Sequence[Row], *, states: HiddenStateCache, packed: bool
    ) -> None:
        self._embed, self._rotary = decoder.embed_tokens, decoder.rotary_emb
        self._blocks = [CpuBlock(layer, learns=False, packed=packed) for layer in decoder.layers[:first]]
        self._beginning = shared_prefix(rows)
        self._numbers = number_rows(rows)
        self._states = states
        self._read_beginning: tuple[Tensor, list[KeysValues]] | None = None

    def read(self, row: Row) -> Tensor:
        """[tokens but the last, width]."""
        begins_alike = row.tokens[: len(self._beginning)] == self._beginning
        if not begins_alike:
            return self._pass(row.tokens[:-1], None)[0]
        beginning, known = self._shared()
        number = self._numbers.get(row.tokens)
        rest = None if number is None else self._states.get(number)
        if rest is None:
            rest, _ = self._pass(row.tokens[len(self._beginning) : -1], known)
            if number is not None:
                self._states.put(number, rest)
        return torch.cat((beginning, rest))

    def _shared(self) -> tuple[Tensor, list[KeysValues]]:
        if self._read_beginning is None:
            self._read_beginning = self._pass(self._beginning, None)
        return self._read_beginning

    @torch.no_grad()
    def _pass(
        self, tokens: tuple[int, ...], before: list[KeysValues] | None
    ) -> tuple[Tensor, list[KeysValues]]:
        """Through the frozen blocks, behind what was read before."""
        past = before[0].keys.shape[0] if before else 0
        x: Tensor = self._embed(torch.tensor(tokens, dtype=torch.long))
        known: list[KeysValues] = []
        if not tokens or not self._blocks:
            return x, known
        cos, sin = self._rotary(x[None], torch.arange(past, past + len(tokens))[None])
        turn = cos[0], sin[0]
        for number, block in enumerate(self._blocks):
            normed, own = block.read(x, turn)
            known.append(own)
            shared = before[number] if before else None
            x = block.finish(x, attend([block.query(normed, turn)], [own], shared))
        return x, known


def shared_prefix(rows: Sequence[Row]) -> tuple[int, ...]:
    """The first tokens that all rows of the run share."""
    return rows[0].tokens[: shared_tokens(rows)] if rows else ()


def number_rows(rows: Sequence[Row]) -> dict[tuple[int, ...], int]:
    """A number for each distinct row, in the order of first occurrence."""
    numbers: dict[tuple[int, ...], int] = {}
    for row in rows:
        numbers.setdefault(row.tokens, len(numbers))
    return numbers
