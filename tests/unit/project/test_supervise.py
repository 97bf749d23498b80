"""A supervised worker: crashes, progress, stalls, memory, and stop requests. With real processes."""

import json
import os
import signal
import sys
import threading
from itertools import chain, repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.files.disk import Journal, write_atomic
from graftwork.process import local_workers
from graftwork.process.alert import Alarm
from graftwork.process.heartbeat import Heart, Patience, read_beat
from graftwork.process.worker import lock_holder, stoppable
from graftwork.project import supervise
from graftwork.project.reporter import NullReporter
from graftwork.project.supervise import (
    LONGEST_PAUSE_SECONDS,
    Hooks,
    Restarts,
    StallWatcher,
    WorkerTask,
    run_job,
)
from graftwork.records.base import Record
from graftwork.records.errors import GracefulStop, OutOfMemory, UserError, WorkerFailed
from graftwork.records.fleet import JobStatus

WORKER = """
import os, signal, sys, threading
from pathlib import Path
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.base import Record
from graftwork.records.errors import GracefulStop, UserError

class Task(Record):
    folder: str
    do: tuple[str, ...]
    rows: int = 8
    heart: str = "."

class GivenUp(GracefulStop):
    pass

def work(task):
    folder = Path(task.folder)
    (folder / task.heart).mkdir(exist_ok=True)
    attempts = folder / "attempts"
    attempt = len(attempts.read_text()) if attempts.exists() else 0
    attempts.write_text("x" * (attempt + 1))
    with Heart(folder / task.heart, interval=0.05) as heart:
        what, _, number = task.do[min(attempt, len(task.do) - 1)].partition(":")
        if number:
            heart.beat("training", float(number), 100)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "break":
            raise RuntimeError("a fault of the program")
        if what == "mistake":
            raise UserError("a mistake of the user", fix="fix it")
        if what == "memory" and task.rows > int(number or 2):
            raise MemoryError("tried to allocate 1.00 GiB")
        if what == "freeze":
            heart.beat("training", 1, 2)
            os.kill(os.getpid(), signal.SIGSTOP)
            while not (folder / "leave").exists():
                heart.move()
        if what == "wait":
            (folder / "ready").touch()
            stop_asked.wait(600)
            raise GracefulStop("stopped")
        if what in ("save", "deaf", "frozen"):
            if what != "deaf":
                heart.move("checkpoint")
                beats = folder / task.heart / "heartbeat.json"
                while '"doing": "checkpoint"' not in (beats.read_text() if beats.exists() else ""):
                    threading.Event().wait(0.01)
            (folder / "ready").touch()
            stop_asked.wait(600)
            if what == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            while not (folder / "saved").exists():
                threading.Event().wait(0.01)
            heart.move()
            raise GracefulStop("stopped")
        if what == "give_up":
            raise GivenUp("stopped in the middle of it")
    (folder / "done").write_text(str(task.rows))

if __name__ == "__main__":
    sys.exit(run_worker(Task, lambda task: Path(task.folder), work))
"""


class Task(Record):
    folder: str
    do: tuple[str, ...]
    rows: int = 8
    heart: str = "."


class Heard(NullReporter):
    def __init__(self):
        self.words = []

    def info(self, text):
        self.words.append(text)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Runs a worker that does what it is reported, one thing an attempt."""
    (tmp_path / "told_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(supervise, "_wait", lambda _seconds: None)
    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.05)
    folder = tmp_path / "run"
    folder.mkdir()

    def run(*do, **options):
        task = Task(folder=str(folder), do=do, heart=options.pop("heart", "."))
        reporter = options.pop("reporter", NullReporter())
        place, restarts = options.pop("place", None), options.pop("max_restarts", 3)
        worker = WorkerTask("it", "told_worker", task, folder, max_restarts=restarts)
        return run_job(worker, reporter=reporter, hooks=Hooks(**options), place=place)

    run.folder = folder
    return run


def attempts(job):
    return len((job.folder / "attempts").read_text())


def alerts(folder):
    return [line["kind"] for line in Journal(folder / "alerts.jsonl").read()]


def watcher_of(job, **patience):
    return StallWatcher(
        job.folder, Alarm(job.folder, run="r"), expected_seconds=0.01, patience=Patience(**patience)
    )


def test_crashes_with_progress_between_them_do_not_use_up_the_restarts(job):
    heard = Heard()
    restarts = job("die:1", "die:2", "die:3", "go", max_restarts=1, reporter=heard)
    assert restarts == 3
    assert all("SIGKILL" in word for word in heard.words)


def test_crashes_without_progress_are_given_up_and_reported(job):
    watcher = watcher_of(job)
    with pytest.raises(WorkerFailed, match="without progress"):
        job("die:5", "die:5", max_restarts=1, watcher=watcher)
    assert attempts(job) == 2
    assert alerts(job.folder) == ["restarted", "failed"]


def test_a_fault_of_the_program_is_tried_once_more_only(job):
    with pytest.raises(WorkerFailed) as caught:
        job("break", max_restarts=9)
    assert attempts(job) == 2
    assert "a fault of the program" in caught.value.why


def test_messages_of_a_worker_are_forwarded_and_logged(job):
    watcher = watcher_of(job)
    with pytest.raises(UserError, match="of the user"):
        job("mistake", watcher=watcher)
    assert alerts(job.folder) == ["failed"]


def test_out_of_memory_goes_on_with_a_smaller_job(job):
    measured = []

    def halve(exhausted):
        measured.append(exhausted.figures)
        return Task(folder=str(job.folder), do=("memory",), rows=2)

    assert job("memory", on_out_of_memory=halve) == 0
    assert (job.folder / "done").read_text() == "2"
    assert [figures["asked_gib"] for figures in measured] == [1.0]
    assert json.loads((job.folder / "job.json").read_text())["rows"] == 2


def test_out_of_memory_without_a_smaller_job_is_the_error_itself(job):
    with pytest.raises(OutOfMemory):
        job("memory", on_out_of_memory=lambda _exhausted: None)
    assert attempts(job) == 1


def test_a_kill_for_want_of_memory_is_known_by_the_kernels_count(job, monkeypatch):
    counts = chain([0], repeat(1))
    monkeypatch.setattr(local_workers, "kernel_kills", lambda: next(counts))
    reasons = []

    def smaller(exhausted):
        reasons.append(exhausted.why)
        return Task(folder=str(job.folder), do=("go",), rows=1)

    assert job("die", on_out_of_memory=smaller) == 0
    assert "kernel" in reasons[0]


def test_a_frozen_worker_raises_one_alert_and_another_when_it_goes_on(job):
    watcher = watcher_of(job, silent_seconds=2.0)

    def wake():
        reported = alerts(job.folder)
        if reported[-1:] == ["stalled"] and (worker := lock_holder(job.folder)) is not None:
            os.kill(worker, signal.SIGCONT)
        if "recovered" in reported:
            (job.folder / "leave").touch()

    job("freeze", watcher=watcher, on_poll=wake)
    assert alerts(job.folder)[:2] == ["stalled", "recovered"]
    if sys.platform == "linux":
        stalls = Journal(job.folder / "alerts.jsonl").read()[::2]
        assert any("kill -CONT" in stall["why"] for stall in stalls)


def test_each_stall_is_reported_once_however_often_it_is_checked(tmp_path):
    watcher = StallWatcher(tmp_path, Alarm(tmp_path, run="r"), expected_seconds=1.0, patience=Patience())
    for health in ("working", "stuck", "stuck", "slow", "stuck", "working", "working", "stuck"):
        watcher.update(health, "because")
    assert alerts(tmp_path) == ["stalled", "recovered", "stalled"]


def test_a_stop_request_to_the_supervisor_stops_the_worker_in_order(job):
    def ask():
        if (job.folder / "ready").exists():
            (job.folder / "ready").unlink()
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(GracefulStop) as caught, stoppable():
        job("wait", on_poll=ask)
    assert caught.value.exit_code == 75
    assert json.loads((job.folder / "error.json").read_text())["error"] == "GracefulStop"
    assert lock_holder(job.folder) is None
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def ask_to_stop(job, monkeypatch):
    """Asks once the worker is ready; patience is short."""
    monkeypatch.setattr(supervise, "STOP_SECONDS", 0.3)

    def ask():
        if (job.folder / "ready").exists():
            (job.folder / "ready").unlink()
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


class LetsItSave(Heard):
    """The worker's checkpoint is written only when the worker is notified that it is waited for.

    From then on patience is long, and the checkpoint is written after the supervisor has looked once more:
    how long the worker takes to end says something about the machine.
    """

    def __init__(self, folder, monkeypatch):
        super().__init__()
        self._folder, self._monkeypatch = folder, monkeypatch
        self._looks = None

    def info(self, text):
        super().info(text)
        if "waiting for its checkpoint" in text:
            self._monkeypatch.setattr(supervise, "STOP_SECONDS", 300.0)
            self._looks = 0

    def look(self, folder):
        if self._looks is not None:
            self._looks += 1
            if self._looks == 3:  # at most two before the patience is read again
                (self._folder / "saved").touch()
        return (folder,)


@pytest.mark.parametrize("heart", [".", "another run"])
def test_a_worker_that_still_writes_its_checkpoint_is_waited_for(job, ask_to_stop, monkeypatch, heart):
    reported = LetsItSave(job.folder, monkeypatch)
    with pytest.raises(GracefulStop), stoppable():
        job(
            "save",
            on_poll=ask_to_stop,
            reporter=reported,
            heart=heart,
            active_folders=lambda: reported.look(job.folder / heart),
        )
    assert len([word for word in reported.words if "waiting for its checkpoint" in word]) == 1
    assert json.loads((job.folder / "error.json").read_text())["what"] == "stopped"


@pytest.mark.parametrize("what", ["deaf", "frozen"])
def test_a_worker_that_does_not_stop_and_saves_nothing_is_ended(job, ask_to_stop, monkeypatch, what):
    monkeypatch.setattr(supervise, "FRESH_SECONDS", 0.3)
    with pytest.raises(GracefulStop), stoppable():
        job(what, on_poll=ask_to_stop)
    assert not (job.folder / "error.json").exists()
    assert lock_holder(job.folder) is None


def test_progress_is_seen_where_the_runs_at_work_say_it(job):
    restarts = job(
        "die:3",
        "die:4",
        "die:5",
        "go",
        max_restarts=1,
        heart="one",
        active_folders=lambda: (job.folder / "one",),
    )
    assert restarts == 3


def test_any_kind_of_orderly_stop_counts_as_one(job):
    watcher = watcher_of(job)
    with pytest.raises(GracefulStop, match="in the middle") as caught:
        job("give_up", watcher=watcher)
    assert caught.value.exit_code == 75
    assert alerts(job.folder) == []


def test_sigterm_outside_of_a_worker_is_a_stop_in_good_order_too():
    def stop_me():
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(300)

    with pytest.raises(GracefulStop), stoppable():
        stop_me()


crashes = st.lists(st.tuples(st.sampled_from([-9, -11, 1]), st.integers(0, 20)), max_size=40)


@given(crashes, st.integers(0, 5))
def test_pauses_are_bounded_and_only_crashes_without_progress_count(ended, most):
    restarts, furthest, consecutive = Restarts(most=most), 0.0, 0
    for code, done in ended:
        consecutive = 1 if done > furthest else consecutive + 1
        furthest = max(furthest, done)
        pause = restarts.after_crash(code, done=done)
        limit = most if code < 0 else min(most, 1)
        assert (pause is None) == (consecutive > limit)
        if pause is None:
            return
        assert 0 < pause <= LONGEST_PAUSE_SECONDS
        assert pause == min(0.5 * 2 ** (consecutive - 1), LONGEST_PAUSE_SECONDS)


class SlowStart:
    """A place at which the worker has started and not beaten yet."""

    def __init__(self):
        self.left = 1

    def submit(self, job):
        return "1"

    def poll(self, _handle, *, seconds=0.0):
        self.left -= 1
        return JobStatus(running=self.left >= 0, exit_code=0)


@pytest.mark.parametrize("heart", [".", "one of a batch"])
def test_the_heartbeat_of_a_dead_attempt_is_not_taken_for_a_stall_of_the_next(job, heart):
    folder = job.folder / heart
    with Heart(folder) as beat:
        beat.beat("training", 8, 9)
    dead = read_beat(folder).model_copy(update={"at": 0.0, "steady": 0.0, "boot": ""})
    write_atomic(folder / "heartbeat.json", dead.to_json())
    with Alarm(folder, run="r") as alarm:
        watcher = StallWatcher(folder, alarm, expected_seconds=1.0, patience=Patience())
        job(watcher=watcher, active_folders=lambda: (folder,), place=SlowStart())
    assert alerts(folder) == []
