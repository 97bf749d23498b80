"""torchrun as a child of the supervisor: `python -m graftwork.train.torchrun` and torchrun's arguments.

Three manners more than torchrun itself has: it is asked to stop when its parent dies; of several machines
the first leaves last; and it ends as its processes ended: with their exit code, or by the signal that
killed one of them.
"""

import os
import signal
import sys
from argparse import Namespace

from graftwork.process.parent import PARENT_VARIABLE, stop_with_parent
from graftwork.records.errors import EXIT_RESUME_ME
from graftwork.train.launch import NodeGroup, combined_exit_code
from graftwork.train.leaving import main_node_leaves_last

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
    done = False
    try:
        with main_node_leaves_last(nodes_of(args)):
            run(args)  # type: ignore[no-untyped-call]
            done = True
    except ChildFailedError as failed:
        return combined_exit_code({rank: failure.exitcode for rank, failure in failed.failures.items()})
    except SignalException:
        # While it only waits for others to leave, nothing is left to resume.
        return 0 if done else EXIT_RESUME_ME
    return 0


def nodes_of(args: Namespace) -> NodeGroup:
    """As `torchrun_arguments` named them."""
    if args.standalone:
        return NodeGroup()
    return NodeGroup(
        count=int(args.nnodes), rank=args.node_rank, address=args.master_addr, port=args.master_port
    )


def exit_likewise(code: int) -> None:
    """Die by the signal that killed a process, so that the supervisor sees what happened."""
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    exit_likewise(main(sys.argv[1:]))
