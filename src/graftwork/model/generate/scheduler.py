"""Continuous batching: how many slots and columns there are, which request has which slot, which comes next.

Input: requests, each of a group; those that ended. Output: the requests to start, in the order in which they
came, and the moves that bring the running ones together. Requests of two groups never run at once: a group
needs other weights. What each slot holds the keys of is known here, and where a new prompt finds its
beginning. Knows no tensors.

The generator asks here for its sizes before it allocates, and the plan before it runs, so that they agree.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from graftwork.model.shape import cached_numbers

R = TypeVar("R")


class SlotScheduler(Generic[R]):
    """`submit` requests, `admit` them into free slots, `release` the slots of those that ended."""

    def __init__(self, slots: int, *, group_of: Callable[[R], Hashable] = lambda _request: None) -> None:
        if slots < 1:
            raise ValueError("a scheduler needs a slot")
        self._rows: list[R | None] = [None] * slots
        self._waiting: deque[R] = deque()
        self._group_of = group_of
        self._group: Hashable = None
        self.limit = slots
        """Slots that may be used; lowering it does not stop running requests."""

    @property
    def slots(self) -> int:
        return len(self._rows)

    @property
    def rows(self) -> list[R | None]:
        """The request of each slot up to the last that is used."""
        return self._rows[: self.used]

    @property
    def used(self) -> int:
        """Slots up to the last one that is running."""
        return max((slot + 1 for slot, row in enumerate(self._rows) if row is not None), default=0)

    @property
    def running(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def group(self) -> Hashable:
        """The group that is running."""
        return self._group

    def submit(self, request: R) -> None:
        self._waiting.append(request)

    def drop_waiting(self, is_unwanted: Callable[[R], bool]) -> list[R]:
        """Drop and return the requests whose callers have gone."""
        dropped = [request for request in self._waiting if is_unwanted(request)]
        if dropped:
            self._waiting = deque(request for request in self._waiting if request not in dropped)
        return dropped

    def admit(self) -> list[tuple[int, R]]:
        """Assign free slots to waiting requests, oldest first. None overtakes one of another group."""
        admitted: list[tuple[int, R]] = []
        free = [slot for slot, row in enumerate(self._rows) if row is None and slot < self.limit]
        for slot in free:
            if not self._waiting or self.running >= self.limit:
                break
            group = self._group_of(self._waiting[0])
            if self.running and group != self._group:
                break
            self._group = group
            request = self._waiting.popleft()
            self._rows[slot] = request
            admitted.append((slot, request))
        return admitted

    def release(self, slot: int) -> None:
        self._rows[slot] = None

    def slot_of(self, request: R) -> int | None:
        return next((slot for slot, row in enumerate(self._rows) if row is request), None)

    def compact(self, *, to: int | None = None) -> list[tuple[int, int]]:
        """Move the last rows into free slots until all are in the first `to`; returns the moves."""
        limit = self.running if to is None else max(to, self.running)
        moves: list[tuple[int, int]] = []
        while (used := self.used) > limit:
            target = next(slot for slot, row in enumerate(self._rows) if row is None)
            moves.append((used - 1, target))
            self._rows[target], self._rows[used - 1] = self._rows[used - 1], None
        return moves

    def clear(self) -> list[R]:
        """Forget all requests, and return them."""
        forgotten = [row for row in self._rows if row is not None] + list(self._waiting)
        self._rows = [None] * len(self._rows)
        self._waiting.clear()
        return forgotten


SHORTEST = 16
"""Shorter prefixes are recomputed: a copy costs a launch for each row."""


class SlotContents:
    def __init__(self, slots: int) -> None:
        self._contents: list[tuple[str | None, list[int]] | None] = [None] * slots

    def hold(self, slot: int, adapter: str | None, tokens: list[int]) -> None:
        self._contents[slot] = adapter, tokens

    def clear_slot(self, slot: int) -> None:
        self._contents[slot] = None

    def move(self, source: int, target: int) -> None:
        self._contents[target], self._contents[source] = self._contents[source], None

    def forget(self) -> None:
        self._contents = [None] * len(self._contents)

    def find(self, adapter: str | None, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot with the longest common prefix, and its length; 0 if none is worth it."""
        best, longest = 0, 0
        for slot, content in enumerate(self._contents):
            if content is not None and content[0] == adapter:
                length = _matching(content[1], prompt)
                if length > longest:
                    best, longest = slot, length
        longest = min(longest, len(prompt) - 1)
        return (best, longest) if longest >= SHORTEST else (0, 0)


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share, leaving at least one to each; 0 if too few."""
    limit = min(map(len, prompts)) - 1
    shared = limit
    for prompt in prompts[1:]:
        shared = min(shared, _matching(prompts[0], prompt))
    return shared if len(prompts) > 1 and shared >= SHORTEST else 0


def _matching(first: Sequence[int], second: Sequence[int]) -> int:
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(index for index in range(limit) if first[index] != second[index])


MOST_ROWS = 256
"""Beyond this, more rows hardly increase throughput: the products keep the GPU busy."""
SHARE = 0.8
"""Share of the free memory to use; the rest is lost to fragmentation."""
HALF = 2
"""Bytes of a number in 16 bits."""
UNKNOWN_SHAPE_ROWS = 32
"""Rows for a decoder whose sizes are unknown; an out-of-memory error halves them."""
PREFILL_TOKENS = 8192
"""Tokens of prompts that are read in one pass, padding included."""
RECORDED_PREFILLS = (32, 64, 128, 256, 512)
"""Lengths to which a single short prompt is padded on a GPU, so that reading it is one launch."""
FEWEST_COLUMNS = 128
COLUMNS = 64
"""The columns of a cache come in multiples of this."""


@dataclass(frozen=True)
class DecoderSizes:
    """`most` rows run at once. `padded` is for recorded passes, which have a few sizes."""

    most: int = MOST_ROWS
    padded: bool = False

    def rows(self, rows: int) -> int:
        """Rows of a token pass: a power of two if it is recorded."""
        return min(1 << max(rows - 1, 0).bit_length(), self.most) if self.padded else rows

    def columns(self, columns: int) -> int:
        """Columns that a pass reads, if it needs this many."""
        if not self.padded:
            return columns
        power = 1 << max(columns - 1, 0).bit_length()
        bucket = power * 3 // 4 if columns <= power * 3 // 4 else power
        return max(bucket, FEWEST_COLUMNS)

    def room(self, rows: int, columns: int) -> tuple[int, int]:
        """Slots and columns that are reserved for this many rows of this length."""
        return self.rows(min(rows, self.most)), self.columns(columns)

    def token_columns(self, now: int, final: int) -> int:
        """Columns of the next token passes, if `now` are needed and `final` will be."""
        return self.columns(min(final, 2 * now))

    def token_runs(self, prompt: int, answer: int) -> Iterator[tuple[int, int]]:
        """The token passes of rows with this prompt: how many in a row read how many columns. The first token
        comes from reading the prompt."""
        now, last, final = prompt + 1, prompt + answer - 1, prompt + answer
        while now <= last:
            columns = self.token_columns(now, final) if self.padded else now
            end = min(columns, last)
            yield columns, end - now + 1
            now = end + 1

    def recorded_width(self, rows: int, width: int) -> int | None:
        """The width of a recorded pass over prompts; None for a pass that is not recorded."""
        if not self.padded or rows != 1 or width > RECORDED_PREFILLS[-1]:
            return None
        return next(length for length in RECORDED_PREFILLS if length >= width)


def allocated_columns(columns: int) -> int:
    """Columns that a cache allocates for this many, with the one for padding."""
    return -(-(columns + 1) // COLUMNS) * COLUMNS


def cut_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Group the prompts that are read in one pass: of similar length, longest first. A prompt that is longer
    than a pass is alone, and is read in pieces.
    """
    parts: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > PREFILL_TOKENS:
            parts.append([])
        parts[-1].append(index)
    return parts


def rows_that_fit(config: Any, *, prompt_tokens: int, new_tokens: int, free_bytes: int) -> int:
    """Return the rows that fit in 16 bits; a default if the configuration names its sizes differently."""
    heads = _number(config, "num_attention_heads")
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    if heads is None or hidden is None or layers is None:
        return UNKNOWN_SHAPE_ROWS
    width = _number(config, "head_dim") or hidden // heads
    groups = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size") or 4 * hidden
    vocabulary = _number(config, "vocab_size") or 0
    keys = cached_numbers(layers, groups, width) * HALF
    # The states in and out of a layer, its gate, up and their product.
    passing = (4 * hidden + 3 * inner) * HALF
    # Growing copies the keys once.
    a_row = 2 * keys * (prompt_tokens + new_tokens) + passing * prompt_tokens + 4 * vocabulary * HALF
    return max(1, min(MOST_ROWS, int(SHARE * free_bytes) // a_row))


def _number(config: Any, name: str) -> int | None:
    """A positive number, or the largest of one per layer."""
    try:
        configured = getattr(config, name, None)
    except Exception:  # some configurations refuse a name that differs from layer to layer
        return None
    if (
        isinstance(configured, list | tuple)
        and configured
        and all(isinstance(number, int) for number in configured)
    ):
        configured = max(configured)
    return configured if isinstance(configured, int) and configured > 0 else None
