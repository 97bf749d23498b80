"""The clock is set while a run goes on: no stall is missed, none is invented, no deadline moves."""

import threading
import time
from itertools import count

import pytest

from graftwork.files.disk import Journal
from graftwork.pipeline.status import judge_run
from graftwork.process import clock
from graftwork.process.alert import Alarm
from graftwork.process.heartbeat import HEARTBEAT_FILE, Heart, Patience, Sampler, read_beat
from graftwork.process.http_client import Retries
from graftwork.process.worker import hold_lock
from graftwork.project import supervise
from graftwork.project.supervise import StallWatcher
from graftwork.records.errors import GracefulStop, WorkerFailed
from graftwork.records.fleet import Beat, Moment
from graftwork.records.run import TrainStep
from graftwork.train.callbacks import DeadlineCallback
from graftwork.train.run_folder import ATTEMPTS, SAVED
from graftwork.train.runs import between_steps
from graftwork.train.settings import TrainSettings
from graftwork.train.worker import deadline_of

HOUR = 3600.0
JUMPS = [HOUR, -HOUR, 365 * 24 * HOUR, -365 * 24 * HOUR]
PATIENCE = Patience(slow_seconds=1e6, stuck_seconds=1e6, silent_seconds=20.0)


class Clocks:
    """The clock that people read, which may be set, and the steady one; both stand unless moved."""

    def __init__(self):
        self.wall, self.steady = 1_800_000_000.0, 5_000.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds

    def set_by(self, seconds: float) -> None:
        self.wall += seconds


@pytest.fixture
def clocks(monkeypatch):
    found = Clocks()
    monkeypatch.setattr(time, "time", lambda: found.wall)
    monkeypatch.setattr(clock, "steady", lambda: found.steady)
    return found


@pytest.fixture
def watched(tmp_path):
    alarm = Alarm(tmp_path, run="r")
    reported = []
    alarm.send = lambda kind, *_what, **_more: reported.append(kind)
    return StallWatcher(tmp_path, alarm, expected_seconds=1.0, patience=PATIENCE), reported


def look(watcher, clocks, seconds=10.0):
    clocks.pass_(seconds)
    watcher.check("")


@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_of_the_clock_is_no_stall(tmp_path, clocks, watched, jump):
    watcher, reported = watched
    heart = Heart(tmp_path)
    for _ in range(5):
        heart.beat("training", 1, 9)
        clocks.set_by(jump)
        look(watcher, clocks)
    assert reported == []


@pytest.mark.parametrize("jump", JUMPS)
def test_a_worker_that_freezes_while_the_clock_jumps_is_reported(tmp_path, clocks, watched, jump):
    watcher, reported = watched
    heart = Heart(tmp_path)
    heart.beat("training", 1, 9)
    look(watcher, clocks)
    clocks.set_by(jump)
    look(watcher, clocks)
    look(watcher, clocks)
    assert reported == ["stalled"]
    clocks.set_by(-jump)
    heart.beat("training", 2, 9)
    look(watcher, clocks)
    assert reported == ["stalled", "recovered"]


@pytest.mark.parametrize("jump", JUMPS)
def test_how_long_the_work_stalls_is_not_what_the_clock_says(tmp_path, clocks, jump):
    heart = Heart(tmp_path)
    heart.beat("training", 1, 9)
    clocks.pass_(7)
    clocks.set_by(jump)
    heart._write()
    assert read_beat(tmp_path).detail["seconds_since_move"] == pytest.approx(7)


@pytest.mark.parametrize("jump", JUMPS)
def test_the_status_of_a_run_does_not_depend_on_the_clock(tmp_path, clocks, jump):
    heart = Heart(tmp_path)
    heart.beat("training", 1, 9)
    clocks.set_by(jump)
    with hold_lock(tmp_path):
        found, _ = judge_run(tmp_path, expected=1.0, patience=PATIENCE)
        assert found.health == "working"
        clocks.pass_(21)
        found, _ = judge_run(tmp_path, expected=1.0, patience=PATIENCE)
        assert found.health == "stuck"


def test_a_heartbeat_of_another_machine_goes_by_the_clock(tmp_path, clocks):
    """Its steady clock began at another time."""
    heart = Heart(tmp_path)
    heart.beat("training", 1, 9)
    beat = read_beat(tmp_path)
    other = beat.model_copy(update={"boot": "another", "steady": 1e9})
    clocks.pass_(40)
    assert clock.seconds_since(other.moment) == pytest.approx(40)
    assert clock.seconds_since(beat.moment) == pytest.approx(40)


def test_a_heartbeat_of_an_earlier_version_goes_by_the_clock(clocks):
    beat = Beat(pid=1, phase="training", done=1, total=9, at=clocks.wall - 5, started=clocks.wall - 9)
    assert clock.seconds_since(beat.moment) == pytest.approx(5)


@pytest.mark.parametrize("jump", JUMPS)
def test_the_supervisor_knows_for_how_long_a_checkpoint_is_being_saved(tmp_path, clocks, jump):
    task = supervise.WorkerTask("training", "unused", Moment(at=0, steady=0, boot=""), tmp_path)
    watcher = supervise._Supervisor(task, None, None, supervise.Hooks())
    own = Heart(tmp_path)
    own.move(supervise.SAVING)
    own._write()
    clocks.set_by(-2 * jump)
    assert watcher._is_saving()
    clocks.pass_(supervise.FRESH_SECONDS + 1)
    assert not watcher._is_saving()


@pytest.mark.parametrize("jump", JUMPS)
def test_a_deadline_is_kept_whatever_the_clock_says(clocks, jump):
    job = type("Job", (), {"deadline": clocks.wall + 100, "deadline_from": clock.now()})()
    at = deadline_of(job, TrainSettings())
    guard = DeadlineCallback(at, save_seconds=lambda: 1.0, margin=0.0)
    clocks.set_by(jump)
    clocks.pass_(50)
    guard.on_step_begin(1, 9)
    clocks.pass_(49)
    with pytest.raises(GracefulStop):
        guard.on_step_begin(2, 9)


@pytest.mark.parametrize("jump", JUMPS)
def test_a_deadline_read_after_the_jump_is_the_same(clocks, jump):
    """A worker that is started again reads it from its job."""
    job = type("Job", (), {"deadline": clocks.wall + 100, "deadline_from": clock.now()})()
    before = deadline_of(job, TrainSettings())
    clocks.set_by(jump)
    assert deadline_of(job, TrainSettings()) == before


@pytest.mark.parametrize("jump", JUMPS)
def test_crashes_are_counted_in_their_order_whatever_the_clock_says(tmp_path, clocks, jump):
    from graftwork.train.multi_run import _require_patience

    job = type(
        "Job",
        (),
        {
            "run_id": "r",
            "start_adapter": None,
            "folder": str(tmp_path),
            "plan": type("Plan", (), {"train": {"settings": {}}})(),
            "run": {"max_restarts": 1},
            "crew": {},
            "keeping": {},
            "endpoint": {},
        },
    )()
    attempts, saved = Journal(tmp_path / ATTEMPTS), Journal(tmp_path / SAVED)
    attempts.append({"pid": 1, **clock.now().model_dump()})
    clocks.pass_(1)
    begun = clock.now()
    for step in range(4):
        clocks.pass_(1)
        clocks.set_by(jump if step % 2 else -jump)
        attempts.append({"pid": 1, **clock.now().model_dump()})
        clocks.pass_(1)
        saved.append({**clock.now().model_dump(), "step": step + 1, "folder": "x"})
        _require_patience(job, begun=begun)
    clocks.pass_(1)
    clocks.set_by(jump)
    attempts.append({"pid": 1, **clock.now().model_dump()})
    with pytest.raises(WorkerFailed, match="killed 2 time"):
        _require_patience(job, begun=begun)


@pytest.mark.parametrize("jump", JUMPS)
def test_vitals_are_taken_at_their_pace_and_their_rates_stay_true(tmp_path, clocks, jump, monkeypatch):
    pages = count(0, 512)
    monkeypatch.setattr("graftwork.process.heartbeat.swapped_pages", lambda: next(pages))
    sampler = Sampler(tmp_path, probe=tuple, sample_seconds=5.0)
    taken = []
    for second in range(40):
        if second == 20:
            clocks.set_by(jump)
        if sampler.due():
            taken.append(sampler.sample())
        clocks.pass_(1)
    assert len(taken) == 8
    assert len(Journal(tmp_path / "vitals.jsonl").read()) == 8
    rates = {round(vitals.swapped_mib_per_second, 6) for vitals in taken[1:]}
    assert len(rates) == 1
    assert min(rates) > 0


@pytest.mark.parametrize("jump", JUMPS)
def test_the_time_between_steps_is_not_what_the_clock_says(jump):
    def step(number, at, steady):
        figures = {"loss": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0, "tokens": 1, "trained_tokens": 1}
        return TrainStep(step=number, seconds=1.0, at=at, steady=steady, **figures)

    steps = [step(1, 1e9, 10.0), step(2, 1e9 + 3 + jump, 13.0), step(3, 1e9 + 4 + jump, 14.0)]
    assert between_steps(steps) == pytest.approx(2.0)


def test_retries_do_not_go_by_the_clock(clocks):
    retries = Retries(attempts=3, seconds=100.0)
    clocks.set_by(HOUR)
    assert retries.after_failure() is not None


def test_processes_of_one_machine_share_the_steady_clock(tmp_path):
    """A real heartbeat of a real process, read by this one."""
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from graftwork.process.heartbeat import Heart\n"
        "Heart(Path(sys.argv[1])).beat('training', 1, 9)"
    )
    before = clock.now()
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    beat = read_beat(tmp_path)
    assert (tmp_path / HEARTBEAT_FILE).exists()
    if not clock.boot_id():
        pytest.skip("the system does not name its start")
    assert beat.boot == clock.boot_id()
    assert before.steady <= beat.steady <= clock.steady()


def test_a_moment_after_a_restart_of_the_machine_goes_by_the_clock(clocks):
    earlier = Moment(at=clocks.wall - 50, steady=1e9, boot="before the restart")
    assert clock.seconds_since(earlier) == pytest.approx(50)


def test_the_heartbeat_continues_while_the_clock_stands_still(tmp_path, monkeypatch):
    """The thread that beats waits by the steady clock of the system."""
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    written = threading.Event()
    with Heart(tmp_path, interval=0.01) as heart:
        first = read_beat(tmp_path).steady
        while read_beat(tmp_path).steady <= first:
            written.wait(0.01)
        heart.beat("training", 1, 1)
    assert read_beat(tmp_path).done == 1
