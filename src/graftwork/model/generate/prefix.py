"""Which prompt each slot holds the keys of, and where a new prompt finds its beginning."""

from collections.abc import Sequence

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
