"""Simulated hosts: real networks, sshd, Slurm and Ray on one machine; nothing is left of them."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_samples import trial_bundle
from place_contract import order, wait_for

from graftwork.fleet import simulated_hosts
from graftwork.fleet.place import PlaceUnreachable
from graftwork.fleet.places.hosts import HostSettings, ssh_place
from graftwork.fleet.simulated_hosts import HostNetwork, start_ray, start_sshd
from graftwork.records.errors import EnvironmentFailure, UserError

ANSWER = "import socket; print(socket.create_connection(('h2', 7000), timeout=5).recv(9).decode())"
SERVE = (
    "import socket; s = socket.create_server(('', 7000)); open('/tmp/ready', 'w'); "
    "[s.accept()[0].send(b'from h2') for _ in range(9)]"
)


@pytest.fixture(scope="module", autouse=True)
def allowed():
    try:
        simulated_hosts.require_namespaces()
    except EnvironmentFailure as error:
        pytest.skip(f"hosts cannot be simulated here: {error.what}")


def links():
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=False).stdout


def hosts_left():
    found = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if "/init.py" in line and simulated_hosts.PREFIX in line]


@pytest.mark.slow
def test_hosts_have_names_addresses_and_files_of_their_own_and_leave_nothing():
    before = links()
    with HostNetwork(2) as network:
        assert network.run("h2", ["hostname"]).stdout == "h2\n"
        network.run("h1", ["sh", "-c", "echo mine > /tmp/own"])
        found = network.run("h2", ["ls", "/tmp"]).stdout.split()
        assert network.state.name in found
        assert "own" not in found
        server = network.start("h2", [sys.executable, "-c", SERVE])
        while "ready" not in network.run("h2", ["ls", "/tmp"]).stdout.split():
            assert server.poll() is None
        assert network.run("h1", [sys.executable, "-c", ANSWER]).stdout == "from h2\n"
        network.cut("h2")
        with pytest.raises(EnvironmentFailure, match="failed on h1"):
            network.run("h1", [sys.executable, "-c", ANSWER])
        network.cut("h2", joined=True)
        assert network.run("h1", [sys.executable, "-c", ANSWER]).stdout == "from h2\n"
        network.kill("h2")
        server.wait(300)
        assert not network.hosts["h2"].alive
        with pytest.raises(UserError, match="no host h9"):
            network.kill("h9")
        assert links() == before
    assert not network.state.exists()


def test_a_killed_simulation_takes_its_hosts_with_it_and_the_next_one_removes_its_files(
    tmp_path, monkeypatch
):
    # A simulation of another test, at the same time, would remove the files, too.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = (
        "from graftwork.fleet.simulated_hosts import HostNetwork\nimport signal\n"
        "with HostNetwork(2) as network:\n    print(network.state, flush=True)\n    signal.pause()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    state = Path(child.stdout.readline().strip())
    assert any(str(state) in line for line in hosts_left())
    child.send_signal(signal.SIGKILL)
    child.wait()
    until = time.monotonic() + 120
    while any(str(state) in line for line in hosts_left()):
        assert time.monotonic() < until
    assert state.exists()
    simulated_hosts.remove_leftovers()
    assert not state.exists()


def test_files_that_another_simulation_removes_meanwhile_are_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_words: iter([tmp_path / f"{simulated_hosts.PREFIX}gone"]))
    simulated_hosts.remove_leftovers()


def test_faults_of_the_network_are_those_of_netem():
    with HostNetwork(1) as network:
        try:
            network.disturb("h1", "delay 50ms loss 1%")
        except EnvironmentFailure as error:
            pytest.skip(f"no faults here: {error.what}")


def wait_until_reached(place, job):
    """The kernel takes a moment to find the way to a host that has come back."""
    until = time.monotonic() + 300
    while True:
        try:
            return place.poll(job)
        except PlaceUnreachable:
            assert time.monotonic() < until


@pytest.mark.slow
def test_a_job_over_ssh_outlives_a_cut_connection(tmp_path, monkeypatch):
    with HostNetwork(2, share=[tmp_path]) as network:
        monkeypatch.setenv("GRAFT_SSH", f"{start_sshd(network)} -o ConnectTimeout=3")
        address = network.hosts["h2"].address
        far = HostSettings(address=address, python=sys.executable, folder="/tmp/graftwork")
        place = ssh_place({"h2": far})
        bundle, _ = trial_bundle(tmp_path, job={"steps": 40, "step_seconds": 0.1})
        job = place.submit(order(bundle, 41), secrets={})
        wait_for(place, job, "running")
        network.cut("h2")
        with pytest.raises(PlaceUnreachable):
            place.poll(job)
        network.cut("h2", joined=True)
        wait_until_reached(place, job)
        found = wait_for(place, job, "ended")
        assert found.exit_code == 0
        place.fetch(job, tmp_path / "run")
        assert json.loads((tmp_path / "run" / "outcome.json").read_text())["run_id"] == "run1"


PREPARE = """
import sys
from pathlib import Path
from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus import build
from graftwork.data.settings import DataSettings
from graftwork.process.pieces import MapEngine
from graftwork.process.ray_cluster import RayTasks
root = Path(sys.argv[1])
build.BLOCK_BYTES = 80_000
engine = MapEngine(RayTasks("auto", {}), folder=root / "engine", processes=1, say=print)
context = AuditContext(settings=DataSettings(logs=("log.jsonl",)))
def report(step, done, total):
    (root / "progress").write_text(str(done))
corpus = build.build_corpus(context, folder=root / "ray", root=root, on_progress=report, engine=engine)
print("rows", corpus.rows)
"""


def prepare_on(network, root, environment, *, kill=None):
    """Sift a log with the nodes of the hosts; one of them dies after the first piece."""
    (root / "progress").unlink(missing_ok=True)
    process = subprocess.Popen(
        network.command("h1", [sys.executable, "-c", PREPARE, str(root)]),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": simulated_hosts.PATH, **environment},
    )
    while kill is not None and not (root / "progress").exists():
        assert process.poll() is None, process.stdout.read()
    if kill is not None:
        network.kill(kill)
    output, _ = process.communicate(timeout=400)
    return output


@pytest.fixture
def log(tmp_path):
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from data_scale import make_rows, write_log

    write_log(tmp_path / "log.jsonl", make_rows(500, seed=7), mode="wb")
    return tmp_path


@pytest.mark.slow
def test_ray_on_three_hosts_survives_a_host_that_dies(log):
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    with HostNetwork(3, share=[log]) as network:
        environment = start_ray(network, dashboard=False)
        output = prepare_on(network, log, environment, kill="h3")
        assert "rows 500" in output
        assert "repeated" not in output or "1 repeated" in output
