"""Keeps the claim of a step while the step is done, and stops the step if the claim is lost."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graftwork.cycle.state import CoordinatorState, Superseded, renew
from graftwork.pipeline.cycle.coordinator import Coordinator
from graftwork.process.worker import forget_stop, stoppable
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder

MOST_SECONDS = 10.0
"""Between two renewals: a canceled cycle stops within this time."""


class ClaimKeeper:
    """Renews a claim in a thread while its step is done, and stops the step if the claim is lost."""

    def __init__(self, coordinator: Coordinator, housekeep: Callable[[], None] = lambda: None) -> None:
        self._coordinator = coordinator
        self._housekeep = housekeep

    @contextmanager
    def keep(self, step: str, token: int) -> Iterator[None]:
        kept = _KeptClaim(step, token)
        renewer = threading.Thread(target=self._renew, args=(kept,), daemon=True)
        chores = threading.Thread(target=self._do_chores, args=(kept,), daemon=True)
        renewer.start()
        chores.start()
        try:
            with stoppable():
                try:
                    yield
                finally:
                    kept.end()
        except (StoppedInOrder, Interrupted, KeyboardInterrupt):
            if kept.lost:
                raise Superseded(step) from None
            raise
        finally:
            # A signal that came as the step ended may have kept `end` from saying so.
            kept.over.set()
            # The claim is renewed until the chores have ended, however long they take.
            try:
                chores.join()
            finally:
                kept.released.set()
            renewer.join()
            if kept.lost:
                forget_stop()
        if kept.lost:
            raise Superseded(step)

    @property
    def _pause(self) -> float:
        return min(self._coordinator.lease_seconds / 4, MOST_SECONDS)

    def _renew(self, kept: "_KeptClaim") -> None:
        """Only this: anything slow here would outlast the lease."""
        coordinator = self._coordinator
        lease = coordinator.lease_seconds
        while not kept.released.wait(self._pause):
            now = time.time()

            def apply(state: CoordinatorState, at: float = now) -> CoordinatorState:
                return renew(state, kept.step, kept.token, now=at, lease=lease)

            try:
                coordinator.store.change(apply)
            except Superseded:
                kept.lose()
                return
            except GraftError:
                # The database is busy or gone: the claim ends by itself unless it comes back.
                continue
            except Exception as error:
                # Without a renewer another coordinator may take the step over.
                kept.lose()
                coordinator.on_event(f"the claim of {kept.step} cannot be renewed: {_name_error(error)}")
                return

    def _do_chores(self, kept: "_KeptClaim") -> None:
        """Watch the run and the fleet. An error is reported once, and tried again."""
        reported: set[str] = set()
        while not kept.over.wait(self._pause):
            for chore in (self._coordinator.watch, self._housekeep):
                try:
                    chore()
                except Exception as error:
                    if (text := _name_error(error)) not in reported:
                        reported.add(text)
                        self._coordinator.on_event(f"during {kept.step}: {text}")


def _name_error(error: Exception) -> str:
    return error.what if isinstance(error, GraftError) else f"{type(error).__name__}: {error}"


class _KeptClaim:
    """A step that is being done. It is interrupted only while it is."""

    def __init__(self, step: str, token: int) -> None:
        self.step, self.token = step, token
        self.over = threading.Event()
        """The step has ended."""
        self.released = threading.Event()
        """The claim need not be renewed any more."""
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
