"""One more token for every row of a batch, as a single launch on a card.

A small model's step is hundreds of tiny kernels: launched one by one, the card waits for Python most of the
time. Here the step is recorded once for a number of rows and columns and then replayed; tokens, positions and
the column that is written move inside of it. In: a model, the keys and values of the prompts. Out: the scores
behind each row's newest token. Knows neither how a token is chosen nor when a row ends. A recording holds for
the adapter that acted when it was made.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from graftwork.model.generate.attention import ATTENTION_NAME

COLUMNS = 128
"""Recordings are made for multiples of this many columns, so that batches of like length share one."""


class _WrittenLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a fixed size; the newest go into the column that a tensor on the card names."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = self._place = keys, values
        self._column = column
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self._place
        keys.index_copy_(2, self._column, key_states)
        values.index_copy_(2, self._column, value_states)
        return keys, values


def can_record(model: Any, cache: Any) -> bool:
    """Only with our attention, which reads a mask of booleans, and where every layer keeps all keys."""
    on_card = next(model.parameters()).device.type == "cuda"
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    return on_card and plain and model.config._attn_implementation == ATTENTION_NAME


class RecordedDecoder:
    """A recording for `rows` rows and `columns` columns, made at once; fill it with prompts, then step."""

    def __init__(self, model: Any, cache: Any, *, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, -(-columns // COLUMNS) * COLUMNS
        self._model = model
        device = cache.layers[0].keys.device
        self._column = torch.zeros(1, dtype=torch.long, device=device)
        self._tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._seen = torch.zeros(rows, 1, 1, self.columns, dtype=torch.bool, device=device)
        self._places = [(self._place(layer.keys), self._place(layer.values)) for layer in cache.layers]
        self._cache = DynamicCache()
        self._cache.layers = [_WrittenLayer(*place, self._column) for place in self._places]
        self._recording = self._record() if device.type == "cuda" else None

    @property
    def held_bytes(self) -> int:
        return sum(tensor.nbytes for place in self._places for tensor in place)

    def fits(self, *, rows: int, columns: int) -> bool:
        return rows == self.rows and self.columns - COLUMNS < columns <= self.columns

    def fill(self, cache: Any, mask: Tensor) -> None:
        """Take over what the prompts left behind; the cache given is emptied layer by layer."""
        used = mask.shape[1]
        self._seen.zero_()
        self._seen[:, 0, 0, :used] = mask.bool()
        self._column.fill_(used)
        self._positions.copy_(mask.sum(dim=1, keepdim=True))
        for (keys, values), given in zip(self._places, cache.layers, strict=True):
            keys[:, :, :used] = given.keys
            values[:, :, :used] = given.values
            given.keys = given.values = None

    def step(self, tokens: Tensor) -> Tensor:
        """The scores behind one more token of every row; the next step writes over them."""
        self._tokens.copy_(tokens[:, None])
        if self._recording is None:
            return self._advance()
        graph, scores = self._recording
        graph.replay()
        return scores

    def _place(self, like: Tensor) -> Tensor:
        rows, groups, _, width = like.shape
        return like.new_zeros(rows, groups, self.columns, width)

    def _record(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the step aside until nothing is allocated any more, then record it; `fill` puts all back."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self._advance()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # records, and runs nothing
            scores = self._advance()
        return graph, scores

    def _advance(self) -> Tensor:
        self._seen.index_fill_(3, self._column, True)
        output = self._model(
            input_ids=self._tokens,
            attention_mask=self._seen,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        scores: Tensor = output.logits[:, -1]
        self._positions.add_(1)
        self._column.add_(1)
        return scores


MOST_ROWS = 256
"""More rows answer hardly more a second: by then the products keep the card busy."""
SHARE = 0.8
"""Of the free memory; the rest is for what the allocator cannot use in one piece."""


UNKNOWN_SHAPE_ROWS = 32
"""For a decoder whose measures are not to be read; what is too much is found out by trying."""


def rows_that_fit(
    config: Any, *, prompt_tokens: int, new_tokens: int, free_bytes: int, bytes_each: int = 2
) -> int:
    a_row = bytes_of_row(config, prompt_tokens=prompt_tokens, new_tokens=new_tokens, bytes_each=bytes_each)
    if a_row is None:
        return UNKNOWN_SHAPE_ROWS
    return max(1, min(MOST_ROWS, int(SHARE * free_bytes) // a_row))


def bytes_of_row(config: Any, *, prompt_tokens: int, new_tokens: int, bytes_each: int) -> int | None:
    """None where the configuration names its measures in a way of its own."""
    heads = _number(config, "num_attention_heads")
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    if heads is None or hidden is None or layers is None:
        return None
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size") or 4 * hidden
    vocabulary = _number(config, "vocab_size") or 0
    keys = 2 * layers * groups * width * bytes_each
    # The states in and out of a layer, its gate, up and their product.
    passing = (4 * hidden + 3 * inner) * bytes_each
    return 2 * keys * (prompt_tokens + new_tokens) + passing * prompt_tokens + 4 * vocabulary * bytes_each


def _number(config: Any, name: str) -> int | None:
    """A positive number, or the largest of one for each layer."""
    try:
        found = getattr(config, name, None)
    except Exception:  # some configurations refuse a name that differs from layer to layer
        return None
    if isinstance(found, list | tuple) and found and all(isinstance(item, int) for item in found):
        found = max(found)
    return found if isinstance(found, int) and found > 0 else None
