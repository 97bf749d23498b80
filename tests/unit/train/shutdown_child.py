"""One of two machines that have nothing to do: RANK, port, and the process of the other that is slow.

The second hears late that both met: when the first has left, or after a time in which it could have.
"""

import contextlib
import os
import sys
import time

LATE_SECONDS = 2.0


def hear_late(first: int) -> None:
    from torch.distributed.elastic.utils import store as meetings

    met = meetings._barrier_nonblocking

    def slow(*args, **named):
        key = met(*args, **named)
        until = time.monotonic() + LATE_SECONDS
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.kill(first, 0)
                time.sleep(0.02)
        return key

    meetings._barrier_nonblocking = slow


if __name__ == "__main__":
    from graftwork.train.distributed.launch import NodeGroup, main, torchrun_arguments

    rank, port, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if rank:
        hear_late(int(sys.argv[4]))
    machines = NodeGroup(count=2, rank=rank, port=port)
    sys.exit(main([*torchrun_arguments(processes=1, machines=machines, module=module, job_file="none")]))
