"""The machines of one run leave it in order: the first, which hosts the rendezvous, leaves last.

In: the machines, and which of them this is. Out: nothing; a body that ended well is followed by a word to
the first machine, which waits for the words of all others. torchrun has them meet once more when all work
is done, but the first may be gone, and the store it keeps with it, before the others have heard that they
met: they would report a broken connection after a good run. Knows nothing of the work.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from graftwork.process.worker import PARENT_VARIABLE, stop_with_parent
from graftwork.records.errors import EXIT_RESUME_ME
from graftwork.train.distributed.launch import NodeGroup, combined_exit_code

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LEAVE_SECONDS = 60.0
"""Seconds in which the others learn that all have met: they have nothing else to do."""
POLL_SECONDS = 0.1
"""Between two checks for processes that left: a store that is waited for logs a warning at each timeout."""
STORE_TIMEOUT = timedelta(seconds=20)
"""For the store to answer. It may try twice, and is then still within all timeouts."""
CONNECT_SECONDS = 2.0
"""The first machine's port is open, or it has left and cannot be notified."""


@contextlib.contextmanager
def main_node_leaves_last(machines: NodeGroup) -> Iterator[None]:
    """Wraps one attempt of a machine. If it fails, it leaves at once: the others do not wait."""
    if machines.count == 1:
        yield
        return
    # Separate from torchrun's own, which shares its server with all code in this process.
    held = _store(machines) if machines.rank == 0 else None
    yield
    if held is not None:
        _wait_for_the_others(held, machines.count)
    else:
        _report_departure(machines)


def _store(machines: NodeGroup) -> "TCPStore":
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        machines.address,
        machines.port,
        is_master=machines.rank == 0,
        timeout=STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_the_others(store: "TCPStore", count: int) -> None:
    from torch.distributed import DistError

    keys, until = [_departure_key(rank) for rank in range(1, count)], time.monotonic() + LEAVE_SECONDS
    with contextlib.suppress(DistError):
        while not store.check(keys) and time.monotonic() < until:
            # No event crosses machines.
            time.sleep(POLL_SECONDS)


def _report_departure(machines: NodeGroup) -> None:
    from torch.distributed import DistError

    try:
        # A store would try for longer than this machine has to leave, and report at length that it failed.
        socket.create_connection((machines.address, machines.port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return
    with contextlib.suppress(DistError):
        _store(machines).set(_departure_key(machines.rank), "")


def _departure_key(rank: int) -> str:
    return f"graftwork/left/{rank}"


SHUTDOWN_SECONDS = 600
"""Seconds for a step and its checkpoint to find their end; the supervisor loses patience earlier."""


def main(arguments: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    stop_with_parent()
    # The processes that it starts are tied to it in turn.
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    parser = get_args_parser()
    if "--shutdown-timeout" in parser._option_string_actions:
        arguments = ["--shutdown-timeout", str(SHUTDOWN_SECONDS), *arguments]
    args = parser.parse_args(arguments)
    # As `torchrun_arguments` named them.
    machines = NodeGroup()
    if not args.standalone:
        machines = NodeGroup(int(args.nnodes), args.node_rank, args.master_addr, args.master_port)
    done = False
    try:
        with main_node_leaves_last(machines):
            run(args)  # type: ignore[no-untyped-call]
            done = True
    except ChildFailedError as failed:
        return combined_exit_code({rank: failure.exitcode for rank, failure in failed.failures.items()})
    except SignalException:
        # While it only waits for others to leave, nothing is left to resume.
        return 0 if done else EXIT_RESUME_ME
    return 0


def exit_likewise(code: int) -> None:
    """Die by the signal that killed a process, so that the supervisor sees what happened."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    exit_likewise(main(sys.argv[1:]))
