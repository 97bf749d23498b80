"""A run that outlives its terminal, is followed, stopped and gone on with; and one that ran out of memory."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import typer
from flows import GRAFT, graft, opened, run_folder, wait_for_worker

from graftwork.cli import run as commands
from graftwork.pipeline.table import run_pipeline
from graftwork.process import local_workers
from graftwork.process.worker import hold_lock, lock_holder
from graftwork.records.run import TrainOutcome
from graftwork.train import runs


def output_of(done):
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


@pytest.fixture
def detached(released_project, change_settings):
    """A run in the background, started from a terminal that has hung up since."""
    change_settings(released_project, train={"epochs": 2000, "checkpoint_every": 10})
    terminal = subprocess.Popen(
        [*GRAFT, "train", "--detach", "--json", "-C", str(released_project)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    reported, _ = terminal.communicate()
    assert terminal.returncode == 0, reported
    # Processes still in the terminal's session get the signal of a closed window.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(terminal.pid, signal.SIGHUP)
    yield released_project, json.loads(reported)
    graft(released_project, "stop", "--now")


def test_a_run_outlives_its_terminal_is_followed_to_its_end_and_stopped_in_order(detached):
    folder, started = detached
    assert started["state"] == "started"
    assert lock_holder(folder / ".graft" / "pipeline") == started["pid"]
    follower = subprocess.Popen(
        [*GRAFT, "logs", "-f", "--json", "-C", str(folder)], stdout=subprocess.PIPE, text=True
    )
    events = [json.loads(follower.stdout.readline())]
    while sum(event["kind"] == "step" for event in events) < 3:
        assert follower.poll() is None
        events.append(json.loads(follower.stdout.readline()))

    run = output_of(graft(folder, "status", "--json"))["runs"][0]
    assert (run["id"], run["state"]) == (started["run"], "running")
    assert run["health"] in ("working", "slow")
    assert run["reason"]
    assert run["expected_step_seconds"] > 0
    assert run["measured_step_seconds"] > 0
    again = output_of(graft(folder, "train", "--detach", "--json"))
    assert (again["state"], again["run"], again["pid"]) == ("already running", run["id"], started["pid"])

    stopped = output_of(graft(folder, "stop", "--json"))
    assert (stopped["state"], stopped["run_state"], stopped["run"]) == ("stopped", "stopped", run["id"])
    assert stopped["done"] >= 3
    rest, _ = follower.communicate()
    assert follower.returncode == 75
    events += [json.loads(line) for line in rest.splitlines()]
    assert {"step", "checkpoint"} <= {event["kind"] for event in events}
    saved = max(event["step"] for event in events if event["kind"] == "checkpoint")
    assert saved == max(event["step"] for event in events if event["kind"] == "step")
    whole = graft(folder, "logs", "--json")
    times = [json.loads(line)["at"] for line in whole.stdout.splitlines()]
    assert times == sorted(times)

    idle = graft(folder, "stop")
    assert idle.returncode == 0
    assert "nothing to stop" in idle.stdout
    plain = graft(folder, "logs", "--run", run["id"][:6])
    assert plain.returncode == 0
    assert "loss" in plain.stdout
    assert graft(folder, "logs", "--run", "nonsense").returncode == 2


def test_who_follows_a_run_that_is_about_to_be_entered_waits_for_it(small_project, listener, monkeypatch):
    looked, codes = threading.Event(), []

    def find_processes(*asked, find=runs.find_processes):
        looked.set()
        return find(*asked)

    def follow():
        with pytest.raises(typer.Exit) as ended:
            commands.logs(small_project, follow=True, json=True)
        codes.append(ended.value.exit_code)

    monkeypatch.setattr(runs, "find_processes", find_processes)
    follower = threading.Thread(target=follow)
    with opened(small_project, listener) as work:
        with hold_lock(work.project.state / "pipeline"):
            follower.start()
            while not looked.wait(0.05):
                assert follower.is_alive(), "it did not wait"
            work.runs.create("run-1", folder=str(work.project.runs / "run-1"), plan={}, when="")
            work.runs.update("run-1", state="done", when="")
        follower.join()
    assert codes == [0]


def test_a_run_is_killed_at_once_when_asked_so(detached):
    folder, started = detached
    running = folder / ".graft" / "runs" / started["run"]
    wait_for_worker(running, alive=True)
    assert output_of(graft(folder, "stop", "--now", "--json"))["state"] == "killed"
    assert lock_holder(running) is None
    assert lock_holder(folder / ".graft" / "pipeline") is None
    assert output_of(graft(folder, "status", "--json"))["runs"][0]["state"] == "stopped"
    follower = graft(folder, "logs", "-f")
    assert follower.returncode == 75


def test_without_a_run_logs_and_stop_say_so(small_project):
    none = graft(small_project, "logs", "-f", "--json")
    assert none.returncode == 2
    assert "no run yet" in json.loads(none.stdout)["what"]
    assert output_of(graft(small_project, "stop", "--json")) == {
        "state": "not running",
        "run": None,
        "run_state": None,
        "done": None,
        "total": None,
    }


def test_a_run_that_is_out_of_memory_is_replanned_and_goes_on(released_project, listener, monkeypatch):
    shutil.rmtree(run_folder(released_project))
    start = local_workers.start_child
    monkeypatch.setattr(
        local_workers,
        "start_child",
        lambda order: start(order.model_copy(update={"module": "greedy_worker"})),
    )
    with opened(released_project, listener) as work:
        outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
        (run,) = work.runs.list()
    folder = Path(run.folder)
    assert (run.id, run.state) == (outcome.run_id, "done")
    assert outcome.settings["micro_rows"] == 2
    assert outcome.restarts == 1
    assert outcome.replay_identical is None
    assert any("continuing with 2 row(s) at a time" in word for word in listener.words)
    kept = json.loads((folder / "replanned.json").read_text())
    assert kept["measured"]["asked_gib"] == 1.0
    assert [json.loads(line)["kind"] for line in (folder / "alerts.jsonl").read_text().splitlines()] == [
        "out_of_memory"
    ]
