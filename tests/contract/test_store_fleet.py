"""The fleet's ledger on SQLite and PostgreSQL: the caps in one transaction, every state kept."""

import pytest
from fleet_drill import MemoryLedger
from new_database import on_both_databases

from graftwork.fleet.control import OverCap
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import Busy, UserError
from graftwork.records.fleet import FleetJob, MachineBill, PlacedJob
from graftwork.store.fleet import FleetLedger

CAPS = CapSettings(job_usd=5, month_usd=8)


@pytest.fixture
def ledger(database):
    return FleetLedger(database, project="p")


def make(number, **changes):
    values = {
        "id": f"{number:012x}",
        "label": f"graft-00000000-{number:012x}",
        "place": "runpod",
        "run_id": f"run{number}",
        "state": "intended",
        "bundle": "b",
        "created_at": 1.8e9,
        "updated_at": 1.8e9,
        "seconds": 60.0,
        "committed_usd": 4.0,
    }
    return FleetJob(**{**values, **changes})


@on_both_databases
def test_a_reservation_is_kept_and_counts_against_the_caps(ledger):
    ledger.reserve(make(1), CAPS)
    ledger.reserve(make(2), CAPS)
    with pytest.raises(OverCap):
        ledger.reserve(make(3), CAPS)
    assert ledger.list() == (make(1), make(2))
    assert ledger.get(make(3).id) is None
    closed = make(1, state="done", placed=PlacedJob(place="runpod", id="x", label="y"), reason="done")
    ledger.update(closed)
    assert ledger.get(closed.id) == closed
    ledger.reserve(make(3), CAPS)


@on_both_databases
def test_a_run_is_open_once(ledger):
    ledger.reserve(make(1, committed_usd=0.0), CAPS)
    with pytest.raises(Busy, match="run1 is at runpod already"):
        ledger.reserve(make(2, run_id="run1", committed_usd=0.0), CAPS)


def test_the_key_of_a_ledger_is_made_once_and_belongs_to_one_project(database):
    first, again, other = (FleetLedger(database, project=name) for name in ("p", "p", "other"))
    assert len(first.key) == 8
    assert first.key == again.key != other.key
    first.reserve(make(1), CAPS)
    assert other.list() == ()
    with pytest.raises(UserError, match="there is no job"):
        other.update(make(1))


PLACED = PlacedJob(place="runpod", id="x", label="y")


@pytest.fixture(params=["database", "memory"])
def either(request, ledger):
    return MemoryLedger() if request.param == "memory" else ledger


def test_a_stale_update_does_not_undo_a_later_state(either):
    either.reserve(make(1), CAPS)
    bills = {"x": MachineBill(created_at=1.0, last_seen=9.0, usd_per_hour=1.0)}
    ended = {"outcome": "done", "reason": "done", "fetched": True, "placed": PLACED, "machines": bills}
    either.update(make(1, state="stopping", **ended))
    # Another process read the job before.
    either.update(make(1, state="submitted", placed=PLACED, updated_at=1.9e9))
    found = either.get(make(1).id)
    assert found == make(1, state="stopping", updated_at=1.9e9, **ended)
    either.update(make(1, state="done", **ended))
    either.update(make(1))
    assert either.get(make(1).id) == make(1, state="done", **ended)


def test_a_job_that_was_given_up_while_it_was_sent_is_open_again_once_it_is_placed(either):
    either.reserve(make(1), CAPS)
    either.update(make(1, state="failed", reason="the place did not show it"))
    either.update(make(1))
    assert either.get(make(1).id).state == "failed"
    placed = make(1, state="submitted", placed=PLACED)
    either.update(placed)
    assert either.get(make(1).id) == placed
