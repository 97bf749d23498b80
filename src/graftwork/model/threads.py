"""How many threads compute, and how they wait for each other on a machine that others use too.

Input: a number of threads, or None for all cores that this process may use. Output: torch set to it, and a
guard that watches for contention. Threads of a parallel region wait for each other by spinning. On an idle
machine that is the fastest way. Next to a busy process it is the slowest one: the scheduler puts two of our
threads on one core, and each spins through its time slice while the other has the work (measured on two
cores: 6 times slower next to one niced process). libgomp fixes the length of spinning at its start, but spins
shortly as soon as it has more threads than there are cores (its manual: GOMP_SPINCOUNT). The guard makes use
of that: while our threads wait for a core, it keeps a second, sleeping pool of threads. Results do not
change: the number of threads that compute is the same.
"""

import os
import threading
import time
from pathlib import Path

TASKS = Path("/proc/self/task")
LOOK_SECONDS = 0.25
CONTENDED, CONTENDED_PER_THREAD = 0.25, 0.03
"""Seconds per second that our threads together wait for a core, above which spinning is shortened. Two
threads next to one busy process wait about 1.0, on an idle machine 0.01. More threads wait longer.
"""
FIRST_HOLD, LONGEST_HOLD = 2.0, 8.0
"""How long spinning stays short before long spinning is tried again; doubled each time that this was too
early.
"""
FORGET_SECONDS = 10.0
"""Time without contention after which the hold is reset."""
REGION = 2**18
"""Size of a sum, in elements, that torch computes in parallel."""


def use_threads(threads: int | None) -> int:
    """Fix the number of threads: the same number gives the same sums, bit by bit."""
    import torch

    count = threads or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else threads or 1
    torch.set_num_threads(count)
    return count


def waited_seconds(tasks: Path = TASKS) -> float | None:
    """Seconds that threads of this process have waited for a core; None if the system does not report
    them.
    """
    total = 0.0
    try:
        for task in tasks.iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[1]) / 1e9
            except ProcessLookupError:
                continue  # The thread ended while we looked.
    except (OSError, IndexError, ValueError):
        return None
    return total


class Contention:
    """Decides from sample to sample whether threads should spin briefly. Pure: times are arguments. Threads
    that sleep and wake always wait a little. So the end of contention cannot be seen while spinning is short:
    after a while long spinning is tried again.
    """

    def __init__(self, threads: int = 2) -> None:
        self._contended = max(CONTENDED, CONTENDED_PER_THREAD * threads)
        self._hold = FIRST_HOLD
        self._until = 0.0
        self._free_since: float | None = None

    def see(self, *, waited: float, elapsed: float, now: float) -> bool:
        """Return whether to spin briefly until the next sample; `waited` is over all threads since the last
        one.
        """
        if now < self._until:
            return True
        if self._until and self._free_since is None:
            # What was waited until now was waited with short spinning.
            self._free_since = now
            return False
        if elapsed <= 0 or waited / elapsed <= self._contended:
            if self._free_since is not None and now - self._free_since >= FORGET_SECONDS:
                self._hold = FIRST_HOLD
            return False
        if self._free_since is not None and now - self._free_since < FORGET_SECONDS:
            self._hold = min(self._hold * 2, LONGEST_HOLD)
        self._until, self._free_since = now + self._hold, None
        return True


class SpinGuard:
    """Watches for contention in a separate thread."""

    def __init__(self, threads: int = 2) -> None:
        self._threads = threads
        self._over = threading.Event()
        self._second: tuple[threading.Thread, threading.Event] | None = None
        self._thread = threading.Thread(target=self._watch, name="spin guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    @property
    def holds(self) -> bool:
        """Whether spinning is short at present."""
        return self._second is not None

    def _watch(self) -> None:
        state = Contention(self._threads)
        before, then = waited_seconds(), time.monotonic()
        while before is not None and not self._over.wait(LOOK_SECONDS):
            waited, now = waited_seconds(), time.monotonic()
            if waited is None:
                break
            # Threads that ended take their share with them.
            contended = state.see(waited=max(waited - before, 0.0), elapsed=now - then, now=now)
            before, then = waited, now
            if contended and not self.holds:
                self._hold()
            elif not contended and self.holds:
                self._release()
        self._release()

    def _hold(self) -> None:
        """A second pool of threads: it belongs to the thread that created it, and ends with it."""
        enough = threading.Event()

        def keep_pool() -> None:
            import torch

            torch.ones(REGION).sum()
            enough.wait()

        thread = threading.Thread(target=keep_pool, name="second pool", daemon=True)
        thread.start()
        self._second = (thread, enough)

    def _release(self) -> None:
        if self._second is not None:
            thread, enough = self._second
            enough.set()
            thread.join()
            self._second = None


_guards: list[SpinGuard] = []


def guard_spinning(threads: int) -> None:
    """Start the guard of this process, once. Does nothing for one thread or if waiting is not reported."""
    if not _guards and threads > 1 and waited_seconds() is not None:
        _guards.append(SpinGuard(threads))
        _guards[0].start()
