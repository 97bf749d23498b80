"""Runs at places that stop answering while they train."""

from types import SimpleNamespace

import pytest

from graftwork.fleet import jobs as fleet_jobs
from graftwork.pipeline.step import StepOutputs
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.fleet import Reconciled
from graftwork.records.plan import Plan


@pytest.fixture
def poll(monkeypatch):
    """Why the run has ended at a time, with the place up, down or refusing; None while it goes on."""
    job, place = SimpleNamespace(id="job", is_open=True, state="running", reason=""), "ssh:far"
    monkeypatch.setattr(fleet_jobs, "get_job", lambda *_asked: job)
    monkeypatch.setattr(fleet_jobs, "find_jobs", lambda *_asked: [job])
    work = SimpleNamespace(reporter=SimpleNamespace(info=lambda _text: None))
    runs, made = fleet_jobs.RunSet(patience_seconds=900), StepOutputs({"plan": Plan.model_construct()})

    def ask(now, *, down=False, refuses=False):
        def reconcile(**_asked):
            if refuses:
                raise EnvironmentFailure("the key is not known there")
            return Reconciled(unreachable=(place,) if down else ())

        if not runs:
            runs.start("far", work, fleet_jobs.FleetRequest(place), made)
        monkeypatch.setattr(fleet_jobs, "collecting", lambda *_asked: SimpleNamespace(reconcile=reconcile))
        clock = SimpleNamespace(monotonic=lambda: now, time=lambda: now)
        monkeypatch.setattr(fleet_jobs, "time", clock)
        return {name: why for name, _, why in runs.ended()}.get("far")

    return ask


def test_a_place_that_does_not_answer_for_long_fails_and_may_be_tried_again(poll):
    assert poll(0, down=True) is None
    assert poll(899, down=True) is None
    assert poll(900, down=True) == "ssh:far has not answered for 15 minutes"
    assert poll(901, down=True) is None


def test_a_place_that_refuses_for_long_fails(poll):
    assert poll(0, refuses=True) is None
    assert poll(900, refuses=True) == "ssh:far has not answered for 15 minutes"


def test_a_place_that_answers_in_between_goes_on(poll):
    assert poll(0, down=True) is None
    assert poll(600) is None
    assert poll(1000, down=True) is None
    assert poll(1899, down=True) is None
