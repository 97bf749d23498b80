"""Which engine trains a run: the card's, the processor's, or the plain one that knows every decoder.

In: a job, a loaded base with what is to be learned, its rows. Out: an engine that is ready for its first
step, and a word about how it will work. All of them come to the same loss.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from graftwork.model.shape import read_shape
from graftwork.model.step_memory import describe_tuning
from graftwork.records.dataset import Row
from graftwork.records.plan import PlainStep, Tuning
from graftwork.records.run import TrainJob
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import nn

    from graftwork.train.distributed.strategies import DistributedStrategy
    from graftwork.train.engine import TrainingEngine

if TYPE_CHECKING:
    from torch import Tensor

    from graftwork.train.loss import TokenBatch


def make_engine(
    job: TrainJob,
    model: Any,
    learned: "Sequence[nn.Parameter]",
    rows: Sequence[Row],
    *,
    settings: TrainSettings,
    crew: "DistributedStrategy",
    shares: bool,
    pulse: Callable[..., None],
    say: Callable[[str], None],
) -> "TrainingEngine":
    """`shares` says that this run shares its steps with others: then only the plain way will do."""
    if job.plan.tuning is not None and not shares:
        return _on_card(job, job.plan.tuning, model, learned, rows, settings=settings, pulse=pulse, say=say)
    from graftwork.train.engine import TrainingEngine

    planned = job.plan.plain
    return TrainingEngine(
        model,
        learned,
        settings=settings,
        loss=None if shares else _own_loss(job, model, rows, settings, say),
        crew=crew,
        pulse=pulse,
        # What an earlier attempt had to change, before what was planned.
        micro_rows=job.plan.train.get("micro_rows") or (planned.micro_rows if planned else None),
        checkpointing=not shares and _computes_again(settings, planned),
    )


def _computes_again(settings: TrainSettings, planned: PlainStep | None) -> bool:
    """Whether blocks keep only their input: as asked for, else as the plan found it to be needed."""
    if settings.checkpointing == "auto":
        return planned is not None and planned.checkpointed
    return settings.checkpointing == "on"


def _on_card(
    job: TrainJob,
    tuning: Tuning,
    model: Any,
    learned: "Sequence[nn.Parameter]",
    rows: Sequence[Row],
    *,
    settings: TrainSettings,
    pulse: Callable[..., None],
    say: Callable[[str], None],
) -> "TrainingEngine":
    from graftwork.train.gpu.engine import GpuEngine
    from graftwork.train.gpu.load import frozen_weights_of

    engine = GpuEngine(
        model,
        learned,
        settings=settings,
        furnished=frozen_weights_of(model),
        tuning=tuning,
        shape=read_shape(Path(job.base_folder)),
        pulse=pulse,
    )
    begun = time.perf_counter()
    word = describe_tuning(engine.settle(rows))
    done = "compiled and measured" if engine.tuning.compiled else "measured"
    say(f"{word}; {done} in {time.perf_counter() - begun:.0f} s")
    return engine


def _own_loss(
    job: TrainJob,
    model: Any,
    rows: Sequence[Row],
    settings: TrainSettings,
    say: Callable[[str], None],
) -> Any:
    """A faster way to the same loss, where there is one for this model and device."""
    from graftwork.train.cpu.step import make_cpu_step

    if settings.strategy != "single":
        # The written-out ways read weights that a crew may hold in parts.
        return None
    # Where blocks are asked to compute again, it is the plain way that does so.
    again = settings.checkpointing == "on"
    way = None if again else make_cpu_step(model, rows, settings=settings, folder=Path(job.folder))
    if way is None:
        return mixed_loss(model, settings, dtype=job.plan.dtype)
    say(way[1])
    return way[0].summed_loss


def mixed_loss(model: Any, settings: TrainSettings, *, dtype: str) -> "Callable[[TokenBatch], Tensor] | None":
    if settings.method != "full" or settings.strategy != "single" or dtype != "bfloat16":
        return None
    import torch

    from graftwork.train.loss import summed_loss

    kind = next(model.parameters()).device.type

    def loss(batch: "TokenBatch") -> "Tensor":
        with torch.autocast(kind, dtype=torch.bfloat16):
            return summed_loss(model, batch)

    return loss


GPU_STEP_FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
LEAST_CAPABILITY = 8.0
"""Ampere: bfloat16, and attention over rows of different lengths."""


def why_eager(settings: TrainSettings, config: Mapping[str, Any], *, capability: float | None) -> str | None:
    """Why a run does not take the written-out step; None if it does."""
    if capability is None or capability < LEAST_CAPABILITY:
        return "the card is older than Ampere"
    if settings.method not in ("lora", "qlora"):
        return f"method {settings.method} is trained on the plain path"
    if settings.strategy != "single":
        return "several devices share the run"
    if settings.precision not in ("auto", "bfloat16"):
        return f"it works in bfloat16, not in {settings.precision}"
    if settings.packing == "off":
        return "packing is off"
    return why_unsupported(config)


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why this model's blocks are not those that are written out; None if they are."""
    family = config.get("model_type")
    if family not in GPU_STEP_FAMILIES:
        return f"its blocks are of the family {family}, which are not written out"
    if config.get("hidden_act", "silu") != "silu":
        return f"its gate is {config['hidden_act']}, not silu"
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return "some of its blocks attend through a sliding window"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return "it attends through a sliding window"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) in ("dynamic", "longrope"):
        return "its rotary positions depend on the length of a batch"
    widths = (config["hidden_size"], config["intermediate_size"])
    return None if all(width % 64 == 0 for width in widths) else "its widths are no multiples of 64"


Precision = Literal["float32", "bfloat16", "float16"]

FIRST_WITH_BFLOAT16 = 8.0
"""Compute capability of Ampere."""

CPUINFO = Path("/proc/cpuinfo")


def choose_precision(
    asked: str, *, kind: Literal["cpu", "cuda"], amx: bool = False, capability: float | None = None
) -> Precision:
    """Pure. A card of unknown age is taken for an old one: float16 works on all of them."""
    if asked != "auto":
        return cast(Precision, asked)
    if kind == "cuda":
        return "bfloat16" if (capability or 0) >= FIRST_WITH_BFLOAT16 else "float16"
    return "bfloat16" if amx else "float32"


def has_amx_here() -> bool:
    """Whether this machine's processors have matrix units for bfloat16."""
    return has_amx(_read(CPUINFO))


def has_amx(cpuinfo: str) -> bool:
    """Whether all processors have matrix units for bfloat16."""
    flags = [line.split() for line in cpuinfo.splitlines() if line.startswith("flags")]
    return bool(flags) and all("amx_bf16" in words and "amx_tile" in words for words in flags)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
