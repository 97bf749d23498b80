"""Keys and values of all running requests in one tensor: a row of it is a slot, a column a position.

Input: the shape of a model's keys, how many slots and columns are needed. Output: a cache that transformers
writes through; which slots and columns a pass reads and writes is set before it and never changes an address.
The last column is for what is padding: it is written and never read by a request.

Its attention computes one new token for each row, with keys and values shared by a group of heads. The stock
path copies them for every head of a group, which costs more than the attention itself. It is registered
through the interface of transformers; nothing is patched.
"""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftwork.model.generate.scheduler import allocated_columns

ATTENTION_NAME = "graft_grouped"


def register_attention() -> str:
    """Register the attention with transformers; returns its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, grouped_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    return ATTENTION_NAME


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(batch, heads, 1, d) against (batch, groups, length, d); more than one token uses the stock
    implementation.
    """
    rows, heads, new, width = query.shape
    if new != 1:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output, None
    groups = key.shape[1]
    scale = scaling if scaling is not None else width**-0.5
    grouped = query.reshape(rows, groups, heads // groups, width) * scale
    scores = grouped @ key.transpose(-1, -2)
    if attention_mask is not None:
        visible = attention_mask[..., : key.shape[2]]
        scores = (
            scores.masked_fill(~visible, float("-inf")) if visible.dtype == torch.bool else scores + visible
        )
    mixed = scores.float().softmax(dim=-1).to(value.dtype) @ value
    return mixed.reshape(rows, 1, heads, width), None


class CacheShape(NamedTuple):
    layers: int
    groups: int
    width: int
    dtype: torch.dtype


class PassLayout(NamedTuple):
    """Where one pass writes, and what it reads."""

    rows: Tensor
    """[batch]: the slot of each row."""
    positions: Tensor
    """[batch, tokens]: the column that each token is written to; it attends to all columns up to there."""
    columns: int
    """Columns that are read."""
    leading: bool
    """Whether the slots are the first ones, in order: these are read without a copy."""


_SHAPES: "WeakKeyDictionary[Any, CacheShape | None]" = WeakKeyDictionary()


def cache_shape(model: Any) -> CacheShape | None:
    """None if a slot cannot hold the model's state: windows, recurrent states, other kinds of attention."""
    if model not in _SHAPES:
        _SHAPES[model] = _find_shape(model)
    return _SHAPES[model]


@torch.inference_mode()
def _find_shape(model: Any) -> CacheShape | None:
    if model.config._attn_implementation != ATTENTION_NAME:
        return None
    cache: Any = DynamicCache(config=model.config)
    if not all(type(layer) is DynamicLayer for layer in cache.layers):
        return None
    token = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
    if not cache.layers or not all(layer.is_initialized for layer in cache.layers):
        return None
    keys = cache.layers[0].keys
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    if any(tensor is None or tensor.shape != keys.shape or tensor.dtype != keys.dtype for tensor in tensors):
        return None
    return CacheShape(len(cache.layers), keys.shape[1], keys.shape[3], keys.dtype)


class SlotCache:
    """Grows in `ensure`; growing moves it, which invalidates recordings."""

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.layout: PassLayout | None = None
        self._groups = torch.arange(shape.groups, device=device)[None, :, None]
        self.cache = DynamicCache()
        self.cache.layers = [_SlotLayer(self, layer) for layer in range(shape.layers)]
        self._room = self._allocate(0, 0)

    @property
    def dtype(self) -> torch.dtype:
        return self._shape.dtype

    @property
    def slots(self) -> int:
        return self._room.shape[2]

    @property
    def columns(self) -> int:
        """Columns that requests can use."""
        return max(self._room.shape[4] - 1, 0)

    @property
    def padding(self) -> int:
        """The column for padding."""
        return self._room.shape[4] - 1

    @property
    def held_bytes(self) -> int:
        return int(self._room.nbytes)

    def ensure(self, slots: int, columns: int) -> bool:
        """Make room for this many; returns whether the tensor moved."""
        if slots <= self.slots and columns <= self.columns:
            return False
        slots = max(slots, self.slots)
        columns = max(allocated_columns(columns), self._room.shape[4])
        previous = self._room
        if not previous.numel():
            del previous
            self._room = self._allocate(0, 0)
            self._room = self._allocate(slots, columns)
            return True
        grown = self._allocate(slots, columns)
        grown[:, :, : previous.shape[2], :, : previous.shape[4]] = previous
        self._room = grown
        return True

    def drop(self) -> None:
        self._room = self._allocate(0, 0)

    def copy_prefix(self, source: int, targets: list[int], length: int) -> None:
        """Copy the first columns of one slot to others."""
        for target in targets:
            if target != source:
                self._room[:, :, target, :, :length] = self._room[:, :, source, :, :length]

    def move(self, moves: list[tuple[int, int]], lengths: list[int]) -> None:
        for (source, target), length in zip(moves, lengths, strict=True):
            self._room[:, :, target, :, :length] = self._room[:, :, source, :, :length]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [batch, groups, tokens, width]; returns what the rows attend to: [batch, groups, columns,
        width].
        """
        assert self.layout is not None
        rows, positions, columns, leading = self.layout
        index = (rows[:, None, None], self._groups, positions[:, None, :])
        views = []
        for tensor, new in zip(self._room[layer], (keys, values), strict=True):
            tensor.index_put_(index, new)
            within = tensor[:, :, :columns]
            views.append(within[: len(rows)] if leading else within.index_select(0, rows))
        return views[0], views[1]

    def write_tokens(
        self, layer: int, keys: Tensor, values: Tensor, positions: Tensor, columns: int
    ) -> tuple[Tensor, Tensor]:
        """As `write`, for one token of each of the first slots: [rows, groups, width] at [rows] positions."""
        rows = len(positions)
        room = self._room[layer, :, :rows]
        room.permute(1, 3, 0, 2, 4).index_put_(
            (self._numbers[:rows], positions), torch.stack((keys, values), dim=1)
        )
        return room[0, :, :, :columns], room[1, :, :, :columns]

    def write_prompts(
        self, layer: int, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
    ) -> None:
        """Store [tokens, groups, width], each token in its slot at its position."""
        room = self._room[layer].permute(1, 3, 0, 2, 4)
        room.index_put_((slots, positions), torch.stack((keys, values), dim=1))

    def held(self, layer: int, slot: int, columns: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one slot: [groups, columns, width] each."""
        keys, values = self._room[layer, :, slot, :, :columns]
        return keys, values

    def _allocate(self, slots: int, columns: int) -> Tensor:
        layers, groups, width, dtype = self._shape
        self._numbers = torch.arange(slots, device=self._device)
        return torch.zeros(layers, 2, slots, groups, columns, width, dtype=dtype, device=self._device)


class _SlotLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer as transformers sees it."""

    def __init__(self, slots: SlotCache, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._number = slots, number
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._slots.write(self._number, key_states, value_states)

    def get_seq_length(self) -> int:
        return 0
