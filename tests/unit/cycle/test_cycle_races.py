"""Two coordinators, and people, on one state: what was decided on an older one is not done to a newer one."""

from types import SimpleNamespace

import pytest
from memory_cycles import MemoryCycles
from test_cycle_coordinator import Counted, Recorded, Scripted, make

from graftwork.cycle import session
from graftwork.cycle.session import approve_step, decide
from graftwork.cycle.state import (
    Holder,
    LogEntry,
    Notice,
    Superseded,
    approve,
    begin,
    claim,
    enqueue,
    pause,
    resume,
    settle_notice,
)
from graftwork.records.errors import NegativeResult, WorkerFailed
from graftwork.store.cycles import CycleTable, name_cycle
from graftwork.store.database import open_database
from graftwork.store.runs import StepLedger

BY_ME = LogEntry(at=0.0, who="me", action="x")


def look_at(store, stale):
    """The next reader sees an older state; all after it, the newest."""
    reads, fresh = iter([stale]), store.read
    store.read = lambda: next(reads, None) or fresh()


def tick_until(coordinator, found):
    for _ in range(200):
        if found(coordinator.store.read()):
            return coordinator.store.read()
        coordinator.tick()
    raise AssertionError(coordinator.store.read())


def is_at(step, number=1):
    def found(state):
        cycle = state.open_cycle
        return cycle is not None and cycle.number == number and cycle.current and cycle.current.name == step

    return found


def test_a_step_that_was_approved_in_one_cycle_is_not_done_unapproved_in_the_next():
    store, runner = Recorded(), Counted()
    first = make(runner, store=store, approve=("promote",))
    first.request("by hand")
    tick_until(first, is_at("promote"))
    approved = store.change(lambda state: approve(state, "promote", BY_ME))
    tick_until(first, lambda state: state.open_cycle is None)
    first.request("by hand")
    tick_until(first, is_at("promote", number=2))
    late = make(runner, store=store, place="there", approve=("promote",))
    look_at(store, approved)
    late.tick()
    assert runner.counts[2, "promote"] == 0


def test_no_step_begins_once_a_person_has_paused():
    store, runner = Recorded(), Counted()
    coordinator = make(runner, store=store)
    coordinator.request("by hand")
    before = tick_until(coordinator, is_at("train"))
    store.change(lambda state: pause(state, BY_ME))
    look_at(store, before)
    coordinator.tick()
    assert runner.counts[1, "train"] == 0
    store.change(lambda state: resume(state, BY_ME))
    assert tick_until(coordinator, lambda state: state.open_cycle is None).cycle.outcome == "promoted"


def test_the_pause_after_a_failure_holds_for_a_coordinator_that_looked_before_it(monkeypatch):
    monkeypatch.setattr("graftwork.cycle.state.FIRST_PAUSE_SECONDS", 600.0)
    store = Recorded()
    runner = Scripted(train=[WorkerFailed("no memory")])
    coordinator = make(runner, store=store)
    coordinator.request("by hand")
    before = tick_until(coordinator, is_at("train"))
    coordinator.tick()
    assert runner.done.count("train") == 1
    late = make(runner, store=store, place="there", clock=coordinator.moment)
    look_at(store, before)
    late.tick()
    assert runner.done.count("train") == 1


def test_a_cycle_that_a_person_asked_for_keeps_its_cause():
    """A cycle by hand is done even if nothing is new; one of the schedule is not."""
    store = Recorded()
    coordinator = make(Scripted(), store=store, schedule="0 2 * * *")
    coordinator.tick()
    coordinator.moment.now = coordinator.tick().until
    due = store.read()
    store.change(lambda state: enqueue(state, ("main",), cause="by hand of ada"))
    look_at(store, due)
    coordinator.tick()
    coordinator.tick()
    assert store.read().cycle.cause == "by hand of ada"


class Watching(Scripted):
    """Alerts of a run, of which the state counts those that have become notices."""

    def __init__(self, alerts):
        super().__init__()
        self.alerts, self.before_return = alerts, lambda: None

    def watch(self, state):
        seen = state.alerts.get("run", 0)
        new = range(seen, self.alerts)
        notices = tuple(
            Notice(id=f"1-run-{number}", kind="stalled", cycle=1, at=0.0, what=f"alert {number}")
            for number in new
        )
        update = {"alerts": {"run": self.alerts}}
        between, self.before_return = self.before_return, lambda: None
        between()
        return update, notices


def test_an_alert_that_another_coordinator_has_reported_is_not_reported_again():
    store = MemoryCycles()
    runner = Watching(alerts=2)
    first, second = make(runner, store=store), make(runner, store=store, place="there")

    def report():
        second.watch()
        second.send_notices()

    runner.before_return = report
    first.watch()
    first.send_notices()
    assert [what for _, what in runner.sent] == ["alert 0", "alert 1"]


def test_an_older_look_at_alerts_does_not_bring_back_those_of_a_later_one():
    store = MemoryCycles()
    runner = Watching(alerts=1)
    first, second = make(runner, store=store), make(runner, store=store, place="there")

    def report():
        runner.alerts = 3
        second.watch()
        second.send_notices()

    runner.before_return = report
    first.watch()
    report()
    assert [what for _, what in runner.sent] == ["alert 0", "alert 1", "alert 2"]


def test_a_notice_that_was_posted_again_is_not_settled_with_the_one_before():
    """The same step may fail for the first time twice: its files were lost in between."""
    store, runner = MemoryCycles(), Scripted()
    coordinator = make(runner, store=store)
    old = Notice(id="1-failed-train-1", kind="failed", cycle=1, at=1.0, what="train failed (no memory)")
    new = old.model_copy(update={"at": 2.0, "what": "train failed (no disk)"})
    store.change(lambda state: state.model_copy(update={"outbox": (old,)}))
    send = runner.send

    def deliver_twice(notice):
        """Another coordinator delivers it as well, and the step fails again."""
        runner.send = send
        store.change(lambda state: settle_notice(state, old, retry_at=None))
        store.change(lambda state: state.model_copy(update={"outbox": (new,)}))
        return send(notice)

    runner.send = deliver_twice
    coordinator.send_notices()
    assert store.read().outbox == (new,)
    coordinator.send_notices()
    assert [what for _, what in runner.sent] == ["train failed (no memory)", "train failed (no disk)"]


@pytest.mark.parametrize("later_on", ["waiting", "paused"])
def test_a_look_at_any_earlier_moment_begins_no_step_that_waits_for_a_person(later_on):
    """Every state of two cycles, against every later one in which a person has to decide first."""
    recorded = make(Counted(), store=Recorded(), approve=("train", "promote"))
    store = recorded.store
    for number in (1, 2):
        recorded.request("by hand")
        for step in ("train", "promote"):
            tick_until(recorded, is_at(step, number))
            recorded.tick()
            if later_on == "paused":
                store.change(lambda state: pause(state, BY_ME))
                store.change(lambda state: resume(state, BY_ME))
            store.change(lambda state, step=step: approve(state, step, BY_ME))
        tick_until(recorded, lambda state: state.open_cycle is None)
    states = store.states
    waiting = [
        at
        for at, state in enumerate(states)
        if (state.paused is not None) == (later_on == "paused")
        and (cycle := state.open_cycle) is not None
        and cycle.current is not None
        and cycle.current.name in ("train", "promote")
        and cycle.current.status == "waiting"
        and cycle.current.name not in {given.step for given in cycle.approvals}
    ]
    assert waiting
    for at in waiting:
        for stale in states[:at]:
            copy, runner = Recorded(states[at]), Counted()
            look_at(copy, stale)
            make(runner, store=copy, place="there", approve=("train", "promote")).tick()
            assert not runner.counts
            assert copy.read().cycle.steps == states[at].cycle.steps


def open_cycle(store, number):
    """A store in which a cycle of this number is open and waits for its promotion."""
    coordinator = make(Scripted(), store=store, approve=("promote",))
    for each in range(1, number + 1):
        coordinator.request("by hand")
        tick_until(coordinator, is_at("promote", each))
        if each < number:
            store.change(lambda state: approve(state, "promote", BY_ME))
            tick_until(coordinator, lambda state: state.open_cycle is None)
    return store.read()


@pytest.mark.parametrize("step", ["promote", None])
def test_an_approval_holds_for_the_cycle_that_was_looked_at(step):
    store = Recorded()
    open_cycle(store, 2)
    first = next(state for state in store.states if is_at("promote")(state))
    look_at(store, first)
    with pytest.raises(NegativeResult, match="cycle 1 is no longer open"):
        approve_step(SimpleNamespace(cycles=store), step, who="ada")
    assert store.read().open_cycle.approvals == ()


def test_only_the_cycle_that_was_shown_is_canceled():
    """It ends while a person decides to cancel it."""
    store = Recorded()
    open_cycle(store, 2)
    with pytest.raises(NegativeResult, match="cycle 1 is no longer open"):
        decide(SimpleNamespace(cycles=store), "cancel", who="ada", cycle=1)
    assert store.read().open_cycle.number == 2


def test_one_cycle_by_hand_goes_on_with_one_that_was_begun_meanwhile(tmp_path, monkeypatch):
    store = Recorded()
    idle = store.change(lambda state: state.model_copy(update={"served_until": 1.0}))
    other = make(Scripted(), store=store)
    other.request("schedule")
    other.tick()
    coordinator = make(Scripted(), store=store)
    monkeypatch.setattr(session, "make_coordinator", lambda _work: coordinator)
    look_at(store, idle)
    ended = session.run_once(SimpleNamespace(project=SimpleNamespace(state=tmp_path)))
    assert (ended.number, ended.cause) == (1, "schedule")


def test_a_coordinator_that_lost_its_claim_does_not_replace_what_its_successor_made(tmp_path):
    """Its output may name files that are on its own machine only."""
    database = open_database(tmp_path / "state.db")
    table, ledger = CycleTable(database, project="p"), StepLedger(database, project="p")
    steps, cycles = ("plan", "train"), []
    table.change(lambda s: begin(s, model="main", cause="x", now=0.0, steps=steps, version=""))
    for holder in (Holder("first", "here"), Holder("second", "there")):
        now = 100.0 * len(cycles)
        cycles.append(table.change(lambda s, h=holder, n=now: claim(s, "plan", h, now=n, lease=60)[0]).cycle)
    table.keep_output(cycles[1], "plan", "plan", LogEntry(at=0.0, who="second", action="made"))
    with pytest.raises(Superseded):
        table.keep_output(cycles[0], "plan", "plan", LogEntry(at=0.0, who="first", action="made"))
    assert ledger.get(name_cycle(1, "plan")).output["who"] == "second"
    database.close()
