"""Chooses the engine and precision of a run: the GPU step, the CPU step, or the eager one for any decoder.

Input: a job, a loaded base with what is trained of it, its rows. Output: an engine that is ready for its
first step. All engines compute the same loss. Choosing needs no torch; a chosen engine is imported when it is
made.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from graftwork.costmodel.gpu_tuning import describe_tuning
from graftwork.costmodel.run import why_plain
from graftwork.costmodel.streamed import describe_streamed
from graftwork.files.disk import read_or_empty
from graftwork.model.shape import describe_experts, read_shape
from graftwork.records.dataset import Row
from graftwork.records.plan import ModelShape, Plan, Precision
from graftwork.records.run import TrainJob
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from graftwork.train.distributed.strategies import SingleProcess
    from graftwork.train.engine import TrainingEngine
    from graftwork.train.loss import Logits, TokenBatch


def make_engine(
    job: TrainJob,
    settings: TrainSettings,
    model: Any,
    parameters: "Sequence[nn.Parameter]",
    rows: Sequence[Row],
    *,
    strategy: "SingleProcess",
    progress: Callable[..., None],
) -> tuple["TrainingEngine", list[str]]:
    """The engine for a loaded base and the rows of the run, and a note for users. A run that shares its steps
    with others trains eagerly.
    """
    plan, shape = job.plan, read_shape(Path(job.base_folder))
    experts = describe_experts(shape, adapted=settings.experts, four_bits=settings.method == "qlora")
    notes = [] if experts is None else [experts]
    # What an earlier attempt had to change takes precedence over the plan.
    micro_rows = plan.train.get("micro_rows")
    if plan.tuning is not None and not strategy.shares_steps:
        from graftwork.train.gpu.engine import GpuEngine
        from graftwork.train.gpu.load import frozen_weights_of

        packed = GpuEngine(
            model,
            parameters,
            settings=settings,
            frozen=frozen_weights_of(model),
            tuning=plan.tuning,
            shape=shape,
            progress=progress,
        )
        started_at = time.perf_counter()
        description = describe_tuning(packed.settle(rows))
        done = "compiled and measured" if packed.tuning.compiled else "measured"
        notes.append(f"{description}; {done} in {time.perf_counter() - started_at:.0f} s")
        return packed, notes
    if plan.streamed is not None:
        from graftwork.train.streamed.engine import StreamedEngine

        started_at = time.perf_counter()
        streamed = StreamedEngine(
            model,
            parameters,
            settings=settings,
            step=plan.streamed.model_copy(update={"micro_rows": micro_rows or plan.streamed.micro_rows}),
            device=plan.device.kind,
            progress=progress,
        )
        notes.append(
            f"{describe_streamed(streamed.step)}; set up in {time.perf_counter() - started_at:.0f} s"
        )
        return streamed, notes
    from graftwork.train.cpu.step import make_cpu_step
    from graftwork.train.engine import StepOptions, TrainingEngine

    checkpointed = settings.gradient_checkpointing == "on"
    if settings.gradient_checkpointing == "auto":
        checkpointed = plan.plain is not None and plan.plain.checkpointed
    logits = None if strategy.shares_steps else autocast_logits(model, settings, dtype=plan.dtype)
    on_cpu = plan.device.kind == "cpu" and not strategy.shares_steps
    if on_cpu and why_plain_step(settings, shape, device="cpu", precision=plan.dtype) is None:
        cpu_step, description = make_cpu_step(
            model, rows, settings=settings, shape=shape, folder=Path(job.folder)
        )
        notes.append(description)
        logits = cpu_step.logits
    engine = TrainingEngine(
        model,
        parameters,
        settings=settings,
        strategy=strategy,
        progress=progress,
        step=StepOptions(
            micro_rows=micro_rows or (plan.plain.micro_rows if plan.plain else None),
            activation_checkpointing=checkpointed and not strategy.shares_steps,
            logits=logits,
        ),
    )
    return engine, notes


def streams_layers(settings: TrainSettings) -> bool:
    """Return whether the layers of a run are streamed from host memory: full fine-tuning with offload,
    in one process."""
    return settings.method == "full" and settings.offload and settings.strategy == "single"


def starts_on_host(plan: Plan, settings: TrainSettings) -> bool:
    """Whether the weights are read into host memory first, from where the engine moves them to the device."""
    return settings.strategy in ("fsdp", "zero3") or plan.tuning is not None or plan.streamed is not None


def autocast_logits(model: Any, settings: TrainSettings, *, dtype: str) -> "Logits | None":
    """Full fine-tuning in mixed precision: weights stay in float32, products run in bfloat16.

    Only bfloat16, whose range is that of float32, so that no gradient underflows.
    """
    if settings.method != "full" or settings.strategy != "single" or dtype != "bfloat16":
        return None
    import torch

    from graftwork.train.loss import eager_logits

    kind = next(model.parameters()).device.type

    def logits(batch: "TokenBatch") -> "Tensor":
        with torch.autocast(kind, dtype=torch.bfloat16):
            return eager_logits(model, batch)

    return logits


def why_plain_step(
    settings: TrainSettings,
    shape: ModelShape,
    *,
    device: Literal["cpu", "cuda"],
    precision: str,
    capability: float | None = None,
) -> str | None:
    """Why a run of these settings takes the plain step; None if it takes graft's own."""
    if device == "cuda" and settings.packing == "off":
        return "packing is off"
    if device == "cpu" and settings.gradient_checkpointing == "on":
        return "only the plain step checkpoints activations"
    return why_plain(
        shape,
        device=device,
        method=settings.method,
        precision=precision,
        devices=1 if settings.strategy == "single" else 2,
        capability=capability,
    )


FIRST_WITH_BFLOAT16 = 8.0
"""Compute capability of Ampere."""

CPUINFO = Path("/proc/cpuinfo")


def choose_precision(
    requested: str, *, kind: Literal["cpu", "cuda"], amx: bool = False, capability: float | None = None
) -> Precision:
    """Choose the precision. Pure. A GPU of unknown age is treated as an old one: float16 works on all of
    them.
    """
    if requested != "auto":
        return cast("Precision", requested)
    if kind == "cuda":
        return "bfloat16" if (capability or 0) >= FIRST_WITH_BFLOAT16 else "float16"
    return "bfloat16" if amx else "float32"


def has_amx_here() -> bool:
    """Whether this machine's CPUs have matrix units for bfloat16."""
    return has_amx(read_or_empty(CPUINFO))


def has_amx(cpuinfo: str) -> bool:
    """Whether all CPUs have matrix units for bfloat16."""
    flags = [line.split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return bool(flags) and all("amx_bf16" in features and "amx_tile" in features for features in flags)
