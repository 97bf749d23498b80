"""A controlling process that is killed with -9 again and again leaves no machine and pays nothing twice."""

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fleet_child import CAPS, RUNS
from fleet_drill import judge_runs
from fleet_simulator import SimulatedProvider, random_faults
from runpod_server import running_runpod

from graftwork.fleet.control import UNSTATED
from graftwork.store.database import open_database
from graftwork.store.fleet import FleetLedger

CHILD = Path(__file__).with_name("fleet_child.py")
NO_EFFECT = {"clock skew", "price rises"}


def run_to_the_end(tmp_path, *, kills, seed):
    """Kill the controller at random moments, then let it finish; returns the provider and the jobs."""
    chance = Random(seed)
    provider = SimulatedProvider(chance=Random(seed), work_seconds=900)
    (tmp_path / "key.pub").write_text("ssh-ed25519 AAAA me@here\n")
    command = [sys.executable, str(CHILD)]
    with running_runpod(provider) as (api, url):
        api.seconds_per_request = 60.0
        left = kills
        while True:
            if left % 5 == 0:
                found = random_faults(chance)
                provider.faults = Counter({kind: n for kind, n in found.items() if kind not in NO_EFFECT})
            child = subprocess.Popen(
                [*command, url, str(tmp_path / "state.db"), str(tmp_path)],
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ,
            )
            try:
                assert child.stdout.readline() == "ready\n"
                if left:
                    threading.Event().wait(chance.uniform(0, 0.3))
                    child.kill()
                output, _ = child.communicate(timeout=300)
            finally:
                child.kill()
            if not left:
                assert output == "done\n"
                break
            left -= 1
    ledger = FleetLedger(open_database(tmp_path / "state.db"), project="kills")
    return provider, ledger.list()


def check(provider, jobs):
    assert provider.alive() == ()
    assert Counter(job.run_id for job in jobs if job.state == "done") == {f"run{n}": 1 for n in range(RUNS)}
    assert not any(job.is_open for job in jobs)
    assert all(job.reason and UNSTATED not in job.reason for job in jobs)
    assert judge_runs((f"run{n}" for n in range(RUNS)), jobs, {}).silent == ()
    assert provider.billed_usd() <= CAPS.month_usd
    billed = Counter()
    for machine in provider.machines:
        billed[machine.label] += machine.billed_usd(provider.now)
    committed = {job.label: job.committed_usd for job in jobs}
    assert all(usd <= committed[label] for label, usd in billed.items())


def test_a_killed_controller_leaves_no_machine(tmp_path):
    check(*run_to_the_end(tmp_path, kills=1, seed=1))


@pytest.mark.slow
def test_a_controller_that_is_killed_a_hundred_times_leaves_no_machine(tmp_path):
    check(*run_to_the_end(tmp_path, kills=100, seed=2))
