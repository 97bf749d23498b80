"""Whether a card's memory has room for one setting: yes once is yes for every card with more. Pure.

In: a decoder's shape, a setting with its levels and the limit, what is trained. Out: the setting with the
limit that the run is to keep and what it reserves then; or None. That the replayed allocator gets along
with some limit does not mean that it does with a higher one: pressed earlier, it gives back earlier what
it only kept, and may lay things out better. So a setting is tried under limits of its own, which do not
depend on what there is (`own_limits`). It fits where one of them that is no higher than the limit has
room, or where the limit is so high that it never presses: both stay true when the limit grows.
"""

import math
from collections.abc import Iterator

from graftwork.model.step_memory import SLACK, Counted
from graftwork.model.step_walk import WORKSPACE, hold_recording, hold_states, take_pass, walk_of
from graftwork.plan.allocator import LARGE_SEGMENT, ROUND_LARGE
from graftwork.plan.memory_card import SPARE, reserved_within
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB, MIB

WITHOUT_END = float(2**20)
"""GiB: a limit that nothing presses against."""
PARTS = 64
BEYOND = (0, 2, 6, 14, 30, 64)
"""How far own limits lie above the one with a margin for the allocator, in parts of what a pass asks for."""
WITHIN = (0, 1, 2, 3)
"""How far own limits lie within that margin, in fourths of it."""
PART_FILLED = 32 * MIB
"""What the allocator's pages hold at the least beyond what is asked of them: such a replay is saved."""
HUNDREDTHS = 100
"""Own limits are in whole hundredths of a GiB, as project files state them."""


def with_room(
    shape: ModelShape, tuning: Tuning, counted: Counted, *, trainable: int, adapted: int, scant: bool
) -> Tuning | None:
    """`counted` is what the setting asks for; `scant`: it is also tried without the allocator's margin."""
    limit = tuning.limit_gib
    pressing = _largest(shape, tuning, trainable=trainable, adapted=adapted) + SPARE

    def under(limit_gib: float) -> Tuning | None:
        there = tuning.model_copy(update={"limit_gib": limit_gib})
        reserved = reserved_within(shape, there, trainable=trainable, adapted=adapted)
        return None if reserved is None else there.model_copy(update={"peak_gib": reserved / GIB})

    if with_margin(counted) + pressing <= limit * GIB:
        free = under(WITHOUT_END)
        if free is not None and free.peak_gib * GIB + pressing <= limit * GIB:
            return free.model_copy(update={"limit_gib": limit})
    for own in sorted({own for own in own_limits(counted, scant=scant) if own <= limit}, reverse=True):
        found = under(own)
        if found is not None:
            # All that there is, where that is much more and the allocator gets along with it, too.
            much = (limit - own) * GIB > 2 * counted.passing / PARTS
            return (under(limit) if much else None) or found
    return None


def room_with_margin(left: float) -> float:
    """What a pass may ask for, of what is left beside all that stands, to be worth a replay."""
    return min(left / SLACK, left - SPARE - PART_FILLED)


def with_margin(counted: Counted) -> float:
    """The same from the other side: the least limit under which a setting is worth one."""
    return counted.standing + max(SLACK * counted.passing, counted.passing + SPARE + PART_FILLED)


def own_limits(counted: Counted, *, scant: bool) -> Iterator[float]:
    """In GiB, from the lowest on: always the same ones for what asks for the same."""
    base = with_margin(counted)
    if scant:
        least = counted.asked + SPARE
        yield from (_hundredths(least + (base - least) * part / 4) for part in WITHIN)
    yield from (_hundredths(base + counted.passing * parts / PARTS) for parts in BEYOND)


def _hundredths(limit: float) -> float:
    return math.ceil(limit * HUNDREDTHS / GIB) / HUNDREDTHS


def _largest(shape: ModelShape, tuning: Tuning, *, trainable: int, adapted: int) -> int:
    """The most that the allocator wants of the card at once."""
    walk, memory = walk_of(shape, tuning, trainable=trainable, adapted=adapted), Largest()
    memory.alloc(WORKSPACE)
    hold_recording(memory, walk)
    hold_states(memory, walk.sizes, walk.adapted)
    take_pass(memory, walk, keep_gradients=False)
    return max(-(-memory.most // ROUND_LARGE) * ROUND_LARGE, LARGE_SEGMENT)


class Largest:
    """A memory that only remembers the most that was asked for at once."""

    def __init__(self) -> None:
        self.most = 0

    def alloc(self, size: int) -> None:
        self.most = max(self.most, size)

    def free(self, block: None) -> None:
        pass
