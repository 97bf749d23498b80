"""Threads spin shortly while the machine is contended, and long again when it is not."""

import threading

from graftwork.model.threads import (
    CONTENDED,
    FIRST_HOLD,
    LONGEST_HOLD,
    LOOK_SECONDS,
    Contention,
    SpinGuard,
    waited_seconds,
)


def look(state, now, *, share):
    return state.see(waited=share * LOOK_SECONDS, elapsed=LOOK_SECONDS, now=now)


def test_without_waiting_for_a_core_threads_spin_long():
    state = Contention()
    assert not any(look(state, at * LOOK_SECONDS, share=CONTENDED / 2) for at in range(100))


def test_contention_shortens_spinning_at_the_first_look():
    assert look(Contention(), 1.0, share=1.0)


def test_long_spinning_is_tried_again_after_the_contention():
    state = Contention()
    assert look(state, 1.0, share=1.0)
    assert look(state, 1.0 + FIRST_HOLD / 2, share=0.0)
    assert not look(state, 1.1 + FIRST_HOLD, share=0.0)
    assert not look(state, 1.4 + FIRST_HOLD, share=0.0)


def test_what_was_waited_with_short_spinning_does_not_prolong_it():
    state = Contention()
    assert look(state, 1.0, share=1.0)
    assert not look(state, 1.1 + FIRST_HOLD, share=1.0)


def test_a_neighbour_that_stays_is_tried_less_and_less_often():
    state, now, tries = Contention(), 0.0, 0
    while now < 300:
        now += LOOK_SECONDS
        tries += not look(state, now, share=1.0)
    assert tries < 300 / LONGEST_HOLD + 6


def test_waiting_for_a_core_is_read_for_every_thread(tmp_path):
    for task, waited in (("1", 2_000_000_000), ("2", 500_000_000)):
        (tmp_path / task).mkdir()
        (tmp_path / task / "schedstat").write_text(f"123 {waited} 7\n")
    assert waited_seconds(tmp_path) == 2.5


def test_a_system_that_tells_no_waiting_is_left_alone(tmp_path):
    assert waited_seconds(tmp_path / "missing") is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("nothing")
    assert waited_seconds(tmp_path) is None


def test_guard_holds_a_second_pool_of_threads_and_lets_it_go():
    guard = SpinGuard()
    before = threading.active_count()
    guard._hold()
    assert guard.holds
    assert threading.active_count() == before + 1
    guard._release()
    assert not guard.holds
    assert threading.active_count() == before


def test_guard_stops_in_order():
    guard = SpinGuard()
    guard.start()
    guard.stop()
    assert not guard.holds
