"""The crew that the settings ask for, of the processes that torchrun started."""

import os
from typing import TYPE_CHECKING

from graftwork.records.errors import EnvironmentLacks, UserMistake, pip_install
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.crew.crew import DistributedStrategy


def make_strategy(settings: TrainSettings, *, device: str, dtype: str) -> "DistributedStrategy":
    """Meet the others; alone where nobody else was started."""
    from graftwork.train.crew.alone import SingleProcess

    on_cpu = device == "cpu"
    if settings.strategy == "single" or "RANK" not in os.environ:
        return SingleProcess()
    _require_devices(on_cpu=on_cpu)
    if settings.strategy == "ddp":
        from graftwork.train.crew.together import DataParallel

        return DataParallel(on_cpu=on_cpu)
    _require_possible(settings, dtype)
    if settings.strategy == "fsdp":
        from graftwork.train.crew.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(on_cpu=on_cpu, offload=settings.offload)
    from graftwork.train.crew.zero import ZeroStrategy

    _require_deepspeed()
    return ZeroStrategy(
        stage=int(settings.strategy[-1]),
        on_cpu=on_cpu,
        offload=settings.offload,
        most=settings.max_gradient_norm,
    )


def _require_devices(*, on_cpu: bool) -> None:
    if on_cpu:
        return
    import torch

    wanted, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if wanted > there:
        raise UserMistake(
            f"{wanted} processes are to share this machine's {there} GPU(s)",
            why="each process needs a GPU of its own",
            fix=f"set `train.processes: {there}`",
        )


def _require_possible(settings: TrainSettings, dtype: str) -> None:
    """Say now what could not work later."""
    strategy, cut_up = settings.strategy, settings.strategy in ("fsdp", "zero3")
    if dtype == "float16" and strategy in ("zero2", "zero3"):
        raise UserMistake(
            f"`strategy: {strategy}` does not work with float16 here",
            why="its gradients are scaled by DeepSpeed, out of the reach of our own scaling",
            fix="use `strategy: ddp` or `fsdp` on this device, or `train.precision: float32`",
        )
    if settings.method == "qlora" and cut_up:
        raise UserMistake(
            f"`method: qlora` cannot be cut up by `strategy: {settings.strategy}`",
            why="4-bit weights and their scales must stay together",
            fix="use `strategy: ddp` or `zero2` with qlora, or `method: lora` with this strategy",
        )


def _require_deepspeed() -> None:
    from importlib.util import find_spec

    if find_spec("deepspeed") is None:
        raise EnvironmentLacks(
            "the package deepspeed is not installed",
            why="`train.strategy` asks for it",
            fix=f"DS_BUILD_OPS=0 {pip_install('deepspeed')}, or use `strategy: fsdp`",
        )
