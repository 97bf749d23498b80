"""Threads spin shortly while the machine is contended, and long again when it is not."""

import json
import os
import subprocess
import sys
import threading

import pytest

from graftwork.model.threads import (
    CONTENDED,
    FIRST_HOLD,
    LONGEST_HOLD,
    LOOK_SECONDS,
    Contention,
    SpinGuard,
    waited_seconds,
)
from graftwork.process.worker import WORKER_ENVIRONMENT

SPENDING = """
import json, os, time
import torch
from graftwork.model.threads import SpinGuard, use_threads

use_threads(2)
numbers = torch.ones(2**17)
for _ in range(50):
    numbers.sum()
core = min(os.sched_getaffinity(0))
for task in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(task), {core})

def spend():
    began = time.process_time()
    for _ in range(100):
        numbers.sum()
    return time.process_time() - began

guard, spent = SpinGuard(2), {}
spent["long"] = spend()
guard._hold()
time.sleep(0.2)
spent["short"] = spend()
guard._release()
time.sleep(0.2)
spent["long again"] = spend()
print(json.dumps(spent))
"""


def look(state, now, *, share):
    return state.see(waited=share * LOOK_SECONDS, elapsed=LOOK_SECONDS, now=now)


def test_without_waiting_for_a_core_threads_spin_long():
    state = Contention()
    assert not any(look(state, at * LOOK_SECONDS, share=CONTENDED / 2) for at in range(100))


def test_contention_shortens_spinning_at_the_first_check():
    assert look(Contention(), 1.0, share=1.0)


def test_many_threads_may_wait_more_before_spinning_is_shortened():
    assert not look(Contention(threads=32), 1.0, share=2 * CONTENDED)
    assert look(Contention(threads=32), 1.0, share=6 * CONTENDED)


def test_long_spinning_is_tried_again_after_the_contention():
    state = Contention()
    assert look(state, 1.0, share=1.0)
    assert look(state, 1.0 + FIRST_HOLD / 2, share=0.0)
    assert not look(state, 1.1 + FIRST_HOLD, share=0.0)
    assert not look(state, 1.4 + FIRST_HOLD, share=0.0)


def test_waits_during_short_spinning_do_not_prolong_it():
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


def test_a_system_that_reports_no_waiting_is_left_alone(tmp_path):
    assert waited_seconds(tmp_path / "missing") is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "schedstat").write_text("nothing")
    assert waited_seconds(tmp_path) is None


def test_guard_holds_a_second_pool_of_threads_and_lets_it_go():
    guard = SpinGuard()
    before = set(threading.enumerate())  # those of earlier tests may end at any time
    guard._hold()
    assert guard.holds
    assert len(set(threading.enumerate()) - before) == 1
    guard._release()
    assert not guard.holds
    assert not set(threading.enumerate()) - before


def test_guard_stops_in_order():
    guard = SpinGuard()
    guard.start()
    guard.stop()
    assert not guard.holds


@pytest.mark.skipif(waited_seconds() is None or len(os.sched_getaffinity(0)) < 2, reason="Linux, two cores")
def test_two_threads_on_one_core_do_not_burn_it_while_the_guard_holds():
    """The documented behaviour of libgomp that the guard rests on. Processor time does not depend on load."""
    environment = {**os.environ, **WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", SPENDING], env=environment, capture_output=True, text=True, check=True
    )
    spent = json.loads(done.stdout)
    assert spent["short"] < spent["long"] / 5
    assert spent["short"] < spent["long again"] / 5
