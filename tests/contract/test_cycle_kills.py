"""Coordinators that are killed with -9, frozen, or share a database: no step is lost or doubled."""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from new_database import new_database

from graftwork.cycle.settings import CYCLE_STEPS
from graftwork.cycle.state import CoordinatorState, LogEntry, begin, cancel
from graftwork.records.errors import Busy, EnvironmentFailure
from graftwork.store.cycles import CycleTable
from graftwork.store.database import open_database
from graftwork.store.runs import StepLedger
from graftwork.store.schema import steps

CHILD = Path(__file__).with_name("cycle_child.py")
DONE = [step for step in CYCLE_STEPS if step != "canary"]


def start(url, folder, place, *, cycles, seconds, lease=1):
    child = subprocess.Popen(
        [sys.executable, str(CHILD), url, str(folder), place, str(cycles), str(seconds), str(lease)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert child.stdout.readline() == "ready\n"
    return child


def journal(folder):
    """Step, place and process of every beginning."""
    path = folder / "journal"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def final_state(url):
    """What does not depend on when things happened."""
    store = CycleTable(open_database(url), project="kills")
    return [
        (
            cycle.number,
            cycle.outcome,
            cycle.reason,
            [(step.name, step.status, step.summary) for step in cycle.steps],
        )
        for cycle in store.history()
    ]


def check_effects(folder, cycles):
    effects = {path.name for path in (folder / "effects").iterdir()}
    assert effects == {f"{number:03d}-{step}" for number in range(1, cycles + 1) for step in DONE}


def run_killed(url, folder, *, kills, cycles, seed):
    """Kill the coordinator at random moments, then let it finish; how often it was killed within a step."""
    chance = Random(seed)
    for _ in range(kills):
        child = start(url, folder, "here", cycles=cycles, seconds=0.03)
        threading.Event().wait(chance.uniform(0, 0.25))
        child.kill()
        child.communicate()
    child = start(url, folder, "here", cycles=cycles, seconds=0.0)
    assert child.communicate(timeout=300)[0] == "done\n"


def compare_with_unkilled(tmp_path, *, kills, cycles, seed):
    for name in ("killed", "quiet"):
        (tmp_path / name).mkdir()
    urls = {name: f"sqlite:///{tmp_path / name / 'state.db'}" for name in ("killed", "quiet")}
    run_killed(urls["killed"], tmp_path / "killed", kills=kills, cycles=cycles, seed=seed)
    run_killed(urls["quiet"], tmp_path / "quiet", kills=0, cycles=cycles, seed=seed)
    check_effects(tmp_path / "killed", cycles)
    assert final_state(urls["killed"]) == final_state(urls["quiet"])


def test_a_killed_coordinator_goes_on_without_losing_or_doubling_a_step(tmp_path):
    compare_with_unkilled(tmp_path, kills=3, cycles=1, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_coordinator_that_is_killed_a_hundred_times_comes_to_the_same_state(tmp_path):
    compare_with_unkilled(tmp_path, kills=100, cycles=20, seed=2)


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.slow), "postgresql"])
def test_two_coordinators_on_one_database_do_each_step_once(request, tmp_path, kind):
    url = new_database(kind, request=request, folder=tmp_path)
    # A coordinator that a busy machine holds up for longer than its lease would rightly lose its step.
    pair = [start(url, tmp_path, place, cycles=3, seconds=0.02, lease=600) for place in ("a", "b")]
    assert [child.communicate(timeout=300)[0] for child in pair] == ["done\n"] * 2
    begun = journal(tmp_path)
    assert Counter(key for key, *_ in begun) == {f"{n:03d}-{step}": 1 for n in (1, 2, 3) for step in DONE}
    check_effects(tmp_path, 3)


def test_the_other_coordinator_takes_over_when_one_is_killed(request, tmp_path):
    url = new_database("postgresql", request=request, folder=tmp_path)
    # It is killed, and must not come to the end of the step before, however long that takes.
    first = start(url, tmp_path, "a", cycles=1, seconds=3000)
    wait_for_begin(tmp_path, 1)
    first.kill()
    first.communicate()
    second = start(url, tmp_path, "b", cycles=1, seconds=0)
    assert second.communicate(timeout=300)[0] == "done\n"
    assert [place for key, place, _ in journal(tmp_path) if key == "001-collect"] == ["a", "b"]
    check_effects(tmp_path, 1)


def test_a_frozen_coordinator_that_wakes_up_changes_nothing(request, tmp_path):
    url = new_database("postgresql", request=request, folder=tmp_path)
    first = start(url, tmp_path, "a", cycles=1, seconds=0.3)
    wait_for_begin(tmp_path, 3)
    freeze(first, url)
    second = start(url, tmp_path, "b", cycles=1, seconds=0)
    assert second.communicate(timeout=300)[0] == "done\n"
    before = final_state(url)
    first.send_signal(signal.SIGCONT)
    assert first.communicate(timeout=300)[0] == "done\n"
    assert final_state(url) == before
    check_effects(tmp_path, 1)


def freeze(child, url):
    """Not in the middle of a transaction: that one ends when the server loses patience with it."""
    while True:
        child.send_signal(signal.SIGSTOP)
        database = open_database(url, wait_seconds=1.0)
        try:
            with database.write():
                return
        except Busy:
            child.send_signal(signal.SIGCONT)
        finally:
            database.close()


def wait_for_begin(folder, count):
    for _ in range(30_000):
        if len(journal(folder)) >= count:
            return
        threading.Event().wait(0.01)
    raise AssertionError("nothing was begun")


def test_the_state_comes_back_as_it_was_stored(database):
    store = CycleTable(database, project="p")
    assert store.read() == CoordinatorState()
    made = store.change(
        lambda state: begin(state, model="main", cause="by hand", now=5.0, steps=("a", "b"), version="1")
    )
    assert store.read() == made
    assert store.history() == ()
    store.change(lambda state: cancel(state, LogEntry(at=6.0, who="Zoë", action="cancel", why="☂")))
    assert [(cycle.number, cycle.reason) for cycle in store.history()] == [(1, "canceled by Zoë: ☂")]
    assert CycleTable(database, project="q").read() == CoordinatorState()


def test_what_steps_of_a_cycle_made_is_no_cycle(database):
    store = CycleTable(database, project="p")
    StepLedger(database, project="p").put(
        "cycle/000001/plan", fingerprint="f", output={}, finished_at="", seconds=0.0
    )
    assert store.history() == ()


def test_a_change_that_fails_leaves_the_state_as_it_was(database):
    store = CycleTable(database, project="p")

    def broken(_state):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        store.change(broken)
    assert store.read() == CoordinatorState()


def test_a_state_of_a_later_version_is_refused(database):
    with database.write() as connection:
        values = {"project": "p", "step": "cycle", "fingerprint": "9", "finished_at": "", "seconds": 0.0}
        connection.execute(steps.insert().values(output={"format": 9}, **values))
    with pytest.raises(EnvironmentFailure, match="newer graftwork"):
        CycleTable(database, project="p").read()
