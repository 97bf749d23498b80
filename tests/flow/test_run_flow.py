"""The whole way, and everything that can happen to it on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from graftwork.data.captures import CaptureExport
from graftwork.pipeline.status import examine_steps
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.pipeline.steps.release import TryOut
from graftwork.pipeline.table import STEPS, run_pipeline
from graftwork.process.local_workers import LocalWorkers
from graftwork.process.worker import hold_lock, lock_holder
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Busy, Interrupted, NegativeResult
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome

GRAFT = [sys.executable, "-m", "graftwork.cli.main"]
ALL = [step.name for step in STEPS]


@contextmanager
def opened(folder, listener):
    with use_project(open_project(folder), listener) as work:
        yield work


def run(folder, listener, upto=None):
    with opened(folder, listener) as work:
        return run_pipeline(work, upto=upto)


def graft(folder, *arguments, **options):
    return subprocess.run(
        [*GRAFT, *arguments, "-C", str(folder)], capture_output=True, text=True, check=False, **options
    )


def run_outputs(folder: Path) -> dict:
    """What the last `graft run` made, without doing anything again."""
    with use_project(open_project(folder), NullReporter()) as work:
        return {name: entry.output for name in ALL if (entry := work.ledger.get(name)) is not None}


def live(folder: Path) -> str:
    return json.loads(graft(folder, "release", "list", "--json").stdout)["aliases"]["champion"]


def run_folder(folder: Path) -> Path:
    (found,) = (folder / ".graft" / "runs").iterdir()
    return found


def files_with(secret: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_logs_become_a_served_release_and_a_second_run_repeats_nothing(
    small_project, listener, change_settings
):
    alerts = {"webhook": "http://127.0.0.1:9/hooks/ZbQx7PpLw2", "command": "true --token Xk29fjDk20"}
    mirror = "memory://me:hunter2hunter2@copies/runs"
    train = {"rank": 2, "epochs": 2, "batch_size": 4, "checkpoint_every": 4, "threads": 1}
    change_settings(small_project, train={**train, "run": {"mirror": mirror, "alerts": alerts}})
    made = run(small_project, listener)
    for secret in (b"ZbQx7PpLw2", b"Xk29fjDk20", b"hunter2hunter2"):
        assert files_with(secret, small_project) == [small_project / "graft.yaml"]
    assert listener.done == ALL
    assert any("minutes to go" in text for text in listener.words)
    release = made.get("release", Release)
    assert made.get("gate", Verdict).decision == "deploy"
    assert {attempt.answered_by for attempt in made.get("try", TryOut).tried} == {release.id}
    for attempt in made.get("try", TryOut).tried:
        assert attempt.captured_reply == attempt.release_answer
    assert (small_project / "report.html").stat().st_size > 10_000
    for path in [small_project / ".graft", *(small_project / ".graft").rglob("*")]:
        assert not path.stat().st_mode & 0o077, path
    with opened(small_project, listener) as work:
        assert work.releases.aliases() == {"champion": release.id}
        assert work.captures.count() == 2 * len(made.get("try", TryOut).tried)

        # The held-out questions of the last step were captured, and none of them becomes data.
        export = CaptureExport(work, work.settings.data.captures, feedback="all")
        assert list(export) == []
        assert export.left_out.total() == work.captures.count()
        assert {state.step: state.state for state in examine_steps(work)} == dict.fromkeys(ALL, "fresh")

    listener.done.clear()
    listener.words.clear()
    again = run(small_project, listener)
    assert listener.done == []
    assert listener.skipped == ALL
    assert not any("to go" in text for text in listener.words)
    assert again.outputs == made.outputs


def test_the_gate_in_ci_names_what_a_new_setting_makes_stale_and_starts_no_training(
    small_project, listener, change_settings
):
    run(small_project, listener, upto="gate")
    settings = yaml.safe_load((small_project / "graft.yaml").read_text())
    rank = settings["train"]["rank"]
    change_settings(small_project, train={**settings["train"], "rank": rank * 2})
    done = graft(small_project, "gate", "--junit", str(small_project / "gate.xml"), "--json")
    assert done.returncode == 3
    assert f"train.rank was {rank} and is {rank * 2}" in json.loads(done.stdout)["why"]
    assert len(list((small_project / ".graft" / "runs").iterdir())) == 1
    assert not (small_project / "gate.xml").exists()
    message = json.loads(graft(small_project, "status", "--json").stdout)
    states = {step["step"]: step["state"] for step in message["steps"]}
    assert (states["prepare"], states["plan"], states["train"]) == ("fresh", "stale", "stale")
    assert {"plan", "train"} <= set(message["next"]["steps"])


def test_only_what_depends_on_a_change_is_done_again(small_project, listener, change_settings):
    run(small_project, listener)
    listener.done.clear()
    change_settings(small_project, gate={"rules": [{"metric": "latency_seconds", "under": 999.0}]})
    first = run_outputs(small_project)["release"]["id"]
    run(small_project, listener)
    assert listener.done == ["gate", "release", "try", "report"]
    # And the way back, by the commands that an engineer on call at night would use.
    second = run_outputs(small_project)["release"]
    assert second["parent"] == first
    assert json.loads(graft(small_project, "release", "rollback", "--json").stdout)["release_id"] == first
    assert live(small_project) == first
    assert graft(small_project, "release", "rollback", "--json").returncode == 2
    done = graft(small_project, "release", "promote", second["id"][:10], "--reason", "fixed", "--json")
    assert json.loads(done.stdout)["why"] == "fixed"
    assert live(small_project) == second["id"]
    # A release whose bytes changed is not promoted again.
    damaged = small_project / ".graft" / "releases" / first / "adapter_config.json"
    damaged.chmod(0o644)
    damaged.write_text("{}")
    assert graft(small_project, "release", "promote", first, "--json").returncode == 3
    assert live(small_project) == second["id"]


def test_a_missing_result_is_made_again(small_project, listener):
    import shutil

    run(small_project, listener, upto="train")
    shutil.rmtree(run_folder(small_project))
    listener.done.clear()
    run(small_project, listener, upto="train")
    assert listener.done == ["train"]


def test_a_gate_that_says_no_releases_nothing(small_project, listener, change_settings):
    change_settings(small_project, gate={"rules": [{"metric": "json_valid", "over": 0.6}]})
    made = run(small_project, listener)
    assert made.get("gate", Verdict).decision != "deploy"
    assert listener.done == [name for name in ALL if name not in ("release", "try")]
    with opened(small_project, listener) as work:
        assert work.releases.list() == ()
    done = graft(small_project, "gate", "--json")
    assert done.returncode == made.get("gate", Verdict).exit_code != 0
    assert json.loads(done.stdout)["decision"] == made.get("gate", Verdict).decision


def test_a_rehearsed_crash_is_survived_to_the_same_bytes(small_project, listener, change_settings):
    import shutil

    plain = run(small_project, listener, upto="train").get("train", TrainOutcome)
    # How a run is watched does not make it another run: it is done again because it is gone.
    shutil.rmtree(run_folder(small_project))
    change_settings(small_project, train={"run": {"rehearse_crash": True}})
    crashed = run(small_project, listener, upto="train").get("train", TrainOutcome)
    assert crashed.restarts == 1
    assert crashed.replayed_steps > 0
    assert crashed.replay_identical is True
    assert crashed.adapter_hash == plain.adapter_hash
    assert any("SIGKILL" in word for word in listener.words)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    small_project, listener, change_settings
):
    change_settings(small_project, plan={"memory_limit_gib": 0.01})
    with pytest.raises(NegativeResult, match="does not fit"):
        run(small_project, listener)
    assert not (small_project / ".graft" / "runs").exists()


def start(folder, *arguments):
    # A suite that was started in the background has Ctrl-C switched off, and would hand that on.
    heard = ["env", "--default-signal=INT", *GRAFT, *arguments, "-C", str(folder)]
    return subprocess.Popen(heard, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(folder: Path, process, *, steps: int) -> Path:
    """Wait until the worker has journaled some steps; the run's folder."""
    runs = folder / ".graft" / "runs"
    while True:
        assert process.poll() is None, process.communicate()
        journals = list(runs.glob("*/steps.jsonl")) if runs.exists() else []
        if journals and len(journals[0].read_bytes().splitlines()) >= steps:
            return journals[0].parent
        time.sleep(0.01)


@pytest.fixture
def long_project(small_project, change_settings):
    """Enough steps to be caught in the middle."""
    change_settings(small_project, train={"epochs": 12})
    return small_project


def finished_hash(folder) -> str:
    done = graft(folder, "train", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["adapter_hash"]


def test_a_killed_process_resumes_the_run_to_the_same_bytes(long_project, tmp_path, tiny_base):
    import shutil

    twin = tmp_path / "twin"
    shutil.copytree(long_project, twin)
    expected = finished_hash(twin)

    # The worker is killed: the supervisor starts it again.
    process = start(long_project, "train", "--json")
    folder = wait_for_steps(long_project, process, steps=6)
    os.kill(lock_holder(folder), signal.SIGKILL)
    # The supervisor is killed: the worker stops in order, nobody is left behind.
    wait_for_steps(long_project, process, steps=14)
    while lock_holder(folder) is None:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    while lock_holder(folder) is not None:
        time.sleep(0.01)
    status = json.loads(graft(long_project, "status", "--json").stdout)
    assert status["runs"][0]["state"] == "running"
    assert status["runs"][0]["health"] == "gone"
    assert "graft run" in status["runs"][0]["reason"]

    assert finished_hash(long_project) == expected
    status = json.loads(graft(long_project, "status", "--json").stdout)
    assert status["runs"][0]["state"] == "done"


def test_ctrl_c_stops_in_order_and_the_same_command_goes_on(long_project):
    process = start(long_project, "train")
    folder = wait_for_steps(long_project, process, steps=5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert lock_holder(folder) is None
    assert any((folder / "checkpoints").iterdir())
    assert json.loads(graft(long_project, "status", "--json").stdout)["runs"][0]["state"] == "stopped"
    assert finished_hash(long_project)


class InterruptedHost(LocalWorkers):
    """Ctrl-C while the worker is being started."""

    def submit(self, job):
        raise KeyboardInterrupt


def test_ctrl_c_before_the_worker_runs_leaves_a_stopped_run(small_project):
    with use_project(open_project(small_project), NullReporter()) as work:
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(replace(work, place=InterruptedHost()), upto="train")
        assert [run.state for run in work.runs.list()] == ["stopped"]


def test_a_run_is_busy_while_the_worker_of_a_killed_command_still_stops(small_project, listener):
    with opened(small_project, listener) as work:
        plan = run_pipeline(work, upto="plan").get("plan", Plan)
        with hold_lock(work.project.runs / run_id_of(plan)), pytest.raises(Busy, match="another worker"):
            run_pipeline(work, upto="train")


class Impatient(NullReporter):
    """Presses Ctrl-C once, in the middle of a step where that step reports its progress."""

    def __init__(self, step):
        self.step = step
        self.now = ""
        self.pressed = False

    def press(self):
        if self.now == self.step and not self.pressed:
            self.pressed = True
            raise KeyboardInterrupt

    def started(self, step, title):
        self.now = step
        if step not in ("prepare", "train", "evaluate", "try"):
            self.press()

    def progress(self, phase, done, total, *, seconds_left, detail):
        self.press()


def test_ctrl_c_in_any_step_leaves_nothing_half_written_and_loses_nothing(small_project, listener):
    state = small_project / ".graft"
    for step in ALL:
        impatient = Impatient(step)
        with pytest.raises((KeyboardInterrupt, Interrupted)):
            run(small_project, impatient)
        assert impatient.pressed
        assert not list(state.rglob("*.part"))
        workers = [*state.glob("runs/*"), *state.glob("evaluations/*-*/"), state / "serving"]
        assert [lock_holder(folder) for folder in workers if folder.is_dir()] == [None] * len(
            [folder for folder in workers if folder.is_dir()]
        )
    run(small_project, listener)
    assert listener.skipped + listener.done == ALL
    assert listener.done == ["report"]


def test_a_second_run_next_to_the_first_is_refused(long_project):
    process = start(long_project, "train", "--json")
    worker = lock_holder(wait_for_steps(long_project, process, steps=2))
    # However long the second takes to start, the first is not over before.
    os.kill(worker, signal.SIGSTOP)
    try:
        second = graft(long_project, "train", "--json")
    finally:
        os.kill(worker, signal.SIGCONT)
    assert second.returncode == 3
    assert "another worker" in json.loads(second.stdout)["what"]
    process.communicate()
    assert process.returncode == 0


def test_a_crashing_worker_is_given_up_with_its_last_messages(
    small_project, change_settings, tiny_base, tmp_path
):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(tiny_base, broken)
    change_settings(small_project, base=str(broken), train={"run": {"max_restarts": 0}})
    assert graft(small_project, "plan", "--json").returncode == 0
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    done = graft(small_project, "train", "--json")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["fix"]
