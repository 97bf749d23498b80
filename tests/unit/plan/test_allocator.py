"""The replayed allocator: it never holds less than is used, gives everything back, and keeps its limit."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.costmodel.allocator import Allocator, AllocatorLimitExceeded
from graftwork.records.base import MIB

SIZES = st.one_of(st.integers(1, 4096), st.integers(4096, 4 * MIB), st.integers(4 * MIB, 200 * MIB))
MOVES = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=80)


def play(allocator, moves):
    """Allocate, or free one of those that are there; after each move what must always hold."""
    held = []
    for wants, size, which in moves:
        if wants or not held:
            held.append(allocator.alloc(size))
        else:
            allocator.free(held.pop(which % len(held)))
        assert allocator.allocated == sum(block.size for block in held)
        assert allocator.reserved >= allocator.allocated
        places = sorted((id(b.pool), b.start, b.start + b.size) for b in held)
        for (pool, _, end), (other, begin, _) in pairwise(places):
            assert pool != other or begin >= end
    return held


@given(MOVES, st.booleans())
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_never_exceed_what_is_reserved(moves, expandable):
    play(Allocator(expandable=expandable), moves)


@given(MOVES, MOVES, st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_copy_goes_on_as_its_original_does(before, after, expandable):
    original, figures = Allocator(expandable=expandable), []
    play(original, before)
    original.empty_cache()
    for allocator in (original.copy_without_handles(), original.copy_without_handles(), original):
        held = []
        for wants, size, which in after:
            if wants or not held:
                held.append(allocator.alloc(size))
            else:
                allocator.free(held.pop(which % len(held)))
            figures.append((allocator.allocated, allocator.allocated_peak, allocator.reserved_peak))
    assert figures == 3 * figures[: len(after)]


@given(MOVES, st.booleans())
@settings(max_examples=100, deadline=None)
def test_when_all_is_freed_nothing_is_allocated_and_nothing_stays_reserved(moves, expandable):
    allocator = Allocator(expandable=expandable)
    for block in play(allocator, moves):
        allocator.free(block)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@given(MOVES, st.booleans())
@settings(max_examples=100, deadline=None)
def test_peaks_only_grow_and_hold_what_was_there(moves, expandable):
    allocator = Allocator(expandable=expandable)
    before = (0, 0)
    held = []
    for wants, size, which in moves:
        if wants or not held:
            held.append(allocator.alloc(size))
        else:
            allocator.free(held.pop(which % len(held)))
        now = (allocator.allocated_peak, allocator.reserved_peak)
        assert now[0] >= max(before[0], allocator.allocated)
        assert now[1] >= max(before[1], allocator.reserved)
        before = now


@given(MOVES, st.booleans(), st.integers(2, 400))
@settings(max_examples=100, deadline=None)
def test_a_limit_is_never_passed_by_more_than_a_page(moves, expandable, limit):
    allocator = Allocator(expandable=expandable, limit=limit * MIB)
    with suppress(AllocatorLimitExceeded):
        play(allocator, moves)
    # Pages are whole: the last of them may reach beyond.
    assert allocator.reserved_peak < limit * MIB + 20 * MIB
    assert allocator.allocated_peak <= limit * MIB + 20 * MIB


@given(MOVES)
@settings(max_examples=80, deadline=None)
def test_given_back_and_taken_again_is_the_same_memory(moves):
    """What was returned to the card leaves holes, which are filled again."""
    allocator = Allocator()
    held = play(allocator, moves)
    sizes = [block.size for block in held[::2]]
    for block in held[::2]:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved >= allocator.allocated
    again = [allocator.alloc(size) for size in sizes]
    assert allocator.reserved >= allocator.allocated
    for block in (*again, *held[1::2]):
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == 0


@pytest.mark.parametrize(
    ("expandable", "size", "reserved"),
    [
        (False, 1, 2),
        (False, MIB, 2),
        (False, MIB + 1, 20),
        (False, 10 * MIB, 10),
        (False, 11 * MIB - 1, 12),
        (True, 1, 2),
        (True, MIB + 1, 20),
        (True, 21 * MIB, 40),
    ],
)
def test_one_allocation_reserves_what_torch_reserves(expandable, size, reserved):
    allocator = Allocator(expandable=expandable)
    allocator.alloc(size)
    assert allocator.reserved == reserved * MIB


def test_a_range_grows_by_what_is_missing_behind_its_free_end():
    allocator = Allocator()
    allocator.free(allocator.alloc(30 * MIB))
    assert allocator.reserved == 40 * MIB
    allocator.alloc(50 * MIB)
    assert allocator.reserved == 60 * MIB


def test_without_ranges_a_freed_piece_that_is_too_small_stays_next_to_the_new_one():
    allocator = Allocator(expandable=False)
    allocator.free(allocator.alloc(30 * MIB))
    allocator.alloc(50 * MIB)
    assert allocator.reserved == 80 * MIB
