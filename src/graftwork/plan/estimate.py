"""The plan of a run: every figure with a range, before anything is loaded. Pure.

In: the shape of the base, the work, the machine, what earlier runs took. Out: a Plan. Does not know
how training is done, only what it costs.
"""

import math
from typing import Any

from graftwork.model.shape import adapter_parameters, total_parameters
from graftwork.model.step_memory import describe_tuning
from graftwork.plan.memory import MemoryParts, training_memory
from graftwork.plan.settings import PlanSettings
from graftwork.plan.speed import CHECKPOINT_SECONDS, LOAD_SECONDS, tokens_per_second
from graftwork.records.figure import Figure
from graftwork.records.plan import Certainty, DeviceFacts, ModelShape, Plan, Tuning, Workload

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB = 2**30


def make_plan(
    *,
    base: str,
    base_fingerprint: str,
    dataset_hash: str,
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    settings: PlanSettings,
    train: dict[str, Any],
    dtype: str = "float32",
    learned: tuple[float, ...] = (),
    tuning: Tuning | None = None,
) -> Plan:
    """Say what will happen. With a tuning, memory is what it was tuned to."""
    parameters = total_parameters(shape)
    trainable = adapter_parameters(
        shape,
        rank=work.rank,
        targets=work.targets,
        layers=work.adapted_layers,
        ranks=work.ranks,
        method=work.method,
    )
    steps = math.ceil(len(work.lengths) / work.batch_rows) * work.epochs
    tokens = sum(work.lengths) * work.epochs
    speed = tokens_per_second(shape, work, device, learned=learned, tuning=tuning)
    parts = training_memory(shape, work, parameters=parameters, trainable=trainable, width=BYTES[dtype])
    memory = Figure.about(parts.total / GIB, down=0.85, up=1.2, unit="GiB")
    if tuning is not None:
        # The engine measures, and keeps less where that was too much.
        memory = Figure(value=tuning.peak_gib, low=tuning.peak_gib * 0.9, high=tuning.limit_gib, unit="GiB")
    minutes = _minutes(work, tokens, speed)
    limit = settings.memory_limit_gib or device.memory_gib
    fits = memory.high <= limit and minutes.value <= (settings.time_limit_minutes or math.inf)
    return Plan(
        base=base,
        base_fingerprint=base_fingerprint,
        dataset_hash=dataset_hash,
        method=work.method,
        dtype=dtype,
        device=device,
        certainty=_certainty(device, learned),
        total_parameters=Figure.exact(parameters),
        trainable_parameters=Figure.exact(trainable),
        peak_memory_gib=memory,
        disk_gib=Figure.about(5 * 4 * trainable * 3 / GIB, down=0.5, up=2.0, unit="GiB"),
        tokens=Figure.exact(tokens, "tokens"),
        trained_tokens=Figure.exact(work.trained_tokens * work.epochs, "tokens"),
        steps=Figure.exact(steps, "steps"),
        tokens_per_second=speed,
        minutes=minutes,
        fits=fits,
        tuning=tuning,
        train=train,
        notes=_notes(parts, memory, minutes, limit=limit, settings=settings, tuning=tuning),
    )


def _minutes(work: Workload, tokens: int, speed: Figure) -> Figure:
    """Training, and what stands around it: loading, two validations, checkpoints."""
    fixed = LOAD_SECONDS + CHECKPOINT_SECONDS * work.checkpoints

    def seconds(rate: float) -> float:
        # Forward alone costs about half a training step; validation runs twice.
        return (tokens + 2 * work.validation_tokens * 0.5) / rate + fixed

    return Figure(
        value=seconds(speed.value) / 60,
        low=seconds(speed.high) / 60,
        high=seconds(speed.low) / 60,
        unit="min",
    )


def _certainty(device: DeviceFacts, learned: tuple[float, ...]) -> Certainty:
    if learned:
        return "learned"
    return "probed" if device.gflops is not None else "computed"


def _notes(
    parts: MemoryParts,
    memory: Figure,
    minutes: Figure,
    *,
    limit: float,
    settings: PlanSettings,
    tuning: Tuning | None,
) -> tuple[str, ...]:
    """How memory is spent; then what stands against the run."""
    shares = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.model_dump().items())
    notes = [f"memory by parts, GiB: {shares}" if tuning is None else describe_tuning(tuning)]
    if memory.high > limit:
        notes.append(
            f"it may need {memory.high:.1f} GiB and there are {limit:.1f}: lower `train.batch_rows` "
            "or `train.upper_layers`"
        )
    if settings.time_limit_minutes and minutes.value > settings.time_limit_minutes:
        notes.append(
            f"it takes about {minutes.value:.0f} minutes and may take {settings.time_limit_minutes:.0f}: "
            "lower `train.epochs` or `train.max_rows`"
        )
    return tuple(notes)
