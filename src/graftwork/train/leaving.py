"""The machines of one run leave it in order: the first, at whose door all of them meet, goes last.

In: the machines, and which of them this is. Out: nothing; a body that ended well is followed by a word to
the first machine, which waits for the words of all others. torchrun has them meet once more when all work
is done, but the first may be gone, and the store it keeps with it, before the others have heard that they
met: they would report a broken connection after a good run. Knows nothing of the work.
"""

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from graftwork.train.launch import Machines

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

PATIENCE = 60.0
"""Seconds in which the others have heard that all met: they have nothing else to do any more."""
LOOK_SECONDS = 0.1
"""Between two looks at who has left: a store that is waited for writes warnings each time it gives up."""
REACHED_WITHIN = timedelta(seconds=4)
"""For the store to answer. It may try twice, and is then still sooner than anybody loses patience."""
DOOR_SECONDS = 2.0
"""The first machine's door is open, or it has left after all and there is nobody to tell."""


@contextlib.contextmanager
def leaving_in_order(machines: Machines) -> Iterator[None]:
    """Around all that a machine does in one attempt. What fails leaves at once: nobody waits for it."""
    if machines.count == 1:
        yield
        return
    # Held beside torchrun's own, which shares its server with everybody in this process.
    held = _store(machines, timeout=REACHED_WITHIN) if machines.rank == 0 else None
    yield
    if held is not None:
        _wait_for_the_others(held, machines.count)
    else:
        _say_goodbye(machines)


def _store(machines: Machines, *, timeout: timedelta) -> "TCPStore":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        machines.address,
        machines.port,
        is_master=machines.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_the_others(store: "TCPStore", count: int) -> None:
    from torch.distributed import DistError

    keys, until = [_left(rank) for rank in range(1, count)], time.monotonic() + PATIENCE
    with contextlib.suppress(DistError):
        while not store.check(keys) and time.monotonic() < until:
            # No event crosses machines.
            time.sleep(LOOK_SECONDS)


def _say_goodbye(machines: Machines) -> None:
    from torch.distributed import DistError

    # A store would try for longer than this machine is given to leave, and report at length that it failed.
    if _door_is_open(machines):
        with contextlib.suppress(DistError):
            _store(machines, timeout=REACHED_WITHIN).set(_left(machines.rank), "")


def _door_is_open(machines: Machines) -> bool:
    try:
        socket.create_connection((machines.address, machines.port), timeout=DOOR_SECONDS).close()
    except OSError:
        return False
    return True


def _left(rank: int) -> str:
    return f"graftwork/left/{rank}"
