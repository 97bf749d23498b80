"""Start, connect and end the processes of one run; as a program, torchrun.

Input: how many there are, on how many machines. Output: torchrun's arguments, the strategy of a process, and
torchrun itself. The first machine, which hosts the rendezvous, leaves last: torchrun has all meet once more
when the work is done, and the others would report a broken connection after a good run if it had gone.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from graftwork.process.machine import count_cores
from graftwork.process.worker import PARENT_VARIABLE, stop_with_parent
from graftwork.records.errors import EXIT_RESUME, EnvironmentFailure, UserError, pip_install
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from graftwork.train.distributed.strategies import SingleProcess


LAUNCHER = "graftwork.train.distributed.launch"
DEFAULT_PORT = 29400


@dataclass(frozen=True)
class NodeGroup:
    """The machines that train one run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def torchrun_arguments(*, processes: int, machines: NodeGroup, module: str, job_file: str) -> tuple[str, ...]:
    """Arguments for `python -m torch.distributed.run`: the same job on every process of every machine."""
    if machines.count == 1:
        # It finds a free port itself: several runs on one machine do not meet.
        meeting: tuple[str, ...] = ("--standalone",)
    else:
        meeting = (
            *("--nnodes", str(machines.count), "--node-rank", str(machines.rank)),
            *("--master-addr", machines.address, "--master-port", str(machines.port)),
        )
    # A crash ends all of them: who supervises starts them again, from the last checkpoint.
    return (*meeting, "--nproc-per-node", str(processes), "--max-restarts", "0", "-m", module, job_file)


def parse_address(text: str) -> tuple[str, int]:
    """`HOST` or `HOST:PORT`; an IPv6 address is in brackets."""
    host, port = text, str(DEFAULT_PORT)
    if text.startswith("["):
        host, _, suffix = text[1:].partition("]")
        port = suffix.removeprefix(":") or port
    elif ":" in text:
        host, _, port = text.rpartition(":")
    if (
        not host
        or (":" in host and not text.startswith("["))
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise UserError(
            f"{text} is not the address of a machine",
            why="it is HOST or HOST:PORT, as the other machines reach it",
            fix=f"--main-address 10.0.0.1:{DEFAULT_PORT}",
        )
    return host, int(port)


def combined_exit_code(codes: dict[int, int]) -> int:
    """The combined exit code of a strategy's processes, by rank: the actual cause, not what followed. One
    that is killed takes the others with it: they fail too, or are asked to stop.
    """
    failed = {rank: code for rank, code in sorted(codes.items()) if code}
    killed = [code for code in failed.values() if code < 0 and code != -15]
    exited = [code for code in failed.values() if code > 0]
    return (killed or exited or list(failed.values()) or [0])[0]


def is_main_process() -> bool:
    """Whether this process is the one that writes. True if there is no other."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End this process. In a group it skips the interpreter's shutdown, which can abort: a thread of the
    group that drops its last tensor at that moment needs the interpreter.
    """
    if "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def threads_per_process() -> int | None:
    """A fair share of the cores if several processes share them; None: all."""
    local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(count_cores() // local_processes, 1) if local_processes > 1 else None


class SilentHeartbeat:
    """For all processes but the first: one heartbeat per run is enough."""

    def beat(self, *_what: object, **_detail: object) -> None: ...

    def move(self, *_doing: object) -> None: ...


def make_strategy(settings: TrainSettings, *, device: str, dtype: str) -> "SingleProcess":
    """Join the process group; alone if no other process was started."""
    from graftwork.train.distributed.strategies import SingleProcess

    if settings.strategy == "single" or "RANK" not in os.environ:
        return SingleProcess()
    on_cpu = device == "cpu"
    _require_possible(settings, dtype, on_cpu=on_cpu)
    if settings.strategy == "ddp":
        from graftwork.train.distributed.strategies import DataParallel

        return DataParallel(on_cpu=on_cpu)
    if settings.strategy == "fsdp":
        from graftwork.train.distributed.strategies import FullyShardedDataParallel

        return FullyShardedDataParallel(on_cpu=on_cpu, offload=settings.offload)
    from graftwork.train.distributed.strategies import ZeroStrategy

    return ZeroStrategy(
        stage=int(settings.strategy[-1]),
        on_cpu=on_cpu,
        offload=settings.offload,
        most=settings.max_grad_norm,
    )


SHARE_VARIABLE = "GRAFT_SHARE_GPU"
"""If set, several processes may share a GPU through gloo: to try a strategy with a single GPU."""


def _require_possible(settings: TrainSettings, dtype: str, *, on_cpu: bool) -> None:
    """Fail now if something could not work later."""
    strategy, is_zero = settings.strategy, settings.strategy in ("zero2", "zero3")
    if not on_cpu and not os.environ.get(SHARE_VARIABLE):
        import torch

        local_processes, available = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if local_processes > available:
            raise UserError(
                f"{local_processes} processes are to share this machine's {available} GPU(s)",
                why="each process needs its own GPU",
                fix=f"set `train.processes: {available}`",
            )
    if dtype == "float16" and is_zero:
        raise UserError(
            f"`strategy: {strategy}` does not work with float16 here",
            why="its gradients are scaled by DeepSpeed, which our own scaling cannot change",
            fix="use `strategy: ddp` or `fsdp` on this device, or `train.precision: float32`",
        )
    if settings.method == "qlora" and strategy in ("fsdp", "zero3"):
        raise UserError(
            f"`method: qlora` cannot be sharded by `strategy: {strategy}`",
            why="4-bit weights and their scales must stay together",
            fix="use `strategy: ddp` or `zero2` with qlora, or `method: lora` with this strategy",
        )
    if is_zero and find_spec("deepspeed") is None:
        raise EnvironmentFailure(
            "the package deepspeed is not installed",
            why="`train.strategy` requires it",
            fix=f"DS_BUILD_OPS=0 {pip_install('deepspeed')}, or use `strategy: fsdp`",
        )


LEAVE_SECONDS = 60.0
"""Seconds in which the others learn that all have finished: they have nothing else to do."""
POLL_SECONDS = 0.1
"""Between two checks for processes that left: a store that is waited for logs a warning at each timeout."""
STORE_TIMEOUT = timedelta(seconds=20)
"""Timeout of the store. It may try twice, and is then still within all timeouts."""
CONNECT_SECONDS = 2.0
"""The first machine's port is open, or it has left and cannot be notified."""


@contextlib.contextmanager
def main_node_leaves_last(machines: NodeGroup) -> Iterator[None]:
    """Wraps one attempt of a machine. If it fails, it leaves at once: the others do not wait."""
    if machines.count == 1:
        yield
        return
    # Separate from torchrun's own, which shares its server with all code in this process.
    store = _store(machines) if machines.rank == 0 else None
    yield
    if store is not None:
        _wait_for_the_others(store, machines.count)
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
"""Seconds for a step and its checkpoint to finish; the supervisor gives up earlier."""


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
        return 0 if done else EXIT_RESUME
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
