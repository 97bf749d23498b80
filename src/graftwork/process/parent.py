"""A child that was started by a supervisor does not outlive it.

On Linux the kernel sends SIGTERM when the parent dies, however it dies; elsewhere a thread watches.
A worker takes SIGTERM as the wish to stop at its next safe point, so nothing is lost by it.
"""

import ctypes
import os
import signal
import sys
import threading

PARENT_VARIABLE = "GRAFT_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def stop_with_parent() -> None:
    """Tie this process to the parent that the environment names; without one, do nothing."""
    named = os.environ.pop(PARENT_VARIABLE, "")
    if named:
        tie_to_parent(int(named))


def tie_to_parent(parent: int) -> None:
    """End this process when the process `parent`, which started it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="parent watch").start()
    if os.getppid() != parent:
        # It died before the tie was made.
        os.kill(os.getpid(), signal.SIGTERM)


def _watch(parent: int) -> None:
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
