"""A real Ray with authentication keeps the contract of places. `make test-ray` runs it."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from ray_cluster import require_ray, running_ray

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "fleet"))

from fleet_samples import trial_bundle
from place_contract import PAUSE, order, processes_with, wait_for
from trial_worker import _resume

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.places.ray import RayPlace, RaySettings
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.fleet import PlacedJob

pytestmark = pytest.mark.slow
UNKNOWN = PlacedJob(place="ray", id="graft-00000000-00000000ffff", label="graft-00000000-00000000ffff")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The address of its dashboard, and the file with its token."""
    folder = tmp_path_factory.mktemp("ray")
    with running_ray(folder, nodes=0, dashboard=True) as found:
        yield f"http://{found.head_node.webui_url}", str(folder / "token")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def make_place(cluster, shared):
    """Opens the place as a new process would: with the settings alone."""
    jobs, token = cluster
    return lambda **changes: RayPlace(
        RaySettings(**{"jobs": jobs, "token": token, "folder": str(shared / "it's shared"), **changes})
    )


def test_ray_runs_a_job_once_and_its_result_is_fetched(make_place, tmp_path):
    bundle, _ = trial_bundle(tmp_path)
    (offer,) = make_place().offer()
    assert (offer.place, offer.gpus) == ("ray", 0)
    ordered = order(bundle, 31)
    job = make_place().submit(ordered, secrets={})
    # Another process knows only what the ledger holds.
    place = make_place()
    found = wait_for(place, job, "ended")
    assert found.exit_code == 0, place.log(job)
    place.fetch(job, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["run_id"] == "run1"
    assert place.list() == ()
    assert place.submit(ordered, secrets={}) == job
    assert (place.list(), place.sent_bytes) == ((), 0)


def test_ray_stops_a_job_in_order_and_no_file_keeps_its_secrets(make_place, tmp_path, shared):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 500, "step_seconds": 0.05})
    place = make_place()
    ordered = order(bundle, 32)
    job = place.submit(ordered, secrets={"HF_TOKEN": "hf_s3cr3tvalue"})
    while (beat := place.poll(job).beat) is None or beat.done < 1:
        assert place.poll(job).phase != "ended", place.log(job)
    assert [found.label for found in place.list()] == [job.label]
    # A second submitter gets the same job.
    assert make_place().submit(ordered, secrets={}) == job
    marked = processes_with("HF_TOKEN=hf_s3cr3tvalue")
    assert marked
    assert not any(b"s3cr3t" in (process / "cmdline").read_bytes() for process in marked)
    place.stop(job)
    assert wait_for(place, job, "ended").exit_code == 75, place.log(job)
    place.fetch(job, tmp_path / "run")
    assert _resume(tmp_path / "run" / "checkpoints", "")[0] >= 1
    place.stop(job)  # nothing left to stop
    for folder in (shared, Path("/tmp/ray/session_latest/logs")):
        assert not any(b"s3cr3tvalue" in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_ray_ends_a_job_at_once_and_the_next_submit_goes_on_from_its_checkpoint(make_place, tmp_path):
    bundle, _ = trial_bundle(tmp_path, job={"steps": 40, "step_seconds": 0.2})
    place, ordered = make_place(), order(bundle, 33, seconds=240.0)
    job = place.submit(ordered, secrets={})
    while (beat := place.poll(job).beat) is None or beat.done < 3:
        assert place.poll(job).phase != "ended", place.log(job)
    place.stop(job, at_once=True)
    wait_for(place, job, "ended")
    for _ in range(100):
        if not processes_with(f"GRAFT_FLEET_JOB={job.label}"):
            break
        PAUSE.wait(0.1)
    else:
        pytest.fail("processes of the job are left")
    reached = _resume(place.job_folder(job.label) / "work" / "run" / "checkpoints", "")[0]
    assert 3 <= reached < 40
    # As after the loss of a node: the job left no end.
    (place.job_folder(job.label) / "work" / "exit.json").unlink(missing_ok=True)
    place.submit(ordered, secrets={})
    assert place.list() == (job,)
    assert make_place().submit(ordered, secrets={}) == job
    found = wait_for(place, job, "ended")
    assert found.exit_code == 0, (place.log(job), place._client.list_jobs())
    assert place.list() == ()


def test_what_ray_does_not_know_or_refuses_is_explained(make_place, cluster, tmp_path):
    place = make_place()
    with pytest.raises(EnvironmentFailure, match="does not have the job"):
        place.fetch(UNKNOWN, tmp_path / "none")
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    with pytest.raises(Refused, match="rejected the token"):
        make_place(token=str(wrong)).list()
    with pytest.raises(Refused, match="no token"):
        make_place(token=str(tmp_path / "missing")).list()
    with pytest.raises(PlaceUnreachable, match="is not responding"):
        make_place(jobs="http://127.0.0.1:1").list()


def test_a_cluster_that_takes_jobs_from_anybody_is_refused(tmp_path):
    """A stand-in: a second Ray would take half a minute to start."""
    require_ray()
    (tmp_path / "token").write_text("0" * 64)

    class Open(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

        def log_message(self, *_words):
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Open)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = RayPlace(
        RaySettings(jobs=f"http://127.0.0.1:{server.server_port}", token=str(tmp_path / "token"))
    )
    with pytest.raises(Refused, match="accepts jobs from anyone"):
        place.list()
    server.shutdown()
