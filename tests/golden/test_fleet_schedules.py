"""200 schedules of faults at a provider of rented machines: nothing is leaked, every run states its end."""

from collections import Counter
from pathlib import Path

import pytest
from compare import check
from fleet_drill import run_drill

STORED = Path(__file__).parent / "fleet_schedules.json"
SCHEDULES = {"machines": range(100), "jobs": range(100, 200)}
"""Machines are billed until they are ended; jobs end by themselves."""
CENT = 0.01
FINAL = {"done", "failed", "stopped", "lost", "refused"}


@pytest.fixture(scope="module")
def outcomes():
    return {
        (rents, seed): run_drill(seed, rents=rents) for rents, seeds in SCHEDULES.items() for seed in seeds
    }


def test_no_schedule_leaves_a_machine_running_or_a_bill_above_its_cap(outcomes):
    assert len(outcomes) == 200
    for schedule, outcome in outcomes.items():
        assert not outcome.leaked, schedule
        assert not outcome.over_cap, schedule
        assert outcome.spent_usd <= outcome.cap_usd + CENT, schedule
        assert not outcome.paid_twice, schedule


def test_every_job_of_a_schedule_ends_in_a_final_state_and_every_run_says_how(outcomes):
    for schedule, outcome in outcomes.items():
        assert set(outcome.states) <= FINAL, schedule
        assert sum(outcome.states.values()) == outcome.jobs, schedule
        assert not outcome.unfinished, schedule
        assert not outcome.silent, schedule
        assert all(outcome.runs.values()), schedule


def test_the_schedules_hold_every_kind_of_fault_and_crashes(outcomes):
    faults = Counter()
    for outcome in outcomes.values():
        faults.update(outcome.faults)
    assert len(faults) == 14
    assert min(faults.values()) >= 20
    assert sum(outcome.crashes > 0 for outcome in outcomes.values()) >= 150


def test_each_schedule_ends_as_it_did(outcomes, update_golden):
    found = {f"{rents} {seed}": summarize(outcome) for (rents, seed), outcome in outcomes.items()}
    check(STORED, found, update_golden)


def summarize(outcome):
    jobs = ", ".join(f"{count} {state}" for state, count in outcome.states.items())
    runs = Counter(outcome.runs.values())["done"]
    return f"{runs} runs done; jobs: {jobs}; {outcome.crashes} crashes; ${outcome.spent_usd:.2f}"
