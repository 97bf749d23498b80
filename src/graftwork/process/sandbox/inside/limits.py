"""The limits of one process that runs the code, set by itself before it gives up the right to change them.

In: figures. Out: nothing; the kernel holds the process and every child of it to them.
"""

from __future__ import annotations

import resource

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def set_limits(limits: dict[str, Any], *, processes: int | None) -> None:
    """`processes` is None where those of the same user that run anyway would count."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        *(((resource.RLIMIT_NPROC, processes),) if processes is not None else ()),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
    ):
        _, allowed = resource.getrlimit(kind)
        least = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        # Both alike, so that nothing can be raised again. But of processor time: the first figure ends by
        # a signal that tells why, and who does not heed it is killed a second later.
        later = kind == resource.RLIMIT_CPU and (allowed == resource.RLIM_INFINITY or least < allowed)
        last = least + 1 if later else least
        resource.setrlimit(kind, (least, last))
