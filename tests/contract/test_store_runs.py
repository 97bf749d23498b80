import pytest
from store_samples import WHEN

from graftwork.records.errors import Busy, UserError
from graftwork.store.database import Database
from graftwork.store.runs import RunEntry, RunStore

LATER = "2025-03-01T13:00:00Z"


@pytest.fixture
def runs(database: Database) -> RunStore:
    return RunStore(database, project="one")


def test_a_new_run_is_planned(runs: RunStore):
    made = runs.create("run-1", folder="runs/run-1", plan={"steps": 3}, when=WHEN)
    assert made == RunEntry(
        id="run-1",
        state="planned",
        folder="runs/run-1",
        created_at=WHEN,
        updated_at=WHEN,
        plan={"steps": 3},
    )
    assert runs.get("run-1") == made


def test_an_unknown_run_is_none(runs: RunStore):
    assert runs.get("run-1") is None


def test_an_id_is_used_once(runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    with pytest.raises(Busy, match="run-1 exists"):
        runs.create("run-1", folder="b", plan={}, when=WHEN)
    kept = runs.get("run-1")
    assert kept is not None
    assert kept.folder == "a"


def test_an_error_goes_with_its_state_and_an_outcome_stays(runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    failed = runs.update("run-1", state="failed", when=LATER, error={"what": "the disk is full"})
    assert (failed.state, failed.error, failed.updated_at) == ("failed", {"what": "the disk is full"}, LATER)
    resumed = runs.update("run-1", state="running", when=LATER)
    assert (resumed.state, resumed.error) == ("running", None)
    runs.update("run-1", state="done", when=LATER, outcome={"steps": 3})
    again = runs.update("run-1", state="done", when=LATER)
    assert again.outcome == {"steps": 3}
    assert runs.get("run-1") == again


def test_a_run_that_nobody_entered_cannot_change(runs: RunStore):
    with pytest.raises(UserError, match="no run"):
        runs.update("run-9", state="done", when=WHEN)


def test_the_newest_run_comes_first_whatever_the_clock_shows(runs: RunStore):
    for name, when in (("a", LATER), ("b", WHEN), ("c", WHEN)):
        runs.create(name, folder=name, plan={}, when=when)
    runs.update("a", state="done", when=LATER)
    assert [run.id for run in runs.list()] == ["c", "b", "a"]
    assert [run.id for run in runs.list(limit=1)] == ["c"]


def test_projects_may_use_the_same_run_id(database: Database, runs: RunStore):
    runs.create("run-1", folder="a", plan={}, when=WHEN)
    other = RunStore(database, project="two")
    assert other.list() == ()
    other.create("run-1", folder="b", plan={}, when=WHEN)
    other.update("run-1", state="done", when=WHEN)
    mine = runs.get("run-1")
    assert mine is not None
    assert mine.state == "planned"
