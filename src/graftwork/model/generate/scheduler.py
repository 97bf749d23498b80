"""Continuous batching: which request has which slot, and which comes next.

In: requests, each of a group; those that ended. Out: the requests to start, in the order in which they came,
and the moves that bring the running ones together. Requests of two groups never run at once: a group needs
other weights. What each slot holds the keys of is known here, and where a new prompt finds its beginning.
Knows no tensors.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

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
        """Slots up to the last that runs."""
        return max((slot + 1 for slot, row in enumerate(self._rows) if row is not None), default=0)

    @property
    def running(self) -> int:
        return sum(row is not None for row in self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def group(self) -> Hashable:
        """The group of those that run."""
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
        """Give free slots to those that wait, the oldest first. None overtakes one of another group."""
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
        """Move the last rows into free slots until all are in the first `to`: from where, and to where."""
        limit = self.running if to is None else max(to, self.running)
        moves: list[tuple[int, int]] = []
        while (used := self.used) > limit:
            target = next(slot for slot, row in enumerate(self._rows) if row is None)
            moves.append((used - 1, target))
            self._rows[target], self._rows[used - 1] = self._rows[used - 1], None
        return moves

    def clear(self) -> list[R]:
        """Forget all; which they were."""
        forgotten = [row for row in self._rows if row is not None] + list(self._waiting)
        self._rows = [None] * len(self._rows)
        self._waiting.clear()
        return forgotten


SHORTEST = 16
"""Beginnings shorter than this are computed again: a copy costs a launch for each row."""


class SlotContents:
    def __init__(self, slots: int) -> None:
        self._held: list[tuple[str | None, list[int]] | None] = [None] * slots

    def hold(self, slot: int, adapter: str | None, tokens: list[int]) -> None:
        self._held[slot] = adapter, tokens

    def clear_slot(self, slot: int) -> None:
        self._held[slot] = None

    def move(self, source: int, target: int) -> None:
        self._held[target], self._held[source] = self._held[source], None

    def forget(self) -> None:
        self._held = [None] * len(self._held)

    def find(self, adapter: str | None, prompt: Sequence[int]) -> tuple[int, int]:
        """The slot with the longest common beginning, and its length; 0 where there is none worth it."""
        best, longest = 0, 0
        for slot, held in enumerate(self._held):
            if held is not None and held[0] == adapter:
                length = _matching(held[1], prompt)
                if length > longest:
                    best, longest = slot, length
        longest = min(longest, len(prompt) - 1)
        return (best, longest) if longest >= SHORTEST else (0, 0)


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many first tokens all prompts share, leaving at least one to each; 0 where it is hardly any."""
    limit = min(map(len, prompts)) - 1
    shared = limit
    for prompt in prompts[1:]:
        shared = min(shared, _matching(prompts[0], prompt))
    return shared if len(prompts) > 1 and shared >= SHORTEST else 0


def _matching(first: Sequence[int], second: Sequence[int]) -> int:
    limit = min(len(first), len(second))
    if first[:limit] == second[:limit]:
        return limit
    return next(place for place in range(limit) if first[place] != second[place])
