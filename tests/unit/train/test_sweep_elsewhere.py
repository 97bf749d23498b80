"""Trials of a sweep at a place whose cheapest offer changes."""

from types import SimpleNamespace

import pytest

from graftwork.fleet import jobs as fleet_jobs
from graftwork.pipeline.step import StepOutputs
from graftwork.records.errors import EnvironmentFailure, WorkerFailed
from graftwork.records.hardware import Offer
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome
from graftwork.train import sweep

PRICED = Offer(place="cloud", gpu="L4", instance="g6.xlarge", usd_per_hour=0.8, source="", dated="")
FREE = PRICED.model_copy(update={"usd_per_hour": None})


class Place:
    """Jobs that write their outcome once they are followed."""

    def __init__(self, folder, *, offer=PRICED, jobs=()):
        self.jobs, self.requests, self.followed = list(jobs), [], []
        self.runs, self.ends = folder, None
        entered = SimpleNamespace(update=lambda *_asked, **_values: None)
        self.variant = SimpleNamespace(project=SimpleNamespace(runs=folder), runs=entered)
        self.machine = sweep._Elsewhere(
            self.variant, StepOutputs({}), sweep.SweepRequest(place="cloud", confirmed=True)
        )
        self.machine.__dict__["_offer"] = offer

    def start_run(self, _work, request, _confirm, *, outputs):
        self.requests.append(request)
        return SimpleNamespace(id="new", run_id="of-the-new-offer", is_open=True)

    def follow(self, _work, job):
        self.followed.append(job.id)
        if self.ends is not None:
            return self.ends
        self.write(job.run_id)
        return job

    def write(self, run_id):
        (self.runs / run_id).mkdir()
        (self.runs / run_id / "outcome.json").write_text(run_id)

    def train(self, monkeypatch):
        monkeypatch.setattr(fleet_jobs, "run_id_of", lambda _plan: "of-the-plan")
        monkeypatch.setattr(fleet_jobs, "find_jobs", lambda *_asked: self.jobs)
        monkeypatch.setattr(fleet_jobs, "start_run", self.start_run)
        monkeypatch.setattr(fleet_jobs, "follow", self.follow)
        if self.ends is None:
            monkeypatch.setattr(sweep, "require_done", lambda *_asked: None)
        read = lambda data: TrainOutcome.model_construct(run_id=data.decode())  # noqa: E731
        monkeypatch.setattr(sweep.TrainOutcome, "from_json", read)
        monkeypatch.setattr(sweep.TrainOutcome, "model_dump", lambda *_asked, **_how: {})
        return self.machine.train(self.variant, Plan.model_construct()).run_id


def test_an_open_job_that_was_planned_for_another_offer_is_followed(tmp_path, monkeypatch):
    job = SimpleNamespace(id="old", run_id="of-the-old-offer", is_open=True)
    place = Place(tmp_path, jobs=[job])
    assert place.train(monkeypatch) == "of-the-old-offer"
    assert place.followed == ["old"]
    assert not place.requests


def test_a_result_that_was_planned_for_another_offer_is_taken(tmp_path, monkeypatch):
    job = SimpleNamespace(id="old", run_id="of-the-old-offer", is_open=False)
    place = Place(tmp_path, jobs=[job])
    place.write("of-the-old-offer")
    assert place.train(monkeypatch) == "of-the-old-offer"
    assert not place.followed


@pytest.mark.parametrize(("offer", "gpu"), [(PRICED, "g6.xlarge"), (FREE, "")])
def test_a_new_job_asks_for_the_offer_it_was_planned_for(tmp_path, monkeypatch, offer, gpu):
    place = Place(tmp_path, offer=offer)
    assert place.train(monkeypatch) == "of-the-new-offer"
    assert [request.gpu for request in place.requests] == [gpu]


@pytest.mark.parametrize(
    ("state", "booted_at", "is_failed"),
    [("lost", 1.0, False), ("failed", None, False), ("failed", 1.0, True)],
)
def test_a_machine_that_was_taken_away_says_nothing_of_the_settings(
    tmp_path, monkeypatch, state, booted_at, is_failed
):
    place = Place(tmp_path)
    reason = "the machine was taken away"
    place.ends = SimpleNamespace(
        id="new", place="cloud", run_id="r", state=state, reason=reason, booted_at=booted_at, fetched=False
    )
    with pytest.raises(EnvironmentFailure, match=reason) as caught:
        place.train(monkeypatch)
    # Only this one would be noted as the result of a trial.
    assert isinstance(caught.value, WorkerFailed) == is_failed
