"""Locks on open files, which the kernel frees when the last process that has them open dies.

A process that only asks shares the lock for a moment, so two that ask do not take each other for a holder.
"""

import errno
import fcntl

_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
"""Any other error does not show whether another process has the lock."""


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file unless another process has it. Raises where the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        raise
    return True


def require_lock(descriptor: int, otherwise: str) -> None:
    """Lock the file, or raise with what it means that another process has it."""
    if not try_lock(descriptor):
        raise BlockingIOError(errno.EWOULDBLOCK, otherwise)


def is_held(descriptor: int) -> bool:
    """Whether another process has locked the file for itself."""
    if not try_lock(descriptor, shared=True):
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
