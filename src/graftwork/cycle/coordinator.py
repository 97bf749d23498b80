"""Carries out the decisions of `cycle.decide` durably: every change of the state is one transaction.

Input: a store, a runner of steps and a clock. Output: one action per tick. Killed at any moment, the next
coordinator resumes from the last transaction: a step that had not reported its end is done again, and steps
are written so that doing them again changes nothing.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from graftwork.cycle.decide import (
    CHECK_SECONDS,
    COORDINATOR,
    Action,
    AwaitApproval,
    Begin,
    Close,
    CycleFacts,
    DoStep,
    Rest,
    SkipStep,
    approval_notice,
    find_notices,
    next_action,
    next_date,
    rests_until,
)
from graftwork.cycle.settings import COLLECT, CycleSettings
from graftwork.cycle.state import (
    CoordinatorState,
    CycleState,
    Holder,
    LogEntry,
    Notice,
    Superseded,
    ask_approval,
    begin,
    claim,
    complete,
    enqueue,
    fail,
    finish,
    pause,
    post_notices,
    postpone,
    renew,
    reopen,
    retry_pause,
    settle_notice,
    skip,
    start_schedule,
)
from graftwork.process.worker import forget_stop, interruption_error, stoppable
from graftwork.records.errors import (
    Busy,
    GracefulStop,
    GraftError,
    Interrupted,
    NegativeResult,
    UserError,
)
from graftwork.store.cycles import CycleTable

MOST_FAILED_CYCLES = 3
"""After this many failed cycles in a row, the coordinator pauses."""
LEASE_SECONDS = 60.0
"""A coordinator on another machine takes over after this long without a heartbeat."""
BUSY_SECONDS = 5.0
"""Another command works on the project: check again soon."""
MOST_TRIES = 6
"""Attempts to deliver a notice; after that it is only in the log."""

StillDue = Callable[[CoordinatorState], bool]
"""Whether the newest state leads to the action that was decided on."""


class CycleStepResult(NamedTuple):
    """What a step did; or, with `again_at`, that it is not decided yet."""

    summary: dict[str, Any]
    again_at: float | None = None
    why: str = ""


class StepRunner(Protocol):
    """Does the steps of a cycle."""

    def measure_facts(self) -> CycleFacts: ...

    def do(self, step: str, cycle: CycleState) -> CycleStepResult:
        """Do the step. Doing it again after a crash must change nothing."""

    def find_missing(self, cycle: CycleState, here: str) -> str:
        """The first step that is done and whose files are not here any more; empty if all are."""

    def abandon(self, cycle: CycleState) -> None:
        """End what a canceled cycle has under way elsewhere."""

    def watch(self, state: CoordinatorState) -> tuple[dict[str, Any], tuple[Notice, ...]]:
        """Return stalls and costs since the last time as notices, and what the state must remember of
        them.
        """

    def send(self, notice: Notice) -> str:
        """Deliver a notice; returns why it failed, or nothing."""


@contextmanager
def no_keeper(_step: str, _token: int) -> Iterator[None]:
    """Context for runners where nothing else can take over a step."""
    yield


@dataclass
class Coordinator:
    store: CycleTable
    runner: StepRunner
    settings: CycleSettings
    steps: tuple[str, ...]
    models: tuple[str, ...]
    holder: Holder
    version: str = ""
    clock: Callable[[], float] = time.time
    lease_seconds: float = LEASE_SECONDS
    keep_claim: Callable[[str, int], AbstractContextManager[None]] = no_keeper
    """Renews the claim while a step is done; raises Superseded at its end if it was lost."""
    on_event: Callable[[str], None] = lambda _text: None
    _facts: CycleFacts = field(default=CycleFacts(), init=False)
    _measured_at: float = field(default=float("-inf"), init=False)

    def tick(self) -> Action:
        """Decide, and carry out the decision."""
        state, now = self.store.read(), self.clock()
        if not state.served_until:
            # Dates count from the first start on.
            state = self.store.change(lambda state: start_schedule(state, now=now))
        # Facts for the triggers, measured again when they are due.
        idle = state.open_cycle is None and not state.queue and state.paused is None
        may_trigger = self.settings.when.is_set and now >= rests_until(state)
        if idle and may_trigger and now - self._measured_at >= CHECK_SECONDS:
            self._facts, self._measured_at = self.runner.measure_facts(), now
        facts = self._facts
        action = next_action(state, self.settings, facts, now=now, here=self.holder.place)

        def still_due(state: CoordinatorState) -> bool:
            """Whether the newest state leads to the same action: another coordinator may have done it."""
            newest = next_action(state, self.settings, facts, now=now, here=self.holder.place)
            # Tuples of two kinds are equal if their fields are: to wait for a step is not to do it.
            return type(newest) is type(action) and newest == action

        match action:
            case Begin(model, cause):
                self._begin(model, cause, still_due)
            case DoStep(step):
                self._do(step, still_due)
            case SkipStep(step, why):
                self._change(lambda state: skip(state, step, why=why, now=now) if still_due(state) else state)
            case AwaitApproval(step):
                self._ask(step, still_due)
            case Close():
                self._close(action, still_due)
            case Rest():
                pass
        self.send_notices()
        return action

    def request(self, cause: str) -> None:
        """Request a cycle of each model, manually or by an event."""
        self._change(lambda state: enqueue(state, self.models, cause=cause))

    def request_unless_open(self, cause: str) -> None:
        """Ask for a cycle of each model if none is open; another coordinator may just have begun one."""
        self._change(
            lambda state: enqueue(state, self.models, cause=cause) if state.open_cycle is None else state
        )

    def send_notices(self) -> None:
        """Deliver what is in the outbox. What fails is tried again later, a few times."""
        if not (outbox := self.store.read().outbox):
            return
        for notice in outbox:
            now = self.clock()
            if notice.not_before > now:
                continue
            try:
                failure = self.runner.send(notice)
            except Exception as error:  # it would end every coordinator that finds it in the outbox
                failure = f"{type(error).__name__}: {error}"[:200]
            retry_in: float | None = None
            if failure and notice.tries + 1 < MOST_TRIES:
                retry_in = now + retry_pause(notice.tries + 1)
            if failure:
                consequence = "it will be retried" if retry_in is not None else "given up"
                self.on_event(f"notice not delivered: {failure}; {consequence}")
            self.store.change(lambda state, n=notice, at=retry_in: settle_notice(state, n, retry_at=at))  # type: ignore[misc]

    def watch(self) -> None:
        """Turn stalls and costs that are new into notices."""
        is_newest = False

        def apply(state: CoordinatorState) -> CoordinatorState:
            nonlocal is_newest
            is_newest = all(getattr(state, name) == getattr(before, name) for name in update)
            return post_notices(state.model_copy(update=update), subscribed) if is_newest else state

        while not is_newest:
            # Once more if another coordinator has reported some of them since this one looked.
            before, is_newest = self.store.read(), True
            update, notices = self.runner.watch(before)
            subscribed = tuple(notice for notice in notices if notice.kind in self.settings.notify.kinds)
            if update or subscribed:
                self._change(apply)

    def _begin(self, model: str, cause: str, still_due: StillDue) -> None:
        now, opened = self.clock(), False

        def apply(state: CoordinatorState) -> CoordinatorState:
            nonlocal opened
            opened = still_due(state)
            if not opened:
                return state
            if not model:
                state = enqueue(state, self.models, cause=cause)
            first = state.queue[0]
            return begin(state, model=first, cause=cause, now=now, steps=self.steps, version=self.version)

        state = self._change(apply)
        self._measured_at = float("-inf")
        if opened and state.cycle is not None:
            self.on_event(f"cycle {state.cycle.number} of {state.cycle.model} begins: {state.cycle.cause}")

    def _ask(self, step: str, still_due: StillDue) -> None:
        now = self.clock()

        def apply(state: CoordinatorState) -> CoordinatorState:
            cycle = state.open_cycle
            if cycle is None or not still_due(state):
                return state
            return ask_approval(state, step, approval_notice(cycle, step, now=now))

        self._change(apply)

    def _close(self, action: Close, still_due: StillDue) -> None:
        now, closed = self.clock(), False

        def apply(state: CoordinatorState) -> CoordinatorState:
            nonlocal closed
            closed = still_due(state)
            return finish(state, action.outcome, reason=action.reason, now=now) if closed else state

        self._change(apply)
        if closed:
            self.on_event(f"cycle ended: {action.outcome.replace('_', ' ')}, {action.reason}")

    def _do(self, step: str, still_due: StillDue) -> None:
        state, token = self._claim(step, still_due)
        cycle = state.open_cycle
        if token is None or cycle is None:
            return
        try:
            if missing := self.runner.find_missing(cycle, self.holder.place):
                why = f"files of {missing} are not on this machine: repeating the step"
                self.on_event(why)
                self._change(lambda state: reopen(state, step, token, first=missing, why=why))
                return
            self._attempt(step, token, cycle)
        except Superseded:
            self._abandon_canceled(cycle)

    def _claim(self, step: str, still_due: StillDue) -> tuple[CoordinatorState, int | None]:
        token: int | None = None
        now = self.clock()

        def apply(state: CoordinatorState) -> CoordinatorState:
            nonlocal token
            if not still_due(state):
                return state
            state, token = claim(state, step, self.holder, now=now, lease=self.lease_seconds)
            return state

        return self._change(apply), token

    def _attempt(self, step: str, token: int, cycle: CycleState) -> None:
        try:
            with self.keep_claim(step, token):
                result = self.runner.do(step, cycle)
        except Superseded:
            self.on_event(f"{step} was taken over by another coordinator, or the cycle was canceled")
            raise
        except (GracefulStop, Interrupted, KeyboardInterrupt) as stopped:
            self._give_back(step, token, stopped, cycle)
        except Exception as error:
            self._note_error(step, token, error)
        else:
            now = self.clock()

            def apply(state: CoordinatorState) -> CoordinatorState:
                if result.again_at is not None:
                    return postpone(state, step, token, until=result.again_at, why=result.why)
                state = complete(state, step, token, now=now, summary=result.summary)
                if step == COLLECT and "rows" in result.summary:
                    state = state.model_copy(update={"rows_counted": int(result.summary["rows"])})
                return state

            self._change(apply)
            self.watch()

    def _abandon_canceled(self, cycle: CycleState) -> None:
        """End what the step started elsewhere after its cycle was canceled: nothing else knows about it."""
        cycles = (self.store.read().cycle, *self.store.history())
        if any(past and past.number == cycle.number and past.outcome == "canceled" for past in cycles):
            self.runner.abandon(cycle)

    def _note_error(self, step: str, token: int, error: Exception) -> None:
        """Wait, end the cycle, or try again after a pause, by the kind of the error."""
        now = self.clock()
        # A mistake would be made in the same way again: a person has to change something.
        may_pass = not isinstance(error, UserError)
        name = type(error).__name__
        described: dict[str, Any] = {"error": name, "what": f"{name}: {error}"[:500]}
        if isinstance(error, GraftError):
            described = error.as_json()
        reason = f"{step}: {described['what']}"

        def apply(state: CoordinatorState) -> CoordinatorState:
            if isinstance(error, Busy):
                return postpone(state, step, token, until=now + BUSY_SECONDS, why=error.what)
            if isinstance(error, NegativeResult):
                summary = {"refused": error.what, "why": error.why}
                state = complete(state, step, token, now=now, summary=summary)
                return finish(state, "refused", reason=reason, now=now)
            return fail(state, step, token, now=now, error=described, may_pass=may_pass)

        self._change(apply)
        self.on_event(reason)

    def _give_back(self, step: str, token: int, stopped: BaseException, cycle: CycleState) -> None:
        """Release the step to be resumed later; a stop not requested here ends a session, not the cycle."""
        now = self.clock()
        by_request = not isinstance(stopped, GracefulStop) or isinstance(interruption_error(), GracefulStop)
        until = now if by_request else next_date(self.settings, after=now) or now + BUSY_SECONDS
        why = (
            "stopped at a checkpoint"
            if by_request
            else "its time limit was reached; it resumes at the next date"
        )
        try:
            self._change(lambda state: postpone(state, step, token, until=until, why=why))
        except Superseded:
            self._abandon_canceled(cycle)
        if by_request:
            raise stopped

    def _change(self, change: Callable[[CoordinatorState], CoordinatorState]) -> CoordinatorState:
        now = self.clock()

        def apply(before: CoordinatorState) -> CoordinatorState:
            after = change(before)
            if after.consecutive_failures >= MOST_FAILED_CYCLES and after.paused is None:
                why = f"{after.consecutive_failures} cycles in a row have failed; `graft up resume` continues"
                after = pause(after, LogEntry(at=now, who=COORDINATOR, action="pause", why=why))
            return post_notices(after, find_notices(before, after, self.settings, now=now))

        return self.store.change(apply)


MOST_SECONDS = 10.0
"""Between two renewals: a canceled cycle stops within this time."""


class ClaimKeeper:
    """Renews a claim in a thread while its step is done, and stops the step if the claim is lost."""

    def __init__(self, coordinator: Coordinator, housekeep: Callable[[], None] = lambda: None) -> None:
        self._coordinator = coordinator
        self._housekeep = housekeep

    @contextmanager
    def keep(self, step: str, token: int) -> Iterator[None]:
        claim = _KeptClaim(step, token)
        renewer = threading.Thread(target=self._renew, args=(claim,), daemon=True)
        chores = threading.Thread(target=self._do_chores, args=(claim,), daemon=True)
        renewer.start()
        chores.start()
        try:
            with stoppable():
                try:
                    yield
                finally:
                    claim.end()
        except (GracefulStop, Interrupted, KeyboardInterrupt):
            if claim.lost:
                raise Superseded(step) from None
            raise
        finally:
            # A signal that came as the step ended may have kept `end` from saying so.
            claim.over.set()
            # The claim is renewed until the chores have ended, however long they take.
            try:
                chores.join()
            finally:
                claim.released.set()
            renewer.join()
            if claim.lost:
                forget_stop()
        if claim.lost:
            raise Superseded(step)

    @property
    def _pause(self) -> float:
        return min(self._coordinator.lease_seconds / 4, MOST_SECONDS)

    def _renew(self, claim: "_KeptClaim") -> None:
        """Only renews the claim: anything slow here would outlast the lease."""
        coordinator = self._coordinator
        lease = coordinator.lease_seconds
        while not claim.released.wait(self._pause):
            now = time.time()

            def apply(state: CoordinatorState, at: float = now) -> CoordinatorState:
                return renew(state, claim.step, claim.token, now=at, lease=lease)

            try:
                coordinator.store.change(apply)
            except Superseded:
                claim.lose()
                return
            except GraftError:
                # The database is busy or gone: the claim ends by itself unless it comes back.
                continue
            except Exception as error:
                # Without a renewer another coordinator may take the step over.
                claim.lose()
                coordinator.on_event(f"the claim of {claim.step} cannot be renewed: {_name_error(error)}")
                return

    def _do_chores(self, claim: "_KeptClaim") -> None:
        """Watch the run and the fleet. An error is reported once, and tried again."""
        reported: set[str] = set()
        while not claim.over.wait(self._pause):
            for chore in (self._coordinator.watch, self._housekeep):
                try:
                    chore()
                except Exception as error:
                    if (text := _name_error(error)) not in reported:
                        reported.add(text)
                        self._coordinator.on_event(f"during {claim.step}: {text}")


def _name_error(error: Exception) -> str:
    return error.what if isinstance(error, GraftError) else f"{type(error).__name__}: {error}"


class _KeptClaim:
    """A step that is being done. It is interrupted only while it is."""

    def __init__(self, step: str, token: int) -> None:
        self.step, self.token = step, token
        self.over = threading.Event()
        """The step has ended."""
        self.released = threading.Event()
        """The claim need not be renewed any longer."""
        self.lost = False
        self._guard = threading.Lock()

    def end(self) -> None:
        with self._guard:
            self.over.set()

    def lose(self) -> None:
        """As Ctrl-C would: the step ends at a safe point, in the main thread."""
        with self._guard:
            self.lost = True
            if not self.over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
