"""Two processes reconcile one ledger: what one read earlier does not undo what the other one found."""

import copy

import pytest
from fleet_drill import MemoryLedger
from test_control import CAPS, Drill

from graftwork.fleet.control import merge_update
from graftwork.fleet.place import make_label
from graftwork.records.errors import Busy
from graftwork.records.fleet import FleetJob, PlacedJob


def job_in(state, **values):
    about = {"id": "0" * 12, "label": make_label("0" * 8, "0" * 12), "place": "simulated", "run_id": "run"}
    return FleetJob(**about, state=state, bundle="", created_at=0.0, updated_at=0.0, seconds=60.0, **values)


PLACED = PlacedJob(place="simulated", id="m1", label="x")


@pytest.mark.parametrize("late", ["lost", "failed", "stopped"])
@pytest.mark.parametrize("known", ["done", "stopped", "lost"])
def test_a_final_state_is_not_replaced_by_another_one(known, late):
    stored = job_in(known, placed=PLACED, reason="as it was")
    merged = merge_update(stored, job_in(late, placed=PLACED, reason="seen too late"))
    assert (merged.state, merged.reason) == (known, "as it was")


def test_a_job_whose_machine_is_being_ended_becomes_what_was_decided_then():
    """The other process finds no machine any more, and takes it for lost."""
    stored = job_in("stopping", placed=PLACED, outcome="done", reason="done")
    merged = merge_update(stored, job_in("lost", placed=PLACED, reason="the machine was taken away"))
    assert (merged.state, merged.reason) == ("done", "done")


def test_a_run_that_is_complete_stays_complete_when_a_person_stops_it_too_late():
    stored = job_in("stopping", placed=PLACED, outcome="done", reason="done")
    merged = merge_update(stored, job_in("stopping", placed=PLACED, outcome="stopped", reason="stopped"))
    assert (merged.state, merged.outcome, merged.reason) == ("stopping", "done", "done")
    assert merge_update(merged, stored) == merged


def test_what_an_unseen_job_may_have_cost_stays_counted():
    stored = job_in("failed", reason="never showed", unseen_usd=2.5, committed_usd=3.0)
    assert merge_update(stored, job_in("intended", committed_usd=3.0)).counted_usd == 2.5


def test_a_job_that_the_place_refused_late_costs_nothing():
    """It was given up as one that the place never showed, before the place had answered."""
    stored = job_in("failed", reason="never showed", unseen_usd=2.5, committed_usd=3.0)
    merged = merge_update(stored, job_in("refused", reason="no capacity", committed_usd=3.0))
    assert (merged.state, merged.reason, merged.counted_usd) == ("refused", "no capacity", 0.0)


class StaleLedger:
    """The first look shows the jobs as they were; all after it, as they are."""

    def __init__(self, ledger, stale):
        self._ledger, self._stale = ledger, [stale]
        self.key, self.update, self.get = ledger.key, ledger.update, ledger.get

    def list(self):
        return self._stale.pop() if self._stale else self._ledger.list()


class UnpaidDrill(Drill):
    """A place without a price: its list does not lag, so what it does not show is gone."""

    def __init__(self, **faults):
        super().__init__(**faults)
        self.controller.place.paid = False


@pytest.mark.parametrize("kind", [Drill, UnpaidDrill])
@pytest.mark.parametrize("fault", ["", "create_twice", "stop_ignored", "slow_create", "list_lags"])
def test_a_look_at_any_earlier_moment_changes_no_end_and_leaves_no_machine(kind, fault):
    """Every earlier ledger against every later moment."""
    drill = kind(**({fault: 1} if fault else {}))
    drill.start()
    moments = [copy.deepcopy(drill)]
    for _ in range(12):
        drill.reconcile(rounds=1)
        moments.append(copy.deepcopy(drill))
    (ended,) = drill.ledger.list()
    assert ended.state == "done"
    for later, moment in enumerate(moments):
        for earlier in moments[:later]:
            late = copy.deepcopy(moment)
            reader = copy.copy(late.controller)
            reader.ledger = StaleLedger(late.ledger, earlier.ledger.list())
            reader.reconcile(now=late.provider.now)
            late.reconcile()
            found = late.only()
            assert (found.state, found.reason) == (ended.state, ended.reason)
            assert late.provider.alive() == ()
            assert late.provider.billed_usd() <= found.actual_usd + 1e-9


def test_two_plans_of_one_run_are_not_both_started():
    """The second was checked before the first was entered: the plans for two devices have two run ids."""
    ledger = MemoryLedger()
    here = job_in("intended").model_copy(update={"trains": "the same"})
    ledger.reserve(here, CAPS)
    there = here.model_copy(update={"id": "1" * 12, "run_id": "other", "place": "elsewhere"})
    with pytest.raises(Busy, match="is at simulated already"):
        ledger.reserve(there, CAPS)
    ledger.reserve(there.model_copy(update={"trains": "another"}), CAPS)


def test_a_stop_that_comes_too_late_reports_what_the_job_has_become():
    drill = Drill()
    early = drill.start()
    drill.reconcile()
    assert drill.only().state == "done"
    assert drill.controller.stop(early, now=drill.provider.now, at_once=True).state == "done"
