"""A real Slurm without accounting keeps the contract of places. `make test-slow` runs it."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import running_slurm

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_samples import trial_bundle
from place_contract import PAUSE, order, processes_with, wait_for
from trial_worker import _resume

from graftwork.fleet.place import Refused
from graftwork.fleet.places.slurm import SlurmPlace, SlurmSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_slurm(tmp_path_factory.mktemp("slurm")) as conf:
        yield conf


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def place(cluster, shared, monkeypatch):
    monkeypatch.setenv("SLURM_CONF", str(cluster))
    return SlurmPlace(SlurmSettings(folder=str(shared / "graftwork")))


def test_slurm_runs_a_job_and_its_result_is_fetched(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    (offer,) = place.offer()
    assert offer.instance == "all, 1 nodes"
    ordered = order(bundle, 21)
    job = place.submit(ordered, secrets={})
    found = wait_for(place, job, "ended")
    assert found.exit_code == 0, place.log(job)
    place.fetch(job, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["run_id"] == "run1"
    assert place.list() == ()
    assert place.submit(ordered, secrets={}) == job
    assert (place.list(), place.sent_bytes) == ((), 0)


def test_slurm_stops_a_job_in_order_and_passes_secrets_by_its_environment(place, tmp_path, shared):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 500, "step_seconds": 0.05})
    job = place.submit(order(bundle, 22), secrets={"HF_TOKEN": "hf_s3cr3tvalue"})
    while (beat := place.poll(job).beat) is None or beat.done < 1:
        assert place.poll(job).phase != "ended", place.log(job)
    assert [found.label for found in place.list()] == [job.label]
    marked = processes_with("HF_TOKEN=hf_s3cr3tvalue")
    assert marked
    assert not any(b"s3cr3t" in (process / "cmdline").read_bytes() for process in marked)
    place.stop(job)
    assert wait_for(place, job, "ended").exit_code == 75, place.log(job)
    place.fetch(job, tmp_path / "run")
    assert _resume(tmp_path / "run" / "checkpoints", "")[0] >= 1
    assert not any(b"s3cr3tvalue" in path.read_bytes() for path in shared.rglob("*") if path.is_file())


def test_slurm_queues_a_job_again_and_it_goes_on_from_its_checkpoint(place, tmp_path):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 60, "step_seconds": 0.2})
    job = place.submit(order(bundle, 23, seconds=240.0), secrets={})
    while (beat := place.poll(job).beat) is None or beat.done < 5:
        assert place.poll(job).phase != "ended", place.log(job)
    # As after the loss of a node.
    ids = subprocess.run(
        ["squeue", "-h", "-n", job.label, "-o", "%i"], capture_output=True, text=True, check=True
    )
    number = ids.stdout.strip()
    subprocess.run(["scontrol", "requeue", number], check=True)
    while (found := place.poll(job)).phase != "ended":
        # Slurm waits two minutes before it starts the job again.
        now = ["scontrol", "update", f"JobId={number}", "StartTime=now"]
        subprocess.run(now, check=False, capture_output=True)
        PAUSE.wait(0.5)
    assert found.exit_code == 0, place.log(job)
    place.fetch(job, tmp_path / "run")
    state = "trial"
    for _ in range(60):
        state = hashlib.sha256(state.encode()).hexdigest()
    assert (tmp_path / "run" / "adapter" / "trial.txt").read_text() == state
    assert "stopped at a safe point" in place.log(job)
    assert not processes_with(job.label)


def test_what_slurm_refuses_is_explained_and_nothing_is_queued(place, tmp_path, shared, monkeypatch):
    bundle, _ = trial_bundle(tmp_path)
    wrong = SlurmPlace(SlurmSettings(folder=str(shared / "graftwork"), partition="none"))
    with pytest.raises(Refused, match="Slurm rejected the job"):
        wrong.submit(order(bundle, 24), secrets={})
    assert place.list() == ()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refused, match="there is no squeue"):
        place.list()
