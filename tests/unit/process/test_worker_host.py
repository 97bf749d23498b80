"""Workers of this machine, and the supervisor over a host without processes."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from graftwork.process.heartbeat import Heart
from graftwork.process.local_workers import LOG_FILE, LocalWorkers, read_log_tail
from graftwork.project.reporter import NullReporter
from graftwork.project.supervise import JOB_FILE, Hooks, WorkerTask, run_job
from graftwork.records.base import Record
from graftwork.records.errors import WorkerFailed
from graftwork.records.fleet import Job, JobStatus


class Work(Record):
    exits: tuple[int, ...]


class ThreadPlace:
    """Runs a job as a thread that beats as a worker does and ends with the exit code that the job names."""

    def __init__(self):
        self.jobs, self.stopped = [], []

    def submit(self, job):
        attempt, status, asked = len(self.jobs), {"code": None}, threading.Event()

        def work():
            exits = Work.from_json(Path(job.job_file).read_bytes()).exits
            with Heart(Path(job.folder), interval=0.01) as heart:
                heart.beat("training", attempt + 1, 10)
                code = exits[min(attempt, len(exits) - 1)]
                if code == 75:
                    asked.wait(300)
            status["code"] = code

        thread = threading.Thread(target=work, daemon=True)
        self.jobs.append((thread, status, asked))
        thread.start()
        return str(attempt)

    def poll(self, job_id, *, seconds=0.0):
        thread, status, _ = self.jobs[int(job_id)]
        thread.join(seconds)
        return JobStatus(running=thread.is_alive(), exit_code=status["code"])

    def stop(self, job_id, *, at_once=False):
        self.stopped.append(at_once)
        self.jobs[int(job_id)][2].set()


def run(folder, place, *exits, **options):
    task = WorkerTask("it", "unused", Work(exits=exits), folder, max_restarts=1)
    return run_job(task, reporter=NullReporter(), place=place, hooks=Hooks(**options))


def test_supervisor_restarts_a_job_of_any_place_until_it_is_done(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.project.supervise._wait", lambda _seconds: None)
    place = ThreadPlace()
    assert run(tmp_path, place, -9, -9, 0) == 2
    assert len(place.jobs) == 3
    assert (tmp_path / JOB_FILE).exists()


def test_supervisor_gives_up_on_a_job_that_fails_without_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("graftwork.project.supervise._wait", lambda _seconds: None)
    (tmp_path / LOG_FILE).write_text("its last line\n")
    folders = (tmp_path / "no heartbeat",)
    with pytest.raises(WorkerFailed, match="ended with exit code 1") as caught:
        run(tmp_path, ThreadPlace(), 1, active_folders=lambda: folders)
    assert "its last line" in caught.value.why


def test_supervisor_asks_the_place_to_stop_before_it_leaves(tmp_path):
    place = ThreadPlace()

    def fail():
        if not place.stopped:
            raise RuntimeError("the caller failed")

    with pytest.raises(RuntimeError):
        run(tmp_path, place, 75, on_poll=fail)
    assert place.stopped == [False]


@pytest.fixture
def sleeper(tmp_path, monkeypatch):
    (tmp_path / "sleeper.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Job(module="sleeper", job_file="unused", folder=str(tmp_path / "run"))


@pytest.mark.parametrize(("at_once", "code"), [(False, -signal.SIGTERM), (True, -signal.SIGKILL)])
def test_local_workers_stop_and_report_the_exit_code(sleeper, at_once, code):
    place = LocalWorkers()
    job_id = place.submit(sleeper)
    assert place.poll(job_id).running
    place.stop(job_id, at_once=at_once)
    status = place.poll(job_id, seconds=300)
    assert (status.running, status.exit_code) == (False, code)
    place.stop(job_id)  # nothing left to stop


def test_local_workers_end_a_process_that_has_no_session_of_its_own_yet(sleeper, monkeypatch):
    place = LocalWorkers()
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(words) as forked:
        monkeypatch.setattr("graftwork.process.local_workers.start_child", lambda _job: forked)
        try:
            place.stop(place.submit(sleeper), at_once=True)
            assert forked.returncode == -signal.SIGKILL
        finally:
            forked.kill()


def test_local_workers_show_that_a_process_was_stopped_by_a_signal(sleeper):
    place = LocalWorkers()
    job_id = place.submit(sleeper)
    os.kill(int(job_id), signal.SIGSTOP)
    try:
        while (state := place.poll(job_id, seconds=0.01).process_state) not in ("T", ""):
            pass
        assert state in ("T", "")
    finally:
        place.stop(job_id, at_once=True)


def test_local_workers_write_their_output_to_the_log(sleeper):
    place = LocalWorkers()
    job_id = place.submit(sleeper)
    while "here" not in read_log_tail(Path(sleeper.folder)):
        assert place.poll(job_id, seconds=0.01).running
    place.stop(job_id, at_once=True)
