"""Places keep one contract: this machine, and hosts over a real sshd on loopback."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

import pytest
from ssh_server import running_sshd

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_drill import MemoryLedger
from fleet_samples import trial_bundle
from place_contract import order as any_order
from place_contract import processes_with, wait_for

from graftwork.fleet.control import Controller
from graftwork.fleet.place import PlaceUnreachable, Refused, make_label
from graftwork.fleet.places.hosts import HostSettings, HostsPlace, ProcessConnection, local_place, ssh_place
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.records.fleet import PlacedJob


def order(bundle, number=1):
    """With more time than a busy machine takes: a job that is late is stopped."""
    return any_order(bundle, number, seconds=3600.0)


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
    # It is stopped, and must not end before, however long a poll takes.
    bundle, _ = trial_bundle(tmp_path, job={"steps": 20_000, "step_seconds": 0.05})
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
    with pytest.raises(EnvironmentFailure, match="does not have the job"):
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
    while processes_with(job.label):
        time.sleep(0.02)  # killed, and not buried yet


def test_a_host_that_cannot_be_reached_or_has_no_python_is_explained(sshd, roots, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    folder = str(roots / "far")
    with pytest.raises(Refused, match="no such Python") as caught:
        ssh_place({"gpu1": HostSettings(address="127.0.0.1", python="no-python", folder=folder)}).offer()
    assert "fleet.hosts.gpu1.python" in caught.value.where
    monkeypatch.setenv("GRAFT_SSH", "ssh -p 1")
    with pytest.raises(PlaceUnreachable, match="gpu1 cannot be reached") as unreached:
        ssh_place({"gpu1": HostSettings(address="me@127.0.0.1")}).offer()
    assert "`ssh me@127.0.0.1 true`" in unreached.value.fix
    with pytest.raises(UserError, match="no hosts"):
        ssh_place({})


def test_secrets_reach_the_job_and_no_file_or_argument(sshd, roots, monkeypatch, tmp_path):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    root = roots / "secrets"
    place = ssh_place({"a": HostSettings(address="127.0.0.1", python=sys.executable, folder=str(root))})
    bundle, _ = trial_bundle(tmp_path, job={"steps": 10, "step_seconds": 60})
    # Tests that run at the same time have other secrets.
    secret = f"hf_{token_hex(12)}"
    job = place.submit(order(bundle, 9), secrets={"HF_TOKEN": secret})
    wait_for(place, job, "running")
    marked = processes_with(secret)
    assert marked
    assert not any(secret.encode() in arguments_of(process) for process in marked)
    place.stop(job, at_once=True)
    wait_for(place, job, "ended")
    for folder in (tmp_path, root):
        for path in folder.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def arguments_of(process):
    """Nothing if it has ended since it was found."""
    with suppress(OSError):
        return (process / "cmdline").read_bytes()
    return b""


def test_a_connection_that_was_cut_is_made_again_for_the_next_command(sshd, roots, monkeypatch):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    folder = str(roots / "cut")
    place = ssh_place({"a": HostSettings(address="127.0.0.1", python=sys.executable, folder=folder)})
    assert place.list() == ()
    (connection,) = place._connections.values()
    process = connection._session._process
    process.kill()
    process.wait()
    assert place.list() == ()
    assert connection._session._process.pid != process.pid


def test_what_the_shell_of_a_host_prints_at_a_login_does_no_harm(roots):
    words = ["sh", "-c", 'echo Welcome; exec "$0" "$@"', sys.executable]
    connection = ProcessConnection("a", words, root=str(roots / "greets"), far=False)
    assert HostsPlace("ssh", {"a": connection}).list() == ()


def test_a_host_without_the_job_says_so_also_where_files_were_asked_for(make_far, tmp_path):
    place = make_far()
    with pytest.raises(EnvironmentFailure, match="does not have the job"):
        place.fetch(PlacedJob(place="ssh", id="x", label=order("").label, host="a"), tmp_path / "run")
    # A refusal ends the session, not the place.
    assert place.list() == ()


def test_a_full_disk_of_a_host_is_explained_and_no_part_of_a_file_stays(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(small)], check=False).returncode:
        pytest.skip("this machine does not let a small disk be mounted")
    bundle, _ = trial_bundle(tmp_path)
    try:
        for place in (
            local_place(small),
            HostsPlace("ssh", {"a": ProcessConnection("a", [sys.executable], root=str(small), far=False)}),
        ):
            with pytest.raises(Refused, match="the disk of the host is full") as caught:
                place.submit(order(bundle, 11), secrets={})
            assert "free some space there" in caught.value.fix
            assert place.list() == ()
            assert not list(small.glob("blobs/.*"))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def connections(tmp_path, **words):
    return {
        name: ProcessConnection(name, command, root=str(tmp_path / name), far=False)
        for name, command in words.items()
    }


def test_a_host_that_is_off_does_not_stop_the_jobs_of_the_others(tmp_path):
    place = HostsPlace("ssh", connections(tmp_path, on=[sys.executable], off=["false"]))
    ledger, (bundle, _) = MemoryLedger(), trial_bundle(tmp_path)
    controller = Controller(place, ledger)
    ordered = order(bundle, 12)
    ordered = ordered.model_copy(update={"label": make_label(ledger.key, ordered.job_id)})
    job = controller.start(ordered, caps=CapSettings(), now=0.0)
    assert job.placed.host == "on"
    lost = job.model_copy(
        update={"id": "f" * 12, "run_id": "other", "label": make_label(ledger.key, "f" * 12)}
    )
    lost = lost.model_copy(update={"placed": job.placed.model_copy(update={"host": "off"})})
    ledger.reserve(lost, CapSettings())
    wait_for(place, job.placed, "ended")
    report = controller.reconcile(now=1.0)
    assert ledger.get(job.id).state == "done"
    # What runs on the other one is not known: its job stays open.
    assert ledger.get(lost.id).state == "submitted"
    assert report.unreachable == ("ssh: off",)


def test_hosts_that_are_all_off_are_all_named(tmp_path):
    place = HostsPlace("ssh", connections(tmp_path, one=["false"], two=["false"]))
    for ask in (place.offer, place.list):
        with pytest.raises(PlaceUnreachable, match="none of the hosts one, two can be reached") as caught:
            ask()
        assert caught.value.fix


@pytest.fixture
def make_far(sshd, roots, monkeypatch):
    monkeypatch.setenv("GRAFT_SSH", sshd)
    host = HostSettings(address="127.0.0.1", python=sys.executable, folder=str(roots / "asked"))
    return lambda: ssh_place({"a": host})
