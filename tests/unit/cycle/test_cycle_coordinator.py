"""The coordinator with steps that fail, wait, stop and are interrupted; and simulated months."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_cycles import MemoryCycles
from simulated_month import simulate_month

from graftwork.cycle.coordinator import MOST_TRIES, Coordinator, CycleStepResult
from graftwork.cycle.decide import AwaitApproval, CycleFacts, Rest
from graftwork.cycle.settings import (
    CYCLE_STEPS,
    CanarySettings,
    CycleSettings,
    DeliverSettings,
    NotifySettings,
    TriggerSettings,
)
from graftwork.cycle.state import (
    CoordinatorState,
    Holder,
    LogEntry,
    Superseded,
    begin,
    cancel,
    claim,
    complete,
)
from graftwork.fleet.settings import CapSettings
from graftwork.records.errors import Busy, GracefulStop, NegativeResult, UserError, WorkerFailed

DEPLOY = {"gate": {"decision": "deploy", "reason": "The rule holds."}, "release": {"id": "r" * 64}}
PROMOTED = {"promote": {"action": "promoted", "release": "r" * 64, "alias": "champion"}}


class Scripted:
    """Steps that do what a test says: a summary, an error, or a call."""

    def __init__(self, **steps):
        self.steps = {**DEPLOY, **PROMOTED, **steps}
        self.done, self.sent, self.undelivered = [], [], 0
        self.abandoned = []

    def measure_facts(self):
        return CycleFacts(rows=0)

    def do(self, step, cycle):
        self.done.append(step)
        found = self.steps.get(step, {})
        if isinstance(found, list):
            found = found.pop(0) if found else {}
        if isinstance(found, BaseException):
            raise found
        if callable(found):
            found = found()
        return found if isinstance(found, CycleStepResult) else CycleStepResult(found)

    def find_missing(self, cycle, place):
        return ""

    def abandon(self, cycle):
        self.abandoned.append(cycle.number)

    def watch(self, state):
        return {}, ()

    def send(self, notice):
        if self.undelivered:
            self.undelivered -= 1
            return "no answer"
        self.sent.append((notice.kind, notice.what))
        return ""


class Moment:
    def __init__(self):
        self.now = 1_800_000_000.0


def make(runner, *, store=None, clock=None, place="here", **changes):
    clock = clock or Moment()
    made = Coordinator(
        store=store or MemoryCycles(),
        runner=runner,
        settings=CycleSettings(**changes),
        steps=CYCLE_STEPS,
        models=("main",),
        holder=Holder("test 1", place),
        clock=lambda: clock.now,
    )
    made.moment = clock
    return made


def finish(coordinator, ticks=200):
    """Tick until the cycle has ended; waiting takes no time."""
    coordinator.request("by hand")
    for _ in range(ticks):
        action = coordinator.tick()
        state = coordinator.store.read()
        if state.open_cycle is None and not state.queue:
            return state.cycle
        if isinstance(action, Rest):
            coordinator.moment.now = max(action.until, coordinator.moment.now)
    raise AssertionError(f"still {state}")


def test_a_cycle_does_every_step_once_and_in_order():
    runner = Scripted()
    ended = finish(make(runner))
    assert (ended.outcome, ended.reason) == ("promoted", f"release {'r' * 12} is live")
    skipped = {"canary", "deliver"}
    assert runner.done == [step for step in CYCLE_STEPS if step not in skipped]
    assert {step.name for step in ended.steps if step.status == "skipped"} == skipped


def test_a_failed_step_is_tried_again_and_the_failure_is_reported():
    runner = Scripted(train=[WorkerFailed("no memory"), WorkerFailed("no memory")])
    assert finish(make(runner)).outcome == "promoted"
    assert runner.done.count("train") == 3
    assert [what for kind, what in runner.sent if kind == "failed"] == [
        "train failed (no memory); retrying"
    ] * 2


def test_a_bug_counts_as_a_failure_and_does_not_end_the_coordinator():
    runner = Scripted(plan=[KeyError("x")] * 5)
    ended = finish(make(runner))
    assert ended.outcome == "failed"
    assert "KeyError" in ended.reason


def test_a_mistake_is_not_tried_again():
    runner = Scripted(prepare=UserError("the logs cannot be read", fix="use another file"))
    ended = finish(make(runner))
    assert (ended.outcome, runner.done.count("prepare")) == ("failed", 1)
    assert ("failed", "cycle 1 ended: failed") in runner.sent


def test_a_refusal_ends_the_cycle_without_a_failure():
    ended = finish(make(Scripted(train=NegativeResult("the cap of a month is $50.00"))))
    assert (ended.outcome, ended.reason) == ("refused", "train: the cap of a month is $50.00")


def test_a_busy_project_is_waited_for():
    runner = Scripted(audit=[Busy("another worker works in this folder")] * 30)
    ended = finish(make(runner), ticks=300)
    assert ended.outcome == "promoted"
    assert ended.step("audit").failures == 0


def test_too_many_failed_cycles_pause_the_coordinator():
    runner = Scripted(prepare=UserError("broken"))
    coordinator = make(runner, schedule="0 * * * *")
    for _ in range(40):
        action = coordinator.tick()
        if isinstance(action, Rest) and coordinator.store.read().paused is None:
            coordinator.moment.now = action.until
    state = coordinator.store.read()
    assert state.paused.who == "coordinator"
    assert state.cycle.number == 3
    assert [what for kind, what in runner.sent if kind == "paused"] == ["the coordinator paused itself"]


def test_an_approval_is_asked_for_once():
    runner = Scripted()
    coordinator = make(runner, approve=("promote",))
    coordinator.request("by hand")
    while not isinstance(coordinator.tick(), AwaitApproval):
        pass
    for _ in range(5):
        coordinator.tick()
    assert [what for kind, what in runner.sent if kind == "approval"] == ["promote waits for approval"]
    assert "promote" not in runner.done


def test_a_step_that_is_not_decided_is_looked_at_again():
    later = [CycleStepResult({}, again_at=1_800_000_000.0 + 60 * n, why="too few") for n in (1, 2)]
    runner = Scripted(canary=[*later, {"verdict": "promote"}])
    ended = finish(make(runner, canary=CanarySettings()))
    assert (ended.outcome, runner.done.count("canary")) == ("promoted", 3)


def test_a_stop_gives_the_step_back_and_ends_the_coordinator():
    runner = Scripted(train=[KeyboardInterrupt()])
    coordinator = make(runner)
    coordinator.request("by hand")
    while coordinator.store.read().cycle is None or runner.done[-1:] != ["plan"]:
        coordinator.tick()
    with pytest.raises(KeyboardInterrupt):
        coordinator.tick()
    assert coordinator.store.read().cycle.step("train").status == "waiting"
    again = make(runner, store=coordinator.store)
    assert finish(again).outcome == "promoted"


def test_a_session_that_ends_by_its_deadline_goes_on_at_the_next_date():
    runner = Scripted(train=[GracefulStop("its time is over")])
    coordinator = make(runner, schedule="0 2 * * *")
    coordinator.request("by hand")
    actions = [coordinator.tick() for _ in range(8)]
    waits = actions[-1]
    assert isinstance(waits, Rest)
    assert "resumes at the next date" in waits.why
    assert waits.until > coordinator.moment.now + 600


def test_a_session_that_outlasts_a_date_goes_on_at_the_next_one():
    clock = Moment()

    def train():
        clock.now += 3 * 86400
        raise GracefulStop("its time is over")

    coordinator = make(Scripted(train=train), clock=clock, schedule="0 2 * * *")
    coordinator.request("by hand")
    waits = [coordinator.tick() for _ in range(8)][-1]
    assert isinstance(waits, Rest)
    assert clock.now < waits.until <= clock.now + 86400


def test_the_result_of_a_canceled_cycle_is_dropped():
    store = MemoryCycles()
    entry = LogEntry(at=0.0, who="ada", action="cancel")
    runner = Scripted(train=lambda: store.change(lambda state: cancel(state, entry)) and {})
    ended = finish(make(runner, store=store))
    assert (ended.outcome, ended.step("train").status) == ("canceled", "running")
    assert "evaluate" not in runner.done


def test_a_step_that_is_superseded_is_abandoned_only_if_its_cycle_was_canceled():
    store = MemoryCycles()
    entry = LogEntry(at=0.0, who="ada", action="cancel")

    def canceled():
        store.change(lambda state: cancel(state, entry))
        raise Superseded("train")

    runner = Scripted(plan=[Superseded("plan")], train=canceled)
    assert finish(make(runner, store=store)).outcome == "canceled"
    assert runner.done.count("plan") == 2
    assert runner.abandoned == [1]


@pytest.mark.parametrize("ends", [{}, WorkerFailed("no answer"), GracefulStop("stopped")])
def test_what_a_step_left_elsewhere_is_abandoned_however_it_ended_after_the_cancel(ends):
    store = MemoryCycles()
    entry = LogEntry(at=0.0, who="ada", action="cancel")

    def canceled():
        # The renewer has not seen it yet.
        store.change(lambda state: cancel(state, entry))
        if isinstance(ends, Exception):
            raise ends
        return ends

    runner = Scripted(train=canceled)
    assert finish(make(runner, store=store, schedule="0 2 * * *")).outcome == "canceled"
    assert runner.abandoned == [1]


def test_a_notice_that_cannot_even_be_written_down_does_not_end_the_coordinator():
    runner = Scripted()
    runner.send = lambda _notice: 1 / 0
    coordinator = make(runner)
    assert finish(coordinator).outcome == "promoted"
    for _ in range(30):
        coordinator.moment.now += 3600
        coordinator.tick()
    assert coordinator.store.read().outbox == ()


def test_a_notice_is_kept_until_it_is_delivered():
    runner = Scripted()
    runner.undelivered = 2
    coordinator = make(runner)
    finish(coordinator)
    for _ in range(10):
        coordinator.moment.now += 3600
        coordinator.tick()
    assert ("gate", "the gate said deploy: The rule holds.") in runner.sent
    assert coordinator.store.read().outbox == ()


def test_a_notice_that_nobody_takes_is_given_up():
    runner = Scripted()
    runner.undelivered = 1000
    coordinator = make(runner, notify=NotifySettings(kinds=("gate",)))
    finish(coordinator)
    for _ in range(30):
        coordinator.moment.now += 3600
        coordinator.tick()
    assert coordinator.store.read().outbox == ()
    assert runner.undelivered == 1000 - MOST_TRIES


def test_a_cycle_of_an_earlier_version_goes_on_with_its_own_steps():
    """The document is stored, not built from today's fields: a renamed field or step shows."""
    text = (Path(__file__).parents[2] / "data" / "cycle_state_v1.json").read_text()
    store = MemoryCycles()
    store.change(lambda _: CoordinatorState.model_validate(json.loads(text)))
    runner = Scripted()
    coordinator = make(runner, store=store)
    coordinator.moment.now = store.read().cycle.started_at + 3600
    while store.read().open_cycle is not None:
        coordinator.tick()
    assert runner.done == ["train", "evaluate", "gate", "release", "promote", "report"]
    assert store.read().cycle.outcome == "promoted"


def random_settings(chance):
    """Settings of a month: triggers, approvals, canaries, deliveries, pauses."""
    return CycleSettings(
        schedule=chance.choice((None, "0 2 * * *", "30 */6 * * *", "0 3 * * sat")),
        timezone=chance.choice(("UTC", "Europe/Berlin", "America/New_York")),
        when=TriggerSettings(new_rows=chance.choice((None, 200, 1000)), drift=0.2),
        place=chance.choice(("local", "simulated", "simulated", "simulated")),
        approve=chance.choice(((), (), ("promote",), ("train", "deliver"))),
        canary=chance.choice((None, CanarySettings(minutes=60))),
        deliver=chance.choice(((), (DeliverSettings(to="gpu1:/srv"),))),
    )


def random_month(seed):
    chance = Random(seed)
    caps = CapSettings(job_usd=chance.uniform(1, 6), month_usd=chance.uniform(2, 60))
    return simulate_month(seed, settings=random_settings(chance), caps=caps)


@given(seed=st.integers(0, 10**9))
@settings(max_examples=30, deadline=None)
def test_a_random_month_keeps_every_promise(seed):
    month = random_month(seed)
    assert month.is_clean, month.to_json()[-2000:]
    assert month.spent_usd <= month.cap_usd + 0.01 or month.days > 30


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_random_months_keep_every_promise():
    broken = [month for month in map(random_month, range(1000)) if not month.is_clean]
    assert not broken, broken[0].to_json()[-2000:]


def test_the_same_seed_is_the_same_month():
    assert simulate_month(3) == simulate_month(3)


def test_a_month_shows_what_went_wrong_and_what_was_promoted():
    month = simulate_month(7)
    assert month.cycles >= 20
    assert month.promotions > 0
    assert month.incidents["coordinator killed"] > 0
    assert month.quality_last > month.quality_first
    assert 0 < month.spent_usd <= month.cap_usd


def test_a_cycle_that_another_coordinator_did_meanwhile_is_not_begun_again():
    """Both see that a cycle is due; the other one has done it before this one begins."""
    runner = Scripted()
    first = make(runner, schedule="0 2 * * *")
    first.tick()
    due = first.tick().until
    first.moment.now = due
    second = make(runner, store=first.store, clock=first.moment, schedule="0 2 * * *")
    stale = first.store.read()
    while second.store.read().cycle is None or second.store.read().open_cycle is not None:
        second.tick()
    reads = iter([stale])
    fresh = first.store.read
    first.store.read = lambda: next(reads, None) or fresh()
    first.tick()
    assert fresh().cycle.number == 1


class Counted(Scripted):
    """Also notes the cycle of each step."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def do(self, step, cycle):
        self.counts[cycle.number, step] += 1
        return super().do(step, cycle)


class Recorded(MemoryCycles):
    """A store that remembers every state; or one that begins with such a state."""

    def __init__(self, state=None):
        super().__init__()
        self._state = state or self._state
        self.states = [self._state]

    def change(self, change):
        self.states.append(super().change(change))
        return self.states[-1]


def end_two_cycles(coordinator):
    """The outcome of each of the first two cycles."""
    outcomes = {}
    for _ in range(200):
        cycle = coordinator.store.read().cycle
        if cycle is not None and not cycle.is_open:
            outcomes[cycle.number] = cycle.outcome
            if cycle.number == 2:
                return outcomes
            if not coordinator.store.read().queue:
                coordinator.request("by hand")
        coordinator.tick()
    raise AssertionError(coordinator.store.read())


def test_a_decision_on_an_older_state_never_changes_what_came_after_it():
    """Another coordinator looked at any earlier moment, and acts at any later one."""
    recorded = make(Counted(), store=Recorded())
    recorded.request("by hand")
    assert end_two_cycles(recorded) == {1: "promoted", 2: "promoted"}
    once = {(number, step) for number in (1, 2) for step in recorded.runner.done}
    states = recorded.store.states
    for later, state in enumerate(states):
        cycle = state.open_cycle
        if cycle is None or any(step.status == "running" for step in cycle.steps):
            continue
        done = {(n, step) for n in range(1, cycle.number) for step in recorded.runner.done}
        done |= {(cycle.number, step.name) for step in cycle.steps if step.status == "done"}
        for stale in states[:later]:
            runner = Counted()
            store = Recorded(state)
            late = make(runner, store=store, place="there")
            reads = iter([stale])
            store.read = lambda reads=reads, store=store: next(reads, None) or store.states[-1]
            late.tick()
            end_two_cycles(make(runner, store=store))
            assert store.read().cycle.outcome == "promoted"
            assert runner.counts == Counter(once - done)


def test_a_claim_of_a_canceled_cycle_holds_nothing_in_the_next_one():
    """Claims are numbered on: the same step of the next cycle never has the same token."""
    steps = ("collect", "train")
    holder = Holder("first", "here")
    state = begin(CoordinatorState(), model="main", cause="x", now=0.0, steps=steps, version="")
    state, stale = claim(state, "collect", holder, now=0.0, lease=60)
    state = cancel(state, LogEntry(at=1.0, who="me", action="cancel"))
    state = begin(state, model="main", cause="x", now=2.0, steps=steps, version="")
    state, _ = claim(state, "collect", Holder("second", "there"), now=2.0, lease=60)
    with pytest.raises(Superseded):
        complete(state, "collect", stale, now=3.0, summary={})
