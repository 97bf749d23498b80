"""The fastest of many settings that a card's memory has room for, found best first. Pure.

In: settings without their levels (which blocks keep what), what is trained, what the card reaches. Out:
the fastest one, with its levels, that the replayed allocator holds within the limit; or None. Settings
are asked in the order of their seconds, which no limit changes, and a higher limit turns none away that
a lower one let pass (`plan/tuning_room.py`): with more memory the answer is never a slower one. The limit
that a run is to keep may be a little lower than the one that was given.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from graftwork.model.step_memory import Counted, count_by_levels
from graftwork.plan.allocator import LARGE_SEGMENT
from graftwork.plan.timing.card import card_seconds_a_token
from graftwork.plan.timing.rates import Rates
from graftwork.plan.tuning_room import room_with_margin, with_room
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB

GRAIN = 256
"""Passes are counted in whole pages of the allocator, and where much stands, in grains of such a part of it:
what asks for hardly less than one that had no room is not replayed."""


class Trained(NamedTuple):
    """How many blocks have adapters, how many parameters those have, and what the card reaches."""

    adapted: int
    trainable: int
    rates: Rates


class Way:
    """A setting whose levels are open. Seconds are a straight line in each of the two levels."""

    def __init__(self, shape: ModelShape, tuning: Tuning, trained: Trained) -> None:
        self.shape, self.tuning, self.trained = shape, tuning, trained

    def seconds(self, keep: int, lean: int) -> float:
        nothing, keeping, leaning = self._line
        return nothing + keep * keeping + lean * leaning

    @cached_property
    def _line(self) -> tuple[float, float, float]:
        nothing = self.reckon(0, 0)
        return nothing, self.reckon(1, 0) - nothing, self.reckon(0, 1) - nothing

    def reckon(self, keep: int, lean: int) -> float:
        return card_seconds_a_token(
            self.shape,
            self.tuning.model_copy(update={"keep": keep, "lean": lean}),
            adapted=self.trained.adapted,
            trainable=self.trained.trainable,
            rates=self.trained.rates,
        )

    def count(self, keep: int, lean: int) -> Counted:
        """In whole grains."""
        standing, passing = self._count(keep, lean)
        grain = _grain(standing)
        return Counted(standing, -(-passing // grain) * grain)

    @cached_property
    def _count(self) -> Callable[[int, int], Counted]:
        return count_by_levels(
            self.shape, self.tuning, trainable=self.trained.trainable, adapted=self.trained.adapted
        )

    @property
    def kind(self) -> tuple[object, ...]:
        """Ways of one kind load the same onto the card."""
        return self.tuning.head, self.tuning.turned, self.tuning.host_embedding

    @property
    def tokens(self) -> tuple[int, int, int]:
        return self.tuning.micro_tokens, self.tuning.head_tokens, self.tuning.chunk_tokens

    def fullest(self) -> Iterator[tuple[int, int]]:
        """(keep, lean) for each number of blocks that keep: as many lean ones as seem to fit."""
        lean = adapted = self.trained.adapted
        for keep in range(adapted + 1):
            lean = min(lean, adapted - keep)
            while lean >= 0 and not self._seems_to_fit(keep, lean):
                lean -= 1
            if lean < 0:
                return
            yield keep, lean

    def _seems_to_fit(self, keep: int, lean: int) -> bool:
        return self._count(keep, lean).passing <= self._room

    @cached_property
    def _room(self) -> float:
        """For a pass, in whole grains: with the margin that the allocator needs at any rate."""
        standing = self._count(0, 0).standing
        grain = _grain(standing)
        return room_with_margin(self.tuning.limit_gib * GIB - standing) // grain * grain

    def replayed(self, keep: int, lean: int, *, scant: bool = False) -> Tuning | None:
        """With what the allocator would really hold; None where that is more than there is."""
        found = with_room(
            self.shape,
            self.tuning.model_copy(update={"keep": keep, "lean": lean}),
            self.count(keep, lean),
            trainable=self.trained.trainable,
            adapted=self.trained.adapted,
            scant=scant,
        )
        return found and found.model_copy(update={"seconds_a_token": self.reckon(keep, lean)})


def _grain(standing: int) -> int:
    return max(standing // GRAIN // LARGE_SEGMENT, 1) * LARGE_SEGMENT


class Candidate(NamedTuple):
    """In the order of a heap: the fastest first."""

    seconds: float
    way: int
    keep: int
    lean: int
    opened: bool
    """Whether these are levels that seem to fit, or all that the way could ever reach."""


def fastest(shape: ModelShape, settings: Sequence[Tuning], trained: Trained) -> Tuning | None:
    """The fastest that fits, of all settings and levels."""
    ways = [Way(shape, tuning, trained) for tuning in settings]
    failed, most, least = Failed(), trained.adapted, smallest(ways)
    heap = [Candidate(way.reckon(most, 0), at, most, 0, False) for at, way in enumerate(ways)]
    heap += [Candidate(ways[at].seconds(0, 0), at, 0, 0, True) for at in least]
    heapq.heapify(heap)
    while heap:
        best = heapq.heappop(heap)
        way = ways[best.way]
        if not best.opened:
            for keep, lean in way.fullest():
                heapq.heappush(heap, Candidate(way.seconds(keep, lean), best.way, keep, lean, True))
            continue
        counted = way.count(best.keep, best.lean)
        scant = best.way in least and best.keep + best.lean == 0
        if scant or not failed.foretell(way, counted):
            least -= {best.way} if scant else set()
            found = way.replayed(best.keep, best.lean, scant=scant)
            if found is not None:
                return found
            failed.add(way, counted)
        if best.lean:
            fewer = best.lean - 1
            heapq.heappush(heap, best._replace(seconds=way.seconds(best.keep, fewer), lean=fewer))
    return None


def smallest(ways: Sequence[Way]) -> set[int]:
    """Of each kind the one with the fewest tokens at a time: it is asked in its turn even where the margin of
    the allocator has no room, and whatever failed before. Of each, since more memory lets more kinds load."""
    found: dict[tuple[object, ...], int] = {}
    for at in sorted(range(len(ways)), key=lambda at: ways[at].tokens):
        found.setdefault(ways[at].kind, at)
    return set(found.values())


class Failed:
    """What had no room. Of the same kind, what asks for no less has none either and is not replayed.

    That keeps the promise of this module: under a lower limit whoever failed here had no room, and was asked
    before, too, if any that asks for no less was, so that nothing is passed over here that was taken there.
    """

    def __init__(self) -> None:
        self._by_kind: dict[tuple[object, ...], list[Counted]] = {}

    def add(self, way: Way, counted: Counted) -> None:
        self._by_kind.setdefault(way.kind, []).append(counted)

    def foretell(self, way: Way, counted: Counted) -> bool:
        # What stands counts by itself: who has more of it may not even seem to fit where the other does.
        return any(
            one.standing <= counted.standing and one.passing <= counted.passing
            for one in self._by_kind.get(way.kind, ())
        )
