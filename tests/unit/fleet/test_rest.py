"""Answers of providers that are not what their description says."""

import json

import pytest

from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.fleet.places.lambda_cloud import LambdaClient, LambdaPlace, LambdaSettings
from graftwork.fleet.places.runpod import RunPodClient, RunPodPlace, RunPodSettings
from graftwork.records.fleet import JobOrder

LABEL = "graft-00000000-000000000001"
ORDER = JobOrder(job_id="1" * 12, label=LABEL, run_id="run", bundle="", gpu="A10", seconds=60.0)
ODD = [b"[]", b"null", b'"busy"', b"{}", b"", b"<html>busy</html>", b'{"pods": null, "data": null}']


def answers(client, status, body):
    client._send = lambda *_request: (status, body, None)
    return client


@pytest.fixture(params=["runpod", "lambda"])
def make_place(request, tmp_path):
    def make(status, body):
        if request.param == "runpod":
            client = RunPodClient("key", base_url="http://unused", wait=lambda _seconds: None)
            return RunPodPlace(RunPodSettings(), state=tmp_path, client=answers(client, status, body))
        client = LambdaClient("key", base_url="http://unused", wait=lambda _seconds: None)
        return LambdaPlace(LambdaSettings(), state=tmp_path, client=answers(client, status, body))

    return make


@pytest.mark.parametrize("body", ODD)
@pytest.mark.parametrize("status", [200, 404, 418, 503])
def test_an_odd_answer_to_a_list_is_an_error_of_the_place_and_never_an_empty_list(make_place, status, body):
    with pytest.raises((PlaceUnreachable, Refused)):
        make_place(status, body).list()


@pytest.mark.parametrize("body", ODD)
@pytest.mark.parametrize("status", [200, 201, 429, 500, 502])
def test_after_an_odd_answer_to_a_creation_a_machine_may_exist(make_place, status, body):
    place = make_place(status, body)
    place.request_of = lambda _order: {}
    with pytest.raises(PlaceUnreachable):
        place.rent(ORDER)


@pytest.mark.parametrize("missing", ["cost", "createdAt", "gpu"])
def test_a_pod_of_ours_is_listed_whatever_is_not_known_of_it(tmp_path, missing):
    pod = {"id": "pod-1", "name": LABEL, "status": "RUNNING", "cost": 0.4}
    pod |= {"createdAt": "2026-11-01T00:00:00Z", "gpu": {"id": "A10"}}
    strangers = [{"id": "pod-2"}, {"id": "pod-3", "name": None, "status": None}]
    for odd in ({**pod, missing: None}, {key: value for key, value in pod.items() if key != missing}):
        body = json.dumps({"pods": [*strangers, odd]}).encode()
        client = answers(RunPodClient("key", base_url="http://unused"), 200, body)
        (found,) = RunPodPlace(RunPodSettings(), state=tmp_path, client=client).list()
        assert (found.id, found.label) == ("pod-1", LABEL)
