"""Rows keep the place at which they were first seen, however the files grow."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from graftwork.data.sight import BlockNow, Order, arrange

BLOCK_ROWS = 3


def blocks_of(files: dict[str, list[str]]) -> list[BlockNow]:
    """Files as blocks of three rows each; a block is named by its rows, as on disk."""
    found = []
    for name, rows in sorted(files.items()):
        for index, start in enumerate(range(0, len(rows), BLOCK_ROWS)):
            held = rows[start : start + BLOCK_ROWS]

            def digest(low: int, high: int, held: list[str] = held) -> str:
                return hashlib.sha256("".join(held[low:high]).encode()).hexdigest()

            found.append(
                BlockNow(
                    file=name,
                    block=index,
                    first_line=1 + start,
                    sifted=digest(0, len(held)),
                    rows=len(held),
                    digest=digest,
                )
            )
    return found


def rows_in_order(files: dict[str, list[str]], order: Order) -> tuple[list[str], Order]:
    segments, after = arrange(blocks_of(files), order)
    rows = [
        files[segment.file][segment.block * BLOCK_ROWS + number]
        for segment in segments
        for number in range(segment.start, segment.stop)
    ]
    return rows, after


names = st.sampled_from("abcd")
additions = st.lists(st.tuples(names, st.integers(1, 7)), min_size=1, max_size=8)


@given(additions)
def test_rows_that_are_added_anywhere_come_behind_all_that_were_seen(steps: list[tuple[str, int]]) -> None:
    files: dict[str, list[str]] = {}
    order, seen, serial = Order(), list[str](), 0
    for name, count in steps:
        fresh = [f"row{serial + offset}" for offset in range(count)]
        serial += count
        files.setdefault(name, []).extend(fresh)
        rows, order = rows_in_order(files, order)
        assert rows[: len(seen)] == seen
        assert sorted(rows[len(seen) :]) == sorted(fresh)
        seen = rows


def test_without_a_remembered_order_rows_are_seen_file_by_file() -> None:
    rows, _ = rows_in_order({"b": ["3", "4"], "a": ["1", "2"]}, Order())
    assert rows == ["1", "2", "3", "4"]


def test_a_row_that_was_changed_in_place_is_new_with_those_behind_it_in_its_block() -> None:
    files = {"a": ["1", "2"], "b": ["3"]}
    _, order = rows_in_order(files, Order())
    rows, _ = rows_in_order({**files, "a": ["1", "x"]}, order)
    assert rows == ["3", "1", "x"]


def test_a_file_that_is_gone_takes_only_its_own_rows_with_it() -> None:
    files = {"a": ["1", "2"], "b": ["3"], "c": ["4"]}
    _, order = rows_in_order(files, Order())
    rows, _ = rows_in_order({"a": files["a"], "c": files["c"]}, order)
    assert rows == ["1", "2", "4"]


def test_the_order_survives_being_written_down() -> None:
    _, order = rows_in_order({"a": ["1", "2", "3", "4"]}, Order())
    assert Order.from_json(order.to_json()) == order
