"""Places keep one contract: this machine, and hosts over a real sshd on loopback."""

import json
import sys
from pathlib import Path

import pytest
from ssh_server import running_sshd

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_samples import trial_bundle
from place_contract import order, processes_with, wait_for

from graftwork.fleet.hosts import local_place, ssh_place
from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.settings import HostSettings
from graftwork.records.errors import EnvironmentLacks, UserMistake


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with running_sshd(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """The folders of the hosts, shared by the tests: the wheel is unpacked once."""
    return tmp_path_factory.mktemp("hosts")


EITHER = pytest.mark.parametrize("make_place", ["local", "ssh"], indirect=True)
ALSO_LOCAL = pytest.mark.parametrize(
    "make_place", [pytest.param("local", marks=pytest.mark.slow), "ssh"], indirect=True
)


@pytest.fixture
def make_place(request, roots, monkeypatch):
    """Opens the place as a new process would."""
    if request.param == "local":
        return lambda: local_place(roots / "local")
    monkeypatch.setenv("GRAFT_SSH", request.getfixturevalue("sshd"))
    host = HostSettings(address="127.0.0.1", python=sys.executable, folder=str(roots / "it's far $(touch x)"))
    return lambda: ssh_place({"gpu1": host})


@EITHER
def test_a_job_runs_detached_and_its_result_is_fetched(make_place, tmp_path):
    bundle, manifest = trial_bundle(tmp_path)
    ordered = order(bundle, 1 + (make_place().name == "ssh"))
    place = make_place()
    job = place.submit(ordered, secrets={"TOKEN": "secret-value"})
    assert (job.place, job.label) == (place.name, ordered.label)
    # Another process knows only what the ledger holds.
    place = make_place()
    found = wait_for(place, job, "ended")
    assert found.exit_code == 0, place.log(job)
    place.fetch(job, tmp_path / "run")
    outcome = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert outcome["adapter_folder"] == str(tmp_path / "run" / "adapter")
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert place.list() == ()
    # The same label is the same job, and nothing is sent twice.
    assert place.submit(ordered, secrets={}) == job
    assert place.sent_bytes == 0
    assert place.poll(job).exit_code == 0
    assert manifest.size > 0


@ALSO_LOCAL
def test_a_job_is_stopped_in_order_and_goes_on_at_another_place(make_place, tmp_path, roots):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 200, "step_seconds": 0.05})
    place = make_place()
    job = place.submit(order(bundle, 3 + (place.name == "ssh")), secrets={})
    while (beat := place.poll(job).beat) is None or beat.done < 1:
        assert place.poll(job).phase != "ended", place.log(job)
    assert [found.label for found in place.list()] == [job.label]
    place.stop(job)
    assert wait_for(place, job, "ended").exit_code == 75
    place.fetch(job, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert int(newest.name[-6:]) >= 1
    assert place.list() == ()
    place.stop(job)  # nothing left to stop
    place.remove(job)
    assert place.poll(job).phase == "gone"
    with pytest.raises(EnvironmentLacks, match="does not have the job"):
        place.fetch(job, tmp_path / "again")


@pytest.mark.slow
@EITHER
def test_a_job_ends_at_once_with_all_that_it_started(make_place, tmp_path):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 10, "step_seconds": 60})
    place = make_place()
    job = place.submit(order(bundle, 5 + (place.name == "ssh")), secrets={})
    wait_for(place, job, "running")
    place.stop(job, at_once=True)
    assert wait_for(place, job, "ended").exit_code == -9
    assert not processes_with(job.label)


def test_a_host_that_cannot_be_reached_or_has_no_python_is_explained(sshd, roots, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    folder = str(roots / "far")
    with pytest.raises(Refused, match="no such Python") as caught:
        ssh_place({"gpu1": HostSettings(address="127.0.0.1", python="no-python", folder=folder)}).offer()
    assert "fleet.hosts.gpu1.python" in caught.value.where
    monkeypatch.setenv("GRAFT_SSH", "ssh -p 1")
    with pytest.raises(PlaceUnreachable, match="gpu1 cannot be reached"):
        ssh_place({"gpu1": HostSettings(address="127.0.0.1")}).offer()
    with pytest.raises(UserMistake, match="no hosts"):
        ssh_place({})


def test_secrets_reach_the_job_and_no_file_or_argument(sshd, roots, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    root = roots / "secrets"
    place = ssh_place({"a": HostSettings(address="127.0.0.1", python=sys.executable, folder=str(root))})
    bundle, _ = trial_bundle(tmp_path, job={"steps": 10, "step_seconds": 60})
    job = place.submit(order(bundle, 9), secrets={"HF_TOKEN": "hf_s3cr3tvalue"})
    wait_for(place, job, "running")
    marked = processes_with("hf_s3cr3tvalue")
    assert marked
    assert not any(b"hf_s3cr3t" in (process / "cmdline").read_bytes() for process in marked)
    place.stop(job, at_once=True)
    wait_for(place, job, "ended")
    for folder in (tmp_path, root):
        for path in folder.rglob("*"):
            assert not path.is_file() or b"hf_s3cr3tvalue" not in path.read_bytes(), path
