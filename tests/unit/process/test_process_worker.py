"""One worker a folder, a heartbeat that is true, an exit that can be read."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from graftwork.files.disk import Journal
from graftwork.process import heartbeat
from graftwork.process.heartbeat import Heart, read_beat
from graftwork.process.worker import PARENT_VARIABLE, hold_lock, lock_holder
from graftwork.records.errors import Busy
from graftwork.records.fleet import Vitals

WORKER = """
import signal
import sys
import threading
from pathlib import Path
from graftwork.process.worker import run_worker, stop_asked, stop_at_once
from graftwork.records.errors import GracefulStop, UserError
from graftwork.records.fleet import Job

def work(job):
    if job.module == "wait":
        (Path(job.folder) / "ready").touch()
        stop_asked.wait(600)
        raise GracefulStop("stopped")
    if job.module == "locked":
        with stop_asked._cond:  # as within `wait`, before it sleeps
            signal.raise_signal(signal.SIGTERM)
        stop_asked.wait(600)
        raise GracefulStop("stopped")
    if job.module == "loading":
        with stop_at_once(GracefulStop("stopped while it loaded")):
            (Path(job.folder) / "ready").touch()
            threading.Event().wait(600)
    if job.module == "missing":
        import a_package_that_nobody_has
    if job.module == "memory":
        import torch
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has …")
    if job.module == "mistake":
        raise UserError("what", why="why", fix="fix", where="where")

sys.exit(run_worker(Job, lambda job: Path(job.folder), work))
"""


def start(tmp_path, name, **environment):
    folder = tmp_path / "work"
    folder.mkdir(exist_ok=True)
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"module": name, "job_file": "j", "folder": str(folder)}))
    child = subprocess.Popen(
        [sys.executable, str(script), str(job)], env={**os.environ, **environment}, stderr=subprocess.PIPE
    )
    return child, folder


def wait_for(path: Path, child) -> None:
    while not path.exists():
        assert child.poll() is None, "the worker ended before it was ready"


def test_an_expected_error_ends_in_its_exit_code_and_a_file(tmp_path):
    child, folder = start(tmp_path, "mistake")
    assert child.wait() == 2
    output = json.loads((folder / "error.json").read_text())
    assert (output["what"], output["fix"], output["error"]) == ("what", "fix", "UserError")


def test_a_missing_package_is_reported_with_the_command_that_installs_it(tmp_path):
    child, folder = start(tmp_path, "missing")
    assert child.wait() == 3
    output = json.loads((folder / "error.json").read_text())
    assert "a_package_that_nobody_has" in output["what"]
    assert "pip install" in output["fix"]


def test_out_of_memory_is_an_error_of_its_own_kind_with_what_was_measured(tmp_path):
    child, folder = start(tmp_path, "memory")
    assert child.wait() == 3
    output = json.loads((folder / "error.json").read_text())
    assert output["error"] == "OutOfMemory"
    assert output["figures"]["asked_gib"] == 2.5
    assert output["figures"]["peak_memory_gib"] > 0
    assert "2.50 GiB" in output["why"]
    assert b"OutOfMemoryError" in child.stderr.read()


def test_a_second_worker_on_the_same_folder_is_refused(tmp_path):
    first, folder = start(tmp_path, "wait")
    wait_for(folder / "ready", first)
    second, _ = start(tmp_path, "wait")
    assert second.wait() == 3
    assert b"another worker" in second.stderr.read()
    with pytest.raises(Busy, match=str(first.pid)), hold_lock(folder):
        pass
    first.terminate()
    assert first.wait() == 75


def test_a_stop_that_interrupts_the_wait_for_it_does_not_block_the_worker(tmp_path):
    child, folder = start(tmp_path, "locked")
    assert child.wait(600) == 75
    assert json.loads((folder / "error.json").read_text())["what"] == "stopped"


def test_a_stop_ends_work_that_loses_nothing_where_it_is(tmp_path):
    child, folder = start(tmp_path, "loading")
    wait_for(folder / "ready", child)
    child.terminate()
    assert child.wait(600) == 75
    assert json.loads((folder / "error.json").read_text())["what"] == "stopped while it loaded"


def test_the_lock_is_free_when_its_holder_was_killed(tmp_path):
    child, folder = start(tmp_path, "wait")
    wait_for(folder / "ready", child)
    assert lock_holder(folder) == child.pid
    child.kill()
    child.wait()
    assert lock_holder(folder) is None
    with hold_lock(folder):
        assert lock_holder(folder) == os.getpid()


def test_asking_who_holds_a_folder_does_not_make_a_start_fail(tmp_path, monkeypatch):
    """Asking is paused while it shares the lock, until a start has met it."""
    real, met, started = fcntl.flock, threading.Event(), []

    def start_meanwhile() -> None:
        with hold_lock(tmp_path):
            started.append(lock_holder(tmp_path))

    starter = threading.Thread(target=start_meanwhile)

    def flock(descriptor, how):
        asks = threading.current_thread() is not starter
        try:
            real(descriptor, how)
        except BlockingIOError:
            met.set()
            raise
        if asks and not starter.ident:
            starter.start()
            met.wait(120)

    with hold_lock(tmp_path):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    assert lock_holder(tmp_path) is None
    starter.join()
    assert met.is_set()
    assert started == [os.getpid()]


def test_many_who_ask_and_start_at_once_leave_one_holder_each_time(tmp_path):
    asked = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from graftwork.process.worker import lock_holder\n"
            "print(flush=True)\nwhile True: lock_holder(Path(sys.argv[1]))",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        asked.stdout.readline()
        for _ in range(300):
            with hold_lock(tmp_path):
                pass
            with hold_lock(tmp_path), pytest.raises(Busy, match=str(os.getpid())), hold_lock(tmp_path):
                pass
    finally:
        asked.kill()
        asked.wait()


def test_a_worker_stops_in_order_when_its_parent_is_killed(tmp_path):
    child_script = tmp_path / "parent.py"
    (tmp_path / "work").mkdir()
    (tmp_path / "worker.py").write_text(WORKER)
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"module": "wait", "job_file": "j", "folder": str(tmp_path / "work")}))
    child_script.write_text(
        "import os, subprocess, sys\n"
        f"env = {{**os.environ, {PARENT_VARIABLE!r}: str(os.getpid())}}\n"
        f"subprocess.Popen([sys.executable, {str(tmp_path / 'worker.py')!r}, {str(job)!r}], env=env).wait()\n"
    )
    parent = subprocess.Popen([sys.executable, str(child_script)])
    wait_for(tmp_path / "work" / "ready", parent)
    worker = lock_holder(tmp_path / "work")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while lock_holder(tmp_path / "work") is not None:
        pass
    assert worker is not None
    assert json.loads((tmp_path / "work" / "error.json").read_text())["error"] == "GracefulStop"


def test_a_heart_beats_while_a_long_operation_does_not_move(tmp_path):
    with Heart(tmp_path, interval=0.01) as heart:
        heart.beat("training", 1, 2, loss=0.5)
        first = read_beat(tmp_path).at
        while read_beat(tmp_path).at <= first:
            pass
        later = read_beat(tmp_path)
    assert (later.phase, later.done, later.detail["loss"]) == ("training", 1, 0.5)
    assert float(later.detail["seconds_since_move"]) > 0


def test_the_thread_of_a_heart_never_puts_an_older_beat_over_a_newer_one(tmp_path):
    with Heart(tmp_path, interval=1e-6) as heart:
        for step in range(300):
            heart.beat("training", step, step)
            assert read_beat(tmp_path).done == step


def test_a_heart_says_what_is_done_inside_a_step_and_writes_the_vitals(tmp_path):
    with Heart(tmp_path, interval=0.01, vitals=True) as heart:
        heart.beat("training", 1, 2)
        heart.move("forward")
        while (seen := read_beat(tmp_path)).vitals is None or seen.doing != "forward":
            pass
        heart.beat("training", 2, 2)
        assert read_beat(tmp_path).doing == ""
    assert seen.vitals.memory_gib > 0
    assert seen.vitals in [Vitals.model_validate(line) for line in Journal(tmp_path / "vitals.jsonl").read()]


def test_a_heart_without_vitals_writes_none(tmp_path):
    with Heart(tmp_path, interval=0.01) as heart:
        heart.beat("serving", 1, 1)
    assert read_beat(tmp_path).vitals is None
    assert not (tmp_path / "vitals.jsonl").exists()


def test_quick_beats_do_not_all_write_but_the_last_one_is_never_lost(tmp_path, monkeypatch):
    writes = []
    whole = heartbeat.write_atomic
    monkeypatch.setattr(heartbeat, "write_atomic", lambda *a, **k: (writes.append(1), whole(*a, **k)))
    monkeypatch.setattr(heartbeat, "LEAST_SECONDS", 3600.0)
    with Heart(tmp_path, interval=3600.0) as heart:
        for step in range(50):
            heart.beat("training", step, 100)
        assert len(writes) == 2
    assert read_beat(tmp_path).done == 49
