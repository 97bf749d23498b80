"""Following a job: errors of its place do not hide how it ended."""

from types import SimpleNamespace

import pytest

from graftwork.fleet.place import Refused
from graftwork.pipeline import fleet_jobs
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.fleet import FleetJob, PlacedJob

PLACED = PlacedJob(place="ssh", id="1", label="graft-00000000-000000000001")


class Ledger:
    """One job, which ends at the first reconciliation."""

    def __init__(self, ends):
        self.ends, self.job = ends, make_job("submitted")

    def list(self):
        return (self.job,)

    def update(self, job):
        self.job = job

    def reconcile(self, **_options):
        self.job = self.job.model_copy(update=self.ends)


class BrokenPlace:
    paid = False

    def poll(self, _job):
        raise Refused("the far side has no Python 3.11")

    def fetch(self, _job, _folder):
        raise EnvironmentLacks("there are no files")


def make_job(state):
    values = {"id": "1" * 12, "label": PLACED.label, "place": "ssh", "run_id": "run", "bundle": ""}
    return FleetJob(**values, state=state, created_at=0.0, updated_at=0.0, seconds=60.0, placed=PLACED)


@pytest.fixture
def follow(monkeypatch, tmp_path):
    def run(**ends):
        ledger, place, lines = Ledger(ends), BrokenPlace(), []
        controller = SimpleNamespace(place=place, reconcile=ledger.reconcile)
        monkeypatch.setattr(fleet_jobs, "collecting", lambda *_words: controller)
        monkeypatch.setattr(fleet_jobs, "open_place", lambda *_words: place)
        reporter = SimpleNamespace(info=lines.append)
        work = SimpleNamespace(jobs=ledger, reporter=reporter, project=SimpleNamespace(runs=tmp_path))
        return fleet_jobs.follow(work, ledger.job, poll_seconds=0.0), lines

    return run


def test_following_goes_on_after_a_poll_that_was_refused(follow):
    job, lines = follow(state="failed", reason="out of memory")
    assert job.reason == "out of memory"
    assert "no Python 3.11" in lines[0]


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_job_that_did_not_finish_keeps_its_reason_if_nothing_can_be_fetched(follow, state):
    job, _ = follow(state=state, reason="out of memory")
    assert (job.state, job.reason, job.fetched) == (state, "out of memory", False)


def test_a_finished_job_without_its_files_is_an_error(follow):
    with pytest.raises(EnvironmentLacks, match="no files"):
        follow(state="done", reason="done")


def test_files_that_came_are_not_fetched_again(follow):
    job, _ = follow(state="done", reason="done", fetched=True)
    assert job.state == "done"
