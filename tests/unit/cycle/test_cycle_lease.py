"""A claim that is lost stops its step, and nothing else."""

import os
import signal
import threading
from contextlib import suppress

import pytest
from memory_cycles import MemoryCycles

from graftwork.cycle import coordinator as coordinating
from graftwork.cycle.coordinator import ClaimKeeper, Coordinator
from graftwork.cycle.settings import CycleSettings
from graftwork.cycle.state import Holder, LogEntry, Superseded, begin, cancel, claim
from graftwork.process.worker import forget_stop, stoppable
from graftwork.records.errors import GracefulStop, Interrupted


@pytest.fixture(autouse=True)
def nobody_asks_to_stop():
    yield
    forget_stop()


class Quiet:
    def watch(self, state):
        return {}, ()


def make():
    """A coordinator that has claimed a step, and its token."""
    store = MemoryCycles()
    made = Coordinator(
        store, Quiet(), CycleSettings(), ("a",), ("main",), Holder("test", "here"), lease_seconds=1
    )
    now = made.clock()
    store.change(lambda state: begin(state, model="main", cause="", now=now, steps=("a",), version=""))
    store.change(lambda state: claim(state, "a", made.holder, now=now, lease=1)[0])
    return made


def test_the_claim_is_renewed_while_the_step_is_done():
    coordinator = make()
    until, renewed = coordinator.store.read().cycle.step("a").until, count_renewals(coordinator)
    with ClaimKeeper(coordinator).keep("a", 1):
        assert renewed.acquire(timeout=300)
    assert coordinator.store.read().cycle.step("a").until > until


def count_renewals(coordinator):
    """A semaphore that each renewal releases."""
    change, renewed = coordinator.store.change, threading.Semaphore(0)

    def counted(apply):
        changed = change(apply)
        renewed.release()
        return changed

    coordinator.store.change = counted
    return renewed


def test_the_claim_is_renewed_while_housekeeping_takes_long():
    coordinator, begun, go_on = make(), threading.Event(), threading.Event()

    def housekeep():
        begun.set()
        go_on.wait(300)

    renewed = count_renewals(coordinator)
    with ClaimKeeper(coordinator, housekeep).keep("a", 1):
        assert begun.wait(300)
        for _ in range(3):
            assert renewed.acquire(timeout=300)
        go_on.set()


def test_an_error_in_housekeeping_is_reported_and_the_claim_is_kept():
    coordinator, reported = make(), threading.Event()
    lines = []
    coordinator.on_event = lambda text: (lines.append(text), reported.set())
    renewed = count_renewals(coordinator)

    def housekeep():
        raise KeyError("x")

    with ClaimKeeper(coordinator, housekeep).keep("a", 1):
        assert reported.wait(300)
        for _ in range(3):
            assert renewed.acquire(timeout=300)
    assert lines == ["during a: KeyError: 'x'"]


def test_a_renewer_that_breaks_loses_the_claim():
    coordinator = make()

    def broken(_change):
        raise RuntimeError("a bug")

    coordinator.store.change = broken
    with pytest.raises(Superseded), ClaimKeeper(coordinator).keep("a", 1):
        threading.Event().wait(300)


def test_a_canceled_cycle_interrupts_its_step_and_the_next_signal_still_counts():
    coordinator = make()
    entry = LogEntry(at=0.0, who="ada", action="cancel")
    coordinator.store.change(lambda state: cancel(state, entry))
    with stoppable():
        with pytest.raises(Superseded), ClaimKeeper(coordinator).keep("a", 1):
            threading.Event().wait(300)
        with pytest.raises(KeyboardInterrupt):
            signal_and_wait()


def test_a_canceled_cycle_ends_a_step_that_reports_the_interrupt_in_its_own_words():
    """As following a job does: it raises Interrupted for a KeyboardInterrupt."""
    coordinator = make()
    entry = LogEntry(at=0.0, who="ada", action="cancel")
    coordinator.store.change(lambda state: cancel(state, entry))
    with pytest.raises(Superseded), ClaimKeeper(coordinator).keep("a", 1):
        follow_job()


def follow_job():
    try:
        threading.Event().wait(300)
    except KeyboardInterrupt:
        raise Interrupted("no longer following") from None


def signal_and_wait():
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(300)


def test_a_claim_that_is_lost_as_the_step_ends_drops_its_result():
    coordinator = make()
    keeper, lost = ClaimKeeper(coordinator), threading.Event()
    change = coordinator.store.change

    def fail(_change):
        lost.set()
        raise Superseded("a")

    coordinator.store.change = fail
    with pytest.raises(Superseded), keeper.keep("a", 1):
        ignore_interrupt(lost)
    coordinator.store.change = change


def ignore_interrupt(lost):
    """A step that ends although it was interrupted."""
    with suppress(KeyboardInterrupt):
        lost.wait(300)
        threading.Event().wait(300)


def test_a_claim_that_is_lost_in_the_moment_in_which_the_step_ends_does_not_hang(monkeypatch):
    """The signal comes while the main thread waits to say that the step has ended."""
    coordinator = make()

    def end(kept):
        losing = threading.Thread(target=kept.lose)
        losing.start()
        try:
            threading.Event().wait(300)
        finally:
            losing.join()

    monkeypatch.setattr(coordinating._KeptClaim, "end", end)
    with pytest.raises(Superseded), ClaimKeeper(coordinator).keep("a", 1):
        pass


def test_a_signal_from_outside_is_passed_on():
    coordinator = make()
    with pytest.raises(GracefulStop), ClaimKeeper(coordinator).keep("a", 1):
        signal_and_wait()
