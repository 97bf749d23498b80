"""Rows keep the place at which they were first seen, however the files grow, move and change."""

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.corpus.build import find_places, order_rows
from graftwork.data.corpus.store import Segment

BLOCK_ROWS = 3
NOTHING = np.zeros(0, dtype=np.uint64)


def key_of(row: str) -> int:
    return int.from_bytes(hashlib.sha256(row.encode()).digest()[:8])


def blocks_of(files):
    """Files as blocks of three rows each, and the keys of each block's rows."""
    blocks, keys = [], []
    for name, rows in sorted(files.items()):
        for number, start in enumerate(range(0, max(len(rows), 1), BLOCK_ROWS)):
            blocks.append(Segment(name, number, 1 + start, f"{name}{number}", 0, 0))
            block = rows[start : start + BLOCK_ROWS]
            keys.append(np.array([key_of(row) for row in block], dtype=np.uint64))
    return blocks, keys


def rows_in_order(files, known):
    segments, order = order_rows(*blocks_of(files), known)
    rows = [
        files[segment.file][segment.block * BLOCK_ROWS + number]
        for segment in segments
        for number in range(segment.start, segment.stop)
    ]
    assert order.tolist() == [key_of(row) for row in rows]
    return rows, order


names = st.sampled_from("abcd")
additions = st.lists(st.tuples(names, st.integers(1, 7)), min_size=1, max_size=8)


@given(additions)
def test_rows_that_are_added_anywhere_come_behind_all_that_were_seen(steps):
    files: dict[str, list[str]] = {}
    order, seen, serial = NOTHING, [], 0
    for name, count in steps:
        fresh = [f"row{serial + offset}" for offset in range(count)]
        serial += count
        files.setdefault(name, []).extend(fresh)
        rows, order = rows_in_order(files, order)
        assert rows[: len(seen)] == seen
        assert sorted(rows[len(seen) :]) == sorted(fresh)
        seen = rows


@given(st.lists(st.lists(st.sampled_from("uvwxyz"), max_size=9), min_size=1, max_size=4), st.data())
def test_every_row_is_there_once_whatever_was_known(files, data):
    named = dict(zip("abcd", files, strict=False))
    rows = [row for name in sorted(named) for row in named[name]]
    known = np.array([key_of(row) for row in data.draw(st.permutations(rows))], dtype=np.uint64)
    found, _ = rows_in_order(named, known)
    assert sorted(found) == sorted(rows)


def test_without_a_remembered_order_rows_are_seen_file_by_file():
    rows, _ = rows_in_order({"b": ["3", "4"], "a": ["1", "2"]}, NOTHING)
    assert rows == ["1", "2", "3", "4"]


def test_a_rotated_log_keeps_its_rows_where_they_stood():
    files = {"a": ["1", "2", "3", "4"], "b": ["5"]}
    before, order = rows_in_order(files, NOTHING)
    after, _ = rows_in_order({"a": ["6"], "b": ["5"], "c": ["1", "2", "3", "4"]}, order)
    assert after == [*before, "6"]


def test_a_line_that_was_changed_is_new_and_the_others_stay():
    files = {"a": ["1", "2", "3"], "b": ["4"]}
    _, order = rows_in_order(files, NOTHING)
    rows, _ = rows_in_order({**files, "a": ["1", "x", "3"]}, order)
    assert rows == ["1", "3", "4", "x"]


def test_a_file_that_is_gone_takes_only_its_own_rows_with_it():
    files = {"a": ["1", "2"], "b": ["3"], "c": ["4"]}
    _, order = rows_in_order(files, NOTHING)
    rows, _ = rows_in_order({"a": files["a"], "c": files["c"]}, order)
    assert rows == ["1", "2", "4"]


def test_the_second_of_two_equal_lines_is_new_where_only_one_was_known():
    _, order = rows_in_order({"b": ["1", "2"]}, NOTHING)
    rows, _ = rows_in_order({"a": ["1"], "b": ["1", "2"]}, order)
    assert rows == ["1", "2", "1"]


def test_a_log_that_was_shuffled_beyond_reading_is_seen_file_by_file_again():
    rows = [str(number) for number in range(6000)]
    _, order = order_rows(*blocks_of({"a": rows}), NOTHING)
    shuffled = [rows[number * 7 % 6000] for number in range(6000)]
    keys = np.array([key_of(row) for row in shuffled], dtype=np.uint64)
    segments, _ = order_rows([Segment("a", 0, 1, "a0", 0, 0)], [keys], order)
    assert len(segments) == 1


def test_a_block_without_a_readable_row_is_not_forgotten():
    segments, _ = order_rows(*blocks_of({"a": [], "b": ["1"]}), NOTHING)
    assert {(segment.file, segment.stop) for segment in segments} == {("a", 0), ("b", 1)}


def test_places_are_those_of_the_same_key_or_none():
    known = np.array([5, 9, 5], dtype=np.uint64)
    assert find_places(np.array([9, 5, 5, 5, 1], dtype=np.uint64), known).tolist() == [1, 0, 2, -1, -1]
