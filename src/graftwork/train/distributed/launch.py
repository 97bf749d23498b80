"""How several processes of one run are started, and what each of them knows of the others.

In: how many there are, on how many machines. Out: torchrun's arguments, and after the start what it
put into the environment. Starts nothing itself.
"""

import atexit
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from graftwork.process.pool import count_cores
from graftwork.records.errors import EnvironmentLacks, UserMistake, pip_install
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.distributed.strategies import SingleProcess

LAUNCHER = "graftwork.train.distributed.torchrun"
DEFAULT_PORT = 29400


@dataclass(frozen=True)
class NodeGroup:
    """The machines that train one run, and which of them this is."""

    count: int = 1
    rank: int = 0
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT


def torchrun_arguments(*, processes: int, machines: NodeGroup, module: str, job_file: str) -> tuple[str, ...]:
    """What follows `python -m torch.distributed.run`: the same job on every process of every machine."""
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
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":") or port
    elif ":" in text:
        host, _, port = text.rpartition(":")
    if (
        not host
        or (":" in host and not text.startswith("["))
        or not port.isdigit()
        or not 0 < int(port) < 65536
    ):
        raise UserMistake(
            f"{text} is no address of a machine",
            why="it is HOST or HOST:PORT, as the other machines reach it",
            fix=f"--main-address 10.0.0.1:{DEFAULT_PORT}",
        )
    return host, int(port)


def combined_exit_code(codes: dict[int, int]) -> int:
    """How a strategy ended whose processes ended so, by rank: by what really happened, not by what followed.

    One that is killed takes the others with it: they fail too, or are asked to stop.
    """
    failed = {rank: code for rank, code in sorted(codes.items()) if code}
    killed = [code for code in failed.values() if code < 0 and code != -15]
    exited = [code for code in failed.values() if code > 0]
    return (killed or exited or list(failed.values()) or [0])[0]


def is_main_process() -> bool:
    """Whether this process is the one that writes. True where there is no other."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End this process. One of a group skips the interpreter's shutdown, which can abort it: a thread of the
    group that drops its last tensor at that moment needs the interpreter."""
    if "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def threads_per_process() -> int | None:
    """A fair share of the cores where several processes share them; None: all."""
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
    from graftwork.train.distributed.zero import ZeroStrategy

    return ZeroStrategy(
        stage=int(settings.strategy[-1]),
        on_cpu=on_cpu,
        offload=settings.offload,
        most=settings.max_grad_norm,
    )


SHARE_VARIABLE = "GRAFT_SHARE_CARD"
"""Set, several processes may share a card, by gloo: to try a strategy out where there is only one."""


def _require_possible(settings: TrainSettings, dtype: str, *, on_cpu: bool) -> None:
    """Say now what could not work later."""
    strategy, is_zero = settings.strategy, settings.strategy in ("zero2", "zero3")
    if not on_cpu and not os.environ.get(SHARE_VARIABLE):
        import torch

        wanted, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if wanted > there:
            raise UserMistake(
                f"{wanted} processes are to share this machine's {there} GPU(s)",
                why="each process needs its own GPU",
                fix=f"set `train.processes: {there}`",
            )
    if dtype == "float16" and is_zero:
        raise UserMistake(
            f"`strategy: {strategy}` does not work with float16 here",
            why="its gradients are scaled by DeepSpeed, out of the reach of our own scaling",
            fix="use `strategy: ddp` or `fsdp` on this device, or `train.precision: float32`",
        )
    if settings.method == "qlora" and strategy in ("fsdp", "zero3"):
        raise UserMistake(
            f"`method: qlora` cannot be cut up by `strategy: {strategy}`",
            why="4-bit weights and their scales must stay together",
            fix="use `strategy: ddp` or `zero2` with qlora, or `method: lora` with this strategy",
        )
    if is_zero and find_spec("deepspeed") is None:
        raise EnvironmentLacks(
            "the package deepspeed is not installed",
            why="`train.strategy` asks for it",
            fix=f"DS_BUILD_OPS=0 {pip_install('deepspeed')}, or use `strategy: fsdp`",
        )
