"""The whole way, and everything that can happen to it on the way."""

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from flows import (
    graft,
    graft_json,
    opened,
    run,
    run_folder,
    start_graft,
    wait_for_steps,
    wait_for_worker,
)

from graftwork.data.capture_export import CaptureExport
from graftwork.pipeline.status import examine_steps
from graftwork.pipeline.steps.plan import run_id_of
from graftwork.pipeline.steps.release import TryOut
from graftwork.pipeline.table import STEPS, run_pipeline
from graftwork.process.local_workers import LocalWorkers
from graftwork.process.worker import hold_lock, lock_holder
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import Busy, Interrupted, NegativeResult
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome

ALL = [step.name for step in STEPS]


def outputs_of(folder: Path) -> dict:
    """What the last `graft run` made, without doing anything again."""
    with opened(folder) as work:
        return {name: entry.output for name in ALL if (entry := work.ledger.get(name)) is not None}


def live(folder: Path) -> str:
    return graft_json(folder, "release", "list")["aliases"]["champion"]


def files_with(secret: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_logs_become_a_served_release_and_a_second_run_repeats_nothing(
    small_project, listener, change_settings
):
    alerts = {"webhook": "http://127.0.0.1:9/hooks/ZbQx7PpLw2", "command": "true --token Xk29fjDk20"}
    mirror = "memory://me:hunter2hunter2@copies/runs"
    change_settings(small_project, train={"run": {"mirror": mirror, "alerts": alerts}})
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
    with opened(small_project) as work:
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
    released_project, change_settings
):
    rank = yaml.safe_load((released_project / "graft.yaml").read_text())["train"]["rank"]
    change_settings(released_project, train={"rank": rank * 2})
    junit = released_project / "gate.xml"
    stale = graft_json(released_project, "gate", "--junit", str(junit), exit_code=3)
    assert f"train.rank was {rank} and is {rank * 2}" in stale["why"]
    assert run_folder(released_project)
    assert not junit.exists()
    status = graft_json(released_project, "status")
    states = {step["step"]: step["state"] for step in status["steps"]}
    assert (states["prepare"], states["plan"], states["train"]) == ("fresh", "stale", "stale")
    assert {"plan", "train"} <= set(status["next"]["steps"])


def test_only_what_depends_on_a_change_is_done_again(released_project, listener, change_settings):
    first = outputs_of(released_project)["release"]["id"]
    change_settings(released_project, gate={"rules": [{"metric": "latency_seconds", "under": 999.0}]})
    run(released_project, listener)
    assert listener.done == ["gate", "release", "try", "report"]
    # And the way back, by the commands that an engineer on call at night would use.
    second = outputs_of(released_project)["release"]
    assert second["parent"] == first
    assert graft_json(released_project, "release", "rollback")["release_id"] == first
    assert live(released_project) == first
    graft_json(released_project, "release", "rollback", exit_code=2)
    words = ("release", "promote", second["id"][:10], "--reason", "fixed")
    assert graft_json(released_project, *words)["why"] == "fixed"
    # A release whose bytes changed is not promoted again.
    damaged = released_project / ".graft" / "releases" / first / "adapter_config.json"
    damaged.chmod(0o644)
    damaged.write_text("{}")
    graft_json(released_project, "release", "promote", first, exit_code=3)
    assert live(released_project) == second["id"]


def test_a_release_is_tried_out_alone_although_clients_call_another_model_by_its_alias(
    released_project, change_settings
):
    large = {"url": "http://127.0.0.1:9/v1", "model": "gpt-4o"}
    served = {"models": {"champion": {"to": "large"}}, "failover": {"endpoints": {"large": large}}}
    change_settings(
        released_project, serve=served, gate={"rules": [{"metric": "latency_seconds", "under": 999.0}]}
    )
    made = run(released_project)
    release = made.get("release", Release)
    assert {attempt.answered_by for attempt in made.get("try", TryOut).tried} == {release.id}


def test_a_gate_that_says_no_releases_nothing(released_project, listener, change_settings):
    first = outputs_of(released_project)["release"]["id"]
    change_settings(released_project, gate={"rules": [{"metric": "json_valid", "over": 0.6}]})
    verdict = run(released_project, listener).get("gate", Verdict)
    assert verdict.decision != "deploy"
    assert listener.done == ["gate", "report"]
    with opened(released_project) as work:
        assert [release.id for release in work.releases.list()] == [first]
    done = graft_json(released_project, "gate", exit_code=verdict.exit_code)
    assert done["decision"] == verdict.decision
    assert verdict.exit_code != 0


def test_a_run_that_is_gone_is_done_again_and_a_rehearsed_crash_changes_no_byte(
    released_project, listener, change_settings
):
    plain = outputs_of(released_project)["train"]
    # How a run is watched does not make it another run: it is done again because it is gone.
    shutil.rmtree(run_folder(released_project))
    change_settings(released_project, train={"run": {"rehearse_crash": True}})
    crashed = run(released_project, listener, upto="train").get("train", TrainOutcome)
    assert listener.done == ["train"]
    assert crashed.restarts == 1
    assert crashed.replayed_steps > 0
    assert crashed.replay_identical is True
    assert crashed.adapter_hash == plain["adapter_hash"]
    assert any("SIGKILL" in word for word in listener.words)


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(
    small_project, listener, change_settings
):
    change_settings(small_project, plan={"memory_limit_gib": 0.01})
    with pytest.raises(NegativeResult, match="does not fit"):
        run(small_project, listener)
    assert not (small_project / ".graft" / "runs").exists()


def test_killed_interrupted_and_resumed_a_run_comes_to_the_same_bytes(
    released_project, change_settings, tmp_path
):
    # Enough steps to be caught in the middle.
    change_settings(released_project, train={"epochs": 8})
    twin = shutil.copytree(released_project, tmp_path / "twin")
    expected = run(twin, upto="train").get("train", TrainOutcome).adapter_hash
    shutil.rmtree(run_folder(released_project))

    def only_run():
        return graft_json(released_project, "status")["runs"][0]

    process = start_graft(released_project, "train", "--json")
    folder = wait_for_steps(released_project, process, steps=2)
    # A second run next to it is refused: however long it takes to start, the first is not over before.
    worker = lock_holder(folder)
    os.kill(worker, signal.SIGSTOP)
    refused = graft_json(released_project, "train", exit_code=3)
    assert "another worker" in refused["what"]
    # The worker is killed: the supervisor starts it again.
    os.kill(worker, signal.SIGKILL)
    wait_for_steps(released_project, process, steps=14)
    # The supervisor is killed: the worker stops in order, nobody is left behind.
    wait_for_worker(folder, alive=True)
    process.kill()
    process.communicate()
    wait_for_worker(folder, alive=False)
    left = only_run()
    assert (left["state"], left["health"]) == ("running", "gone")
    assert "graft run" in left["reason"]
    # Ctrl-C stops in order.
    before = len((folder / "steps.jsonl").read_bytes().splitlines())
    process = start_graft(released_project, "train")
    wait_for_steps(released_project, process, steps=before + 3)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert lock_holder(folder) is None
    assert any((folder / "checkpoints").iterdir())
    assert only_run()["state"] == "stopped"

    assert graft_json(released_project, "train")["adapter_hash"] == expected
    assert only_run()["state"] == "done"


class InterruptedHost(LocalWorkers):
    """Ctrl-C while the worker is being started."""

    def submit(self, job):
        raise KeyboardInterrupt


def test_a_run_is_busy_while_another_worker_stops_and_stopped_by_ctrl_c_before_the_worker_runs(
    released_project,
):
    with opened(released_project) as work:
        plan = run_pipeline(work, upto="plan").get("plan", Plan)
        folder = work.project.runs / run_id_of(plan)
        shutil.rmtree(folder)
        # The worker of a killed command still stops.
        with hold_lock(folder), pytest.raises(Busy, match="another worker"):
            run_pipeline(work, upto="train")
        with pytest.raises(KeyboardInterrupt):
            run_pipeline(replace(work, place=InterruptedHost()), upto="train")
        assert [run.state for run in work.runs.list()] == ["stopped"]


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
        assert not [lock for lock in state.rglob("lock") if lock_holder(lock.parent) is not None]
    run(small_project, listener)
    assert listener.skipped + listener.done == ALL
    assert listener.done == ["report"]


def test_a_crashing_worker_is_given_up_with_its_last_messages(
    small_project, change_settings, tiny_base, tmp_path
):
    broken = shutil.copytree(tiny_base, tmp_path / "broken")
    change_settings(small_project, base=str(broken), train={"run": {"max_restarts": 0}})
    run(small_project, upto="plan")
    (broken / "model.safetensors").write_bytes(b"\0" * 100)
    done = graft(small_project, "train", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["fix"]
