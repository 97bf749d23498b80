"""A stop of a Ray job, with a stand-in for Ray's client."""

from types import SimpleNamespace

import pytest

from graftwork.fleet.place import KeepsForJobs, PlaceUnreachable
from graftwork.fleet.places.ray import SECRETS, RayPlace, RaySettings
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.fleet import JobOrder, PlacedJob

LABEL = "graft-00000000-00000000ffff"


@pytest.mark.parametrize("state", ["PENDING", "STOPPED"])
def test_a_stop_removes_the_secrets_of_a_job_that_never_started(state, tmp_path):
    place = RayPlace(RaySettings(folder=str(tmp_path)))
    stopped = []
    place._client = SimpleNamespace(
        get_job_status=lambda _label: SimpleNamespace(value=state), stop_job=stopped.append
    )
    secrets = tmp_path / "jobs" / LABEL / SECRETS
    secrets.parent.mkdir(parents=True)
    secrets.write_text("{}")
    place.stop(PlacedJob(place="ray", id=LABEL, label=LABEL))
    assert not secrets.exists()
    assert stopped == ([LABEL] if state == "PENDING" else [])


@pytest.mark.parametrize(
    "error", [RuntimeError("status code 403: no"), RuntimeError("status code 500: busy")]
)
def test_secrets_of_a_job_that_ray_did_not_take_do_not_stay(error, tmp_path):
    def submit_job(**_request):
        raise error

    place = RayPlace(RaySettings(folder=str(tmp_path)))
    place._client = SimpleNamespace(get_job_status=unknown, submit_job=submit_job)
    place.lay_out = lambda _order: (tmp_path / "jobs" / LABEL).mkdir(parents=True) or True
    secrets = tmp_path / "jobs" / LABEL / SECRETS
    order = JobOrder(job_id="0" * 8 + "ffff", label=LABEL, run_id="run", bundle="", seconds=60.0)
    with pytest.raises(EnvironmentFailure) as caught:
        place.submit(order, secrets={"HF_TOKEN": "hf_s3cr3t"})
    # What may have been taken needs them until the reconciliation has found out.
    assert secrets.exists() == isinstance(caught.value, PlaceUnreachable)
    assert isinstance(place, KeepsForJobs)
    place.forget(LABEL)
    place.forget(LABEL)
    assert not secrets.exists()


def unknown(_label):
    raise RuntimeError("status code 404: does not exist")
