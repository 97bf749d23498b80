"""Ties a child process to its parent: when the parent is gone, however it went, so is the child.

The child's standard input is a pipe that only the parent holds open; the kernel closes it with the
parent, also after kill -9.
"""

import os
import sys
import threading


def end_with_parent() -> None:
    """From now on, the end of standard input is the end of this process."""
    threading.Thread(target=_wait_for_end, name="lifeline", daemon=True).start()


def _wait_for_end() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    # Not sys.exit: a thread inside a long computation must not keep the process alive.
    os._exit(1)
