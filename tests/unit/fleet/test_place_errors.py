"""Places report `Refused` only where nothing can have been made; after any other error it may have been."""

import ast
import http.client
import io
import json
import urllib.request
from pathlib import Path

import pytest

import graftwork.fleet
from graftwork.fleet.place import NotThere, PlaceUnreachable, Refused
from graftwork.fleet.places import kaggle, skypilot
from graftwork.fleet.places.ray import RayPlace, RaySettings
from graftwork.fleet.places.skypilot import SkyPilotSettings
from graftwork.records.fleet import JobOrder


@pytest.mark.parametrize("errors", ["504 gateway timeout", "SSLEOFError(8, 'EOF occurred')", "", "Killed"])
def test_skypilot_errors_after_which_a_job_may_exist_are_no_refusals(errors):
    assert isinstance(skypilot._explain(errors), PlaceUnreachable)


@pytest.mark.parametrize("errors", ["ResourcesUnavailableError: none", "Run: sky check", "Invalid task YAML"])
def test_skypilot_errors_that_exclude_a_job_are_refusals(errors):
    assert isinstance(skypilot._explain(errors), Refused)


@pytest.mark.parametrize("errors", ["Run: sky check", "quota", "No such option: -o"])
def test_a_job_that_skypilot_has_taken_is_never_refused_afterwards(errors, monkeypatch):
    calls = []

    def run(words, _environment):
        calls.append(words[1])
        return (1, "", errors) if "launch" in calls[:-1] else (0, json.dumps([]), "")

    monkeypatch.setattr(skypilot.SkyPilotPlace, "ship", lambda _place, _order: [])
    files = {"bucket": "s3://unused", "local_storage": "memory://unused"}
    settings = SkyPilotSettings(**files, accelerators={"A10": 1.0})
    order = JobOrder(job_id="1" * 12, label="x", run_id="run", bundle="", gpu="A10", seconds=60.0)
    with pytest.raises(PlaceUnreachable):
        skypilot.SkyPilotPlace(settings, run=run).submit(order, secrets={})
    assert calls == ["queue", "launch", "queue"]


def test_output_of_kaggle_that_ends_too_early_is_brought_again(monkeypatch):
    class Cut(io.BytesIO):
        def read(self, *_size):
            raise http.client.IncompleteRead(b"half")

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_request, **_options: Cut())
    with pytest.raises(PlaceUnreachable, match="could not be downloaded"):
        kaggle._download("https://kaggle.invalid/output", io.BytesIO())


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Request failed with status code 404: Job graft-x does not exist.", NotThere),
        (
            "Request failed with status code 500: graft-00404401-000000000403: does not exist.",
            PlaceUnreachable,
        ),
        ("Request failed with status code 403: no.", Refused),
        ("Unauthorized: no token", Refused),
    ],
)
def test_ray_errors_are_explained_by_their_status(message, kind, tmp_path):
    place = RayPlace(RaySettings(folder=str(tmp_path)))
    assert isinstance(place._explain(RuntimeError(message)), kind)


def test_a_dashboard_of_ray_that_refuses_to_list_nodes_is_named_with_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(RayPlace, "_client", object())
    monkeypatch.setattr(RayPlace, "_headers", lambda _place: {})
    monkeypatch.setattr(RayPlace, "_get", lambda *_request: (401, b"Unauthorized"))
    with pytest.raises(PlaceUnreachable, match="does not list its nodes") as caught:
        RayPlace(RaySettings(folder=str(tmp_path))).offer()
    assert caught.value.why == "it answers with status 401"


ERRORS = {
    "NegativeResult",
    "Busy",
    "EnvironmentFailure",
    "NotThere",
    "PlaceUnreachable",
    "Refused",
    "UserError",
}


@pytest.mark.parametrize(
    "path", sorted(Path(graftwork.fleet.__file__).parent.rglob("*.py")), ids=lambda p: p.stem
)
def test_every_error_of_the_fleet_says_how_to_fix_it(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    lacking = [
        f"{path.name}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id in ERRORS
        and "fix" not in {keyword.arg for keyword in call.keywords}
    ]
    assert not lacking
