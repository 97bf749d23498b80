"""Work on many pieces: in order, on several processes, with an exit that can be read."""

import os
import signal

import pytest

from graftwork.process.pieces import work_in_order
from graftwork.records.errors import EnvironmentFailure, UserError

_said: list[int] = []


def set_offset(offset: int) -> None:
    _said[:] = [offset]


def add_offset(piece: int) -> tuple[int, int]:
    return piece + _said[0], os.getpid()


def refuse_three(piece: int) -> int:
    if piece == 3:
        raise UserError("three is refused")
    return piece


def kill_myself(piece: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return piece


def test_results_come_in_the_order_of_the_pieces_from_other_processes() -> None:
    results = list(
        work_in_order(range(20), add_offset, prepare=set_offset, with_arguments=(100,), processes=2)
    )
    assert [value for value, _ in results] == list(range(100, 120))
    assert os.getpid() not in {process for _, process in results}


def test_a_single_piece_is_worked_on_right_here() -> None:
    [(value, process)] = work_in_order([1], add_offset, prepare=set_offset, with_arguments=(7,), processes=2)
    assert (value, process) == (8, os.getpid())


def test_no_pieces_give_no_results() -> None:
    assert list(work_in_order([], add_offset, processes=2)) == []


def test_an_error_of_the_work_arrives_as_it_was_raised_after_the_results_before_it() -> None:
    results = work_in_order(range(6), refuse_three, processes=2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UserError, match="three is refused"):
        next(results)


def test_a_killed_process_is_an_error_with_a_fix() -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        list(work_in_order(range(4), kill_myself, processes=2))
    assert "again" in caught.value.fix
