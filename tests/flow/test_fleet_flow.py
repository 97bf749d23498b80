"""Training as a bundle: stopped on this machine, finished over SSH, with the bytes of a local run."""

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from flows import opened

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from ssh_server import running_sshd

from graftwork.cli.main import app
from graftwork.files.disk import Journal
from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.jobs import FleetRequest, follow, start_run
from graftwork.fleet.plans import BundleOptions, pack_run, secrets_of
from graftwork.fleet.project import open_place
from graftwork.pipeline.table import run_pipeline
from graftwork.records.run import TrainOutcome

SECRETS = ("hooks3cr3t", "mirr0rpassword", "c0mmandtoken", "hf_environments3cr3t")


@pytest.fixture
def secretive(small_project, change_settings, tmp_path):
    """A project with a secret in every place that can hold one."""
    run = {
        "alerts": {"webhook": f"https://hooks.example.com/{SECRETS[0]}", "command": f"notify {SECRETS[2]}"},
        "mirror": f"s3://user:{SECRETS[1]}@bucket/folder",
    }
    change_settings(small_project, train={"run": run, "epochs": 1})
    return small_project


def files_below(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_bundle_holds_no_secret_and_no_held_out_case(secretive, listener, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS[3])
    with opened(secretive, listener) as work:
        folder, bundle = pack_run(work, run_pipeline(work, upto="plan"), BundleOptions())
        assert SECRETS[1] in str(secrets_of(work, bundle.run_id))
    for path in files_below(folder):
        content = path.read_bytes()
        assert not any(secret.encode() in content for secret in SECRETS), path
    assert not any("test" in name for name in bundle.files)
    assert bundle.base.kind == "bundled"


def wait_for_steps(work, job, count):
    folder = work.project.state / "fleet" / "local" / "jobs" / job.label / "work" / "run"
    pause = threading.Event()
    while len(Journal(folder / "steps.jsonl").read()) < count:
        assert open_place(work, "local").poll(job.placed).phase != "ended", fleet_jobs.read_log(work, job)
        pause.wait(0.05)


@pytest.mark.slow
def test_a_run_moves_from_this_machine_to_another_and_keeps_its_bytes(
    small_project, listener, change_settings, tmp_path, monkeypatch, capsys
):
    change_settings(small_project, train={"epochs": 4, "checkpoint_every": 5, "validation_rows": 2})
    other = tmp_path / "other"
    shutil.copytree(small_project, other)
    with opened(small_project, listener) as work:
        whole = run_pipeline(work, upto="train").get("train", TrainOutcome)
    hosts = {"far": {"address": "127.0.0.1", "python": sys.executable, "folder": str(tmp_path / "far")}}
    change_settings(other, fleet={"hosts": hosts})
    with running_sshd(tmp_path) as command, opened(other, listener) as work:
        monkeypatch.setenv("GRAFT_SSH", command)
        job = start_run(work, FleetRequest("local"), confirm=lambda _quote: True)
        wait_for_steps(work, job, 8)
        fleet_jobs.stop(work, job, at_once=False)
        stopped = follow(work, job, poll_seconds=0.2)
        assert stopped.state == "stopped"
        run_folder = work.project.runs / job.run_id
        assert list((run_folder / "checkpoints").glob("step-*"))

        app(["fleet", "run", "--place", "ssh", "-C", str(other), "--json"], standalone_mode=False)
        outcome = json.loads(capsys.readouterr().out)
        assert outcome["adapter_hash"] == whole.adapter_hash
        assert next(found for found in outcome["residuals"] if found["name"] == "minutes")["actual"] > 0
        assert Path(outcome["adapter_folder"]) == run_folder / "adapter"
        states = [(job.place, job.state) for job in work.jobs.list()]
        assert states == [("local", "stopped"), ("ssh", "done")]
        # Trained elsewhere, it is this project's run: nothing is left to train.
        assert run_pipeline(work, upto="train").get("train", TrainOutcome).adapter_hash == whole.adapter_hash
