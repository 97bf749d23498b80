"""`graft up` on a small project: a whole cycle, approved by a person, killed, and repeated."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest
from flows import opened

from graftwork.cycle.session import approve_step, decide, plan_cycle, read_status, run_once
from graftwork.records.errors import Busy, GracefulStop
from graftwork.records.interaction import Capture
from graftwork.store.cycles import name_cycle

GRAFT = [sys.executable, "-m", "graftwork.cli.main"]


def aliases(folder):
    with opened(folder) as work:
        return work.releases.aliases()


def test_a_cycle_waits_for_a_person_and_repeats_nothing(small_project, change_settings, listener, tmp_path):
    notes = tmp_path / "notes"
    notify = {"command": f"sh -c 'cat >> {notes}'", "kinds": ["gate", "approval", "promoted"]}
    cycle = {"approve": ["promote"], "collect": "logs/captured.jsonl", "notify": notify}
    change_settings(small_project, cycle=cycle, evaluate={"latency_cases": 20})
    with opened(small_project) as work:
        work.captures.add([capture(number) for number in range(3)])
        plan = plan_cycle(work)
        assert (plan.due, plan.approve, plan.notified) == ("", ("promote",), ("command",))
    with opened(small_project, listener) as work, pytest.raises(GracefulStop, match="promote waits"):
        run_once(work)
    assert len((small_project / "logs" / "captured.jsonl").read_text().splitlines()) == 3
    found = aliases(small_project)
    assert list(found) == ["candidate"]

    with opened(small_project) as work:
        assert read_status(work).next == "promote waits for approval: graft up approve promote"
        approve_step(work, None, why="looked at the report", who="ada")
        ended = run_once(work)
    assert ended.outcome == "promoted"
    assert ended.approvals[0].who == "ada"
    assert aliases(small_project) == {**found, "champion": found["candidate"]}
    kinds = [json.loads(line)["kind"] for line in notes.read_text().replace("}{", "}\n{").splitlines()]
    assert kinds == ["gate", "approval", "promoted"]
    with opened(small_project) as work:
        moves = work.releases.alias_log("champion")
        assert moves[-1].why == "cycle 1, approved by ada"

    # The same data and settings again: nothing is trained.
    with opened(small_project, listener) as work:
        listener.done.clear()
        with pytest.raises(GracefulStop):
            run_once(work)
        decide(work, "cancel", who="ada", why="seen")
        assert read_status(work).history[0].reason == "canceled by ada: seen"
    assert "train" not in listener.done
    assert "train" in listener.skipped


def capture(number):
    messages = [{"role": "user", "content": f"What grows at place {number}?"}]
    return Capture(
        id=f"c{number}",
        at="2026-11-16T10:00:00+00:00",
        release="base",
        session=f"s{number}",
        model="champion",
        finish_reason="stop",
        prompt_tokens=8,
        reply_tokens=8,
        first_token_ms=1.0,
        total_ms=2.0,
        request={"messages": messages},
        reply=json.dumps({"answer": f"Tree {number}.", "citations": [1], "refused": False}),
    )


def test_a_second_coordinator_in_the_folder_is_refused(small_project):
    from graftwork.process.worker import hold_lock

    with opened(small_project) as work, hold_lock(work.project.state / "cycle"), pytest.raises(Busy):
        run_once(work)


def summary(folder):
    """What does not depend on when things happened."""
    with opened(folder) as work:
        (ended,) = work.cycles.history()
        made = work.ledger.get(name_cycle(1, "train")).output
        steps = [(step.name, step.status) for step in ended.steps]
        champion = work.releases.get(work.releases.aliases()["champion"])
        moves = len(work.releases.alias_log("champion"))
        runs = len(work.runs.list())
        return ended.outcome, steps, made["adapter_hash"], champion.adapter_hash, moves, runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_real_cycle_that_is_killed_comes_to_the_same_release(small_project, change_settings, tmp_path):
    import shutil

    change_settings(small_project, train={"epochs": 6}, evaluate={"latency_cases": 20})
    quiet = tmp_path / "quiet" / "project"
    shutil.copytree(small_project, quiet)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*GRAFT, "up", "--once", "--json", "-C"]
    chance = Random(4)
    kills = 0
    while True:
        child = subprocess.Popen(
            [*command, str(small_project)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        try:
            child.wait(timeout=chance.uniform(3, 25) if kills < 8 else 600)
            break
        except subprocess.TimeoutExpired:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            kills += 1
            # A worker that lost its parent stops at a checkpoint by itself.
            threading.Event().wait(0.5)
    assert child.returncode == 0, child.stdout.read()
    assert kills >= 2
    done = subprocess.run([*command, str(quiet)], capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert summary(small_project) == summary(quiet)
    assert not list(Path(small_project / ".graft").rglob("*.part"))
