"""Following a job: errors of its place do not hide how it ended."""

from types import SimpleNamespace

import pytest

from graftwork.fleet import jobs as fleet_jobs
from graftwork.fleet.place import PlaceUnreachable, Refused
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.fleet import FleetJob, JobPoll, PlacedJob, Reconciled

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

    trouble: Exception = Refused("the far side has no Python 3.11")

    def poll(self, _job):
        raise self.trouble

    def fetch(self, _job, _folder):
        raise EnvironmentFailure("there are no files")


def make_job(state):
    values = {"id": "1" * 12, "label": PLACED.label, "place": "ssh", "run_id": "run", "bundle": ""}
    return FleetJob(**values, state=state, created_at=0.0, updated_at=0.0, seconds=60.0, placed=PLACED)


@pytest.fixture
def follow(monkeypatch, tmp_path):
    def run(trouble=BrokenPlace.trouble, **ends):
        ledger, place, lines = Ledger(ends), BrokenPlace(), []
        place.trouble = trouble
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


def test_following_goes_on_after_a_poll_that_nobody_foresaw(follow):
    job, lines = follow(KeyError("status"), state="failed", reason="out of memory")
    assert job.reason == "out of memory"
    assert "failed (KeyError)" in lines[0]


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_a_job_that_did_not_finish_keeps_its_reason_if_nothing_can_be_fetched(follow, state):
    job, _ = follow(state=state, reason="out of memory")
    assert (job.state, job.reason, job.fetched) == (state, "out of memory", False)


def test_a_finished_job_without_its_files_is_an_error(follow):
    with pytest.raises(EnvironmentFailure, match="no files"):
        follow(state="done", reason="done")


def test_files_that_came_are_not_fetched_again(follow):
    job, _ = follow(state="done", reason="done", fetched=True)
    assert job.state == "done"


def test_a_place_whose_client_breaks_does_not_keep_the_others_from_being_reconciled(monkeypatch):
    reconciled = []

    def collecting(_work, name):
        if name == "kaggle":
            raise ImportError("its package is half installed")
        return SimpleNamespace(reconcile=lambda **_now: reconciled.append(name) or Reconciled(checked=1))

    monkeypatch.setattr(fleet_jobs, "collecting", collecting)
    jobs = [make_job("submitted").model_copy(update={"place": name}) for name in ("kaggle", "runpod")]
    found = fleet_jobs.reconcile(SimpleNamespace(jobs=SimpleNamespace(list=lambda: jobs)))
    assert reconciled == ["runpod"]
    assert (found.checked, found.unreachable) == (1, ("kaggle: its client failed (ImportError)",))


@pytest.mark.parametrize(("state", "fetched"), [("submitted", False), ("stopping", False), ("done", True)])
def test_files_of_a_job_that_still_runs_are_not_its_results(monkeypatch, tmp_path, state, fetched):
    ledger = Ledger({})
    ledger.job, brought = make_job(state), []
    place = SimpleNamespace(fetch=lambda _job, folder: brought.append(folder.name))
    monkeypatch.setattr(fleet_jobs, "open_place", lambda *_words: place)
    work = SimpleNamespace(jobs=ledger, project=SimpleNamespace(runs=tmp_path))
    # Else nothing would be brought when it ends, and its machine is given back with the result.
    assert fleet_jobs.fetch(work, ledger.job).fetched is fetched
    assert (ledger.job.fetched, brought) == (fetched, ["run"])


class TalkingPlace:
    """Its log grows with every look, and goes with the machine at the reconciliation that sees the end."""

    paid = False

    def __init__(self, ledger, *logs):
        self.ledger, self.logs, self.asked = ledger, list(logs), 0

    def poll(self, _job):
        return JobPoll(phase="ended" if len(self.logs) == 1 else "running")

    def log(self, _job):
        if not self.ledger.job.is_open:
            return ""
        text = self.logs.pop(0)
        if isinstance(text, Exception):
            raise text
        return text


@pytest.fixture
def follow_log(monkeypatch):
    def run(*logs):
        ledger = Ledger({"state": "done", "reason": "done"})
        place, asked = TalkingPlace(ledger, *logs), []

        def reconcile(**_now):
            asked.append(place)
            ledger.reconcile()

        def collecting(_work, name):
            assert name == "ssh", "the other places are not asked"
            return SimpleNamespace(place=place, reconcile=reconcile)

        monkeypatch.setattr(fleet_jobs, "collecting", collecting)
        monkeypatch.setattr(fleet_jobs, "POLL_SECONDS", 0.0)
        text = "".join(fleet_jobs.follow_log(SimpleNamespace(jobs=ledger), ledger.job))
        assert len(asked) == 1
        return text

    return run


def test_a_log_that_is_followed_is_printed_once_to_its_last_line(follow_log):
    assert follow_log("a\n", "a\nb\n", "a\nb\n", "a\nb\nlast\n") == "a\nb\nlast\n"


def test_a_log_that_begins_again_on_another_machine_is_printed_from_its_beginning(follow_log):
    assert follow_log("a\nb\n", "c\n", "c\nd\n") == "a\nb\nc\nd\n"


def test_a_log_is_followed_across_a_place_that_does_not_answer_for_a_moment(follow_log):
    assert follow_log("a\n", PlaceUnreachable("no", fix="wait"), "a\nb\n") == "a\nb\n"
