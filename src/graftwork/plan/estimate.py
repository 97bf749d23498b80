"""The plan of a run: every figure with a range, before anything is loaded. Pure.

In: the shape of the base, the work, the machine, what earlier runs took. Out: a Plan. Does not know
how training is done, only what it costs.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from graftwork.costmodel.cpu_step import (
    lost_states_share,
    seconds_a_token,
    training_memory,
    validation_share,
    with_rows,
)
from graftwork.costmodel.gpu_memory import describe_tuning
from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_step_parts
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import (
    FORWARD_SHARE,
    cpu_seconds,
    forward_rows,
    gpu_seconds,
    passes_of,
    sampling_beyond,
    update_seconds,
    weight_width,
)
from graftwork.costmodel.run import (
    CHECKPOINT_SECONDS,
    VALIDATION_SECONDS,
    recording_seconds,
    start_seconds,
)
from graftwork.costmodel.streamed import describe_streamed
from graftwork.model.shape import describe_experts, total_parameters, trained_by
from graftwork.plan.catalog.hardware import GUESSED_GFLOPS_A_THREAD, default_rates, describe_trade
from graftwork.plan.residuals import ENOUGH_RUNS, correct_memory, pool_runs
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import ELEMENT_BYTES, GIB, Figure
from graftwork.records.plan import (
    Certainty,
    DeviceFacts,
    LearnedMemory,
    Level,
    ModelShape,
    PlainStep,
    Plan,
    StreamedStep,
    Tuning,
    Workload,
)

MEASURED_GFLOPS = 700_000.0
"""Half-precision products of the card that tunings are estimated for where no rates are known."""
CARD_SPREAD: dict[Level, float] = {"guessed": 1.35, "computed": 1.35, "traced": 1.35, "probed": 1.15}
"""Factor, either way, on a card whose rates are known: a run has checkpoints and evaluations besides."""


def tokens_per_second(
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    learned: tuple[float, ...],
    tuning: Tuning | None = None,
    plain: PlainStep | None = None,
    rates: StepRates | None = None,
) -> Figure:
    """From a card's rates or a measured matrix rate, else a guess; pooled with earlier runs of the same kind.

    `rates` are those of this very card: of a probe, or of the catalog.
    """
    prior = _computed_rate(shape, work, device, tuning=tuning, plain=plain, rates=rates)
    if lost := lost_states_share(shape, work) * min(work.epochs / 2, 1.0):
        ends = {name: value / (1 + lost) for name, value in prior.model_dump(exclude={"unit"}).items()}
        prior = Figure(**ends, unit=prior.unit)
    if work.rollouts is not None:
        prior = _with_rollouts(prior, shape, work, device, tuning=tuning, rates=rates)
    pooled = pool_runs(prior, learned)
    if not device.is_busy:
        return pooled
    # Earlier runs may all have met a free machine, or a busy one: this one can be both.
    low, high = min(pooled.low, prior.low), max(pooled.high, prior.high)
    return pooled.model_copy(update={"low": low, "high": high})


def _with_rollouts(
    rate: Figure,
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    tuning: Tuning | None,
    rates: StepRates | None,
) -> Figure:
    """Tokens of all rows a second where a batch is sampled first and its prompts are read once a group."""
    sampling, sampling_when_free = (
        sum(rollout_seconds(shape, work, machine, tuning=tuning, rates=rates).values())
        for machine in (device, device.when_free)
    )
    tokens = sum(work.lengths) * work.epochs
    # Packed passes on a card share nothing.
    training = tokens / rate.value
    if work.rollouts is not None:
        read = forward_rows(work.rollouts, own_step=tuning is not None) * work.rollouts.batches
        training *= 1 + FORWARD_SHARE * read / (len(work.lengths) * work.epochs)
    if device.kind == "cpu":
        a_step = update_seconds(shape, work, gflops=_matrix_rate(device), cores=device.cores)
        training = sum(a_step.values()) * len(work.lengths) / work.batch_size
    value, low = (tokens / (training * rate.value / speed + sampling) for speed in (rate.value, rate.low))
    high = tokens / (training * rate.value / rate.high + sampling_when_free)
    return Figure(value=value, low=low * rate.low / rate.value, high=high, unit=rate.unit)


def _matrix_rate(device: DeviceFacts) -> float:
    return device.gflops or GUESSED_GFLOPS_A_THREAD * device.threads


def rollout_seconds(
    shape: ModelShape, work: Workload, device: DeviceFacts, *, tuning: Tuning | None, rates: StepRates | None
) -> dict[str, float]:
    """Seconds of the whole run that are spent on sampling and rewards."""
    load = work.rollouts
    if load is None:
        return {}
    if device.kind == "cuda":
        known = rates or default_rates()
        parts = gpu_seconds(shape, load, rates=known, weight_bytes=weight_width(tuning))
    else:
        parts = cpu_seconds(shape, load, gflops=_matrix_rate(device))
    return {name: seconds * load.batches for name, seconds in parts.items()}


def _computed_rate(
    shape: ModelShape,
    work: Workload,
    device: DeviceFacts,
    *,
    tuning: Tuning | None,
    plain: PlainStep | None,
    rates: StepRates | None,
) -> Figure:
    """What is expected before any run of this kind was seen."""
    if rates is not None and device.kind == "cuda":
        rate = _card_rate(shape, work, tuning=tuning, plain=plain, rates=rates)
        if rate is not None:
            spread = CARD_SPREAD[rates.certainty]
            return Figure.about(rate, down=1 / spread, up=spread, unit="tokens/s")
    if tuning is not None:
        # Estimated for one card; others are slower in proportion to their matrix products.
        share = (device.gflops or MEASURED_GFLOPS) / MEASURED_GFLOPS
        return Figure.about(share / tuning.seconds_a_token, down=0.6, up=1.25, unit="tokens/s")
    measured = device.gflops is not None
    rate, rate_when_free = (
        1 / sum(seconds_a_token(shape, work, gflops=_matrix_rate(machine), cores=machine.cores).values())
        for machine in (device, device.when_free)
    )
    down, up = (0.55, 1.6) if measured else (0.25, 4.0)
    return Figure(value=rate, low=rate * down, high=max(rate, rate_when_free) * up, unit="tokens/s")


def _card_rate(
    shape: ModelShape, work: Workload, *, tuning: Tuning | None, plain: PlainStep | None, rates: StepRates
) -> float | None:
    """Tokens a second of the step that the run takes on a card."""
    if tuning is None:
        return None if plain is None or plain.seconds_a_token is None else 1 / plain.seconds_a_token
    trained_share = min(work.trained_tokens / sum(work.lengths), 1.0)
    tokens = sum(work.lengths) * work.batch_size / len(work.lengths)
    parts = gpu_step_parts(
        shape,
        tuning,
        TrainedPart(work.adapted_layers, trained_by(shape, work), rates),
        RowStatistics.of(work.lengths, trained_share=trained_share),
        tokens=tokens,
    )
    steps = _steps(work)
    recording = recording_seconds(tuning, layers=shape.layers, steps=steps) / steps
    return tokens / (sum(parts.values()) + recording)


MEMORY_RANGE = (0.85, 1.2)
CARD_MEMORY_RANGE = (0.92, 1.08)
"""Of the plain step on a card, computed tensor by tensor: docs/accuracy.md shows what was found."""
PROCESSOR_MEMORY_RANGE = (0.88, 1.15)
"""Six settings of one base came out between 4 % less and as much; another base may be further off."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a plan is made of."""

    base: str
    base_fingerprint: str
    dataset_hash: str
    shape: ModelShape
    work: Workload
    device: DeviceFacts
    settings: PlanSettings
    train: dict[str, Any]
    dtype: str = "float32"
    learned: tuple[float, ...] = ()
    learned_memory: LearnedMemory | None = None
    tuning: Tuning | None = None
    plain: PlainStep | None = None
    """How the plain step is taken where all rows of a step at once would be too many; on cards always."""
    streamed: StreamedStep | None = None
    """How layers are streamed from host memory; `plain` then has its figures."""
    rates: StepRates | None = None
    """Of this very card: of a probe, or of the catalog."""
    forked: bool = False
    """Whether the process is forked from one that has done its imports."""
    repeated_steps: int | None = None
    """Steps that a rehearsed crash makes the run repeat; None without one."""

    @property
    def memory_limit_gib(self) -> float:
        return self.settings.memory_limit_gib or self.device.memory_gib


def make_plan(inputs: PlanInputs) -> Plan:
    """Say what will happen. With a tuning, memory is what it was tuned to; without one, what earlier runs
    of the same kind took over what was computed for them corrects it."""
    shape, work, device, settings = inputs.shape, inputs.work, inputs.device, inputs.settings
    tuning, plain = inputs.tuning, inputs.plain
    parameters = total_parameters(shape)
    trainable = trained_by(shape, work)
    steps = _steps(work)
    tokens = sum(work.lengths) * work.epochs
    speed = tokens_per_second(
        shape,
        work,
        device,
        learned=inputs.learned,
        tuning=tuning,
        plain=plain,
        rates=inputs.rates,
    )
    parts, computed = _computed_memory(inputs, trainable)
    memory = correct_memory(computed, inputs.learned_memory)
    if tuning is not None:
        # The engine measures, and keeps less where that was too much.
        # What is sampled in between stays where it is while a step is computed.
        value, low, high = (
            gib + tuning.sampling_gib for gib in (tuning.peak_gib, tuning.peak_gib * 0.9, tuning.limit_gib)
        )
        memory = Figure(value=value, low=low, high=high, unit="GiB")
    spent = minutes_by_part(
        shape,
        work,
        speed,
        RunStart(device.kind, tuning=tuning, forked=inputs.forked, repeated_steps=inputs.repeated_steps),
    )
    sampling = sum(rollout_seconds(shape, work, device, tuning=tuning, rates=inputs.rates).values()) / 60
    if sampling:
        # The minutes of steps as those of rollouts and of training.
        share = min(sampling / spent["compute"].value, 0.95)
        spent |= {
            "rollouts": spent["compute"].times(share, "min"),
            "compute": spent["compute"].times(1 - share, "min"),
        }
    minutes = Figure.total(spent.values(), "min")
    fits = not _is_beyond(memory, inputs.memory_limit_gib) and minutes.value <= (
        settings.time_limit_minutes or math.inf
    )
    # The parts of the minutes and, where it is computed here, of the memory.
    by_part = {f"minutes.{name}": figure for name, figure in spent.items()}
    if tuning is None:
        for name, size in parts.items():
            by_part[f"peak_memory_gib.{name}"] = Figure.about(size / GIB, down=0.85, up=1.2, unit="GiB")
        by_part["peak_memory_gib.computed"] = computed
    certainty: Certainty = "learned"
    if len(inputs.learned) < ENOUGH_RUNS:
        probed = device.gflops is not None if inputs.rates is None else inputs.rates.certainty == "probed"
        certainty = "probed" if probed else "computed"
    return Plan(
        base=inputs.base,
        base_fingerprint=inputs.base_fingerprint,
        dataset_hash=inputs.dataset_hash,
        method=work.method,
        dtype=inputs.dtype,
        device=device,
        certainty=certainty,
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
        plain=plain,
        streamed=inputs.streamed,
        prompts_at_once=_prompts_at_once(work),
        train=inputs.train,
        parts=by_part,
        notes=_notes(inputs, parts, memory, minutes),
    )


def _prompts_at_once(work: Workload) -> int | None:
    load = work.rollouts
    if load is None or load.prompts_at_once is None or load.prompts_at_once >= load.prompts:
        return None
    return load.prompts_at_once


def _is_beyond(memory: Figure, limit: float) -> bool:
    """A limit that was divided adds up to itself but for rounding."""
    return memory.high > limit * (1 + 1e-9)


def _computed_memory(inputs: PlanInputs, trainable: int) -> tuple[dict[str, float], Figure]:
    """Bytes by what they are for, and the peak before earlier runs correct it."""
    shape, work, plain = inputs.shape, inputs.work, inputs.plain
    if plain is not None and inputs.device.kind == "cuda":
        down, up = CARD_MEMORY_RANGE
        parts = {name: size * GIB for name, size in plain.parts_gib.items()}
        return parts, Figure.about(plain.peak_gib, down=down, up=up, unit="GiB")
    width = ELEMENT_BYTES[inputs.dtype]
    passes = [
        training_memory(
            shape,
            some if plain is None else with_rows(some, min(plain.micro_rows, some.batch_size)),
            parameters=total_parameters(shape),
            trainable=trainable,
            width=width,
            checkpointed=plain is not None and plain.checkpointed,
        )
        for some in passes_of(work)
    ]
    parts = max(passes, key=lambda parts: sum(parts.values()))
    if work.rollouts is not None:
        parts["rollouts"] = sampling_beyond(shape, work.rollouts, parts, width=width)
    down, up = MEMORY_RANGE if work.processor is None else PROCESSOR_MEMORY_RANGE
    return parts, Figure.about(sum(parts.values()) / GIB, down=down, up=up, unit="GiB")


class RunStart(NamedTuple):
    """How a run begins, and whether it begins twice."""

    kind: str
    tuning: Tuning | None = None
    forked: bool = False
    repeated_steps: int | None = None
    """Steps that a rehearsed crash makes the run repeat; None without one."""


def minutes_by_part(shape: ModelShape, work: Workload, speed: Figure, start: RunStart) -> dict[str, Figure]:
    """Training, and what surrounds it: loading with the loss before, checkpoints, a rehearsed crash, the loss
    after."""
    tokens, kind = sum(work.lengths) * work.epochs, start.kind
    validation = _minutes(work.validation_tokens * validation_share(shape, work), speed)
    starting = start_seconds(
        kind, parameters=total_parameters(shape), tuning=start.tuning, forked=start.forked
    )
    loading = Figure.about(starting / 60, down=0.7, up=2.0, unit="min")
    reference: dict[str, Figure] = {}
    if work.reference_tokens:
        # Preferences: the forward pass over all pairs before training.
        reference["reference"] = _minutes(work.reference_tokens * validation_share(shape, work), speed)
    restarts: dict[str, Figure] = {}
    if start.repeated_steps is not None:
        # A rehearsed crash: starting and recording again, and the steps since the last checkpoint.
        steps, recording = _steps(work), 0.0
        if start.tuning is not None:
            recording = recording_seconds(start.tuning, layers=shape.layers, steps=steps)
        repeated = _minutes(tokens * start.repeated_steps / steps, speed)
        restarts["restarts"] = Figure.total((loading, repeated, _about_minutes(recording)), "min")
    saving = CHECKPOINT_SECONDS[kind] * work.checkpoints / 60
    return {
        "load": Figure.total((loading, validation), "min"),
        **reference,
        "compute": _minutes(tokens, speed),
        "checkpoints": Figure.about(saving, down=0.3, up=3.0, unit="min"),
        **restarts,
        "validation": Figure.total((validation, _about_minutes(VALIDATION_SECONDS[kind])), "min"),
    }


def _steps(work: Workload) -> int:
    return math.ceil(len(work.lengths) / work.batch_size) * work.epochs


def _about_minutes(seconds: float) -> Figure:
    return Figure.about(seconds / 60, down=0.5, up=2.0, unit="min")


def _minutes(tokens: float, speed: Figure) -> Figure:
    return Figure(
        value=tokens / speed.value / 60,
        low=tokens / speed.high / 60,
        high=tokens / speed.low / 60,
        unit="min",
    )


def describe_plain(plain: PlainStep) -> str:
    """How the plain step is taken, for messages."""
    again = ", with activation checkpointing" if plain.checkpointed else ""
    return f"{plain.micro_rows} row{'s' * (plain.micro_rows != 1)} at a time{again}"


BUSY_SHARE = 0.7
"""A measurement that got less of the cores says little about a free machine."""


def _notes(inputs: PlanInputs, parts: dict[str, float], memory: Figure, minutes: Figure) -> tuple[str, ...]:
    """How memory is spent; then which limits the run exceeds."""
    tuning, plain, limit = inputs.tuning, inputs.plain, inputs.memory_limit_gib
    longest = inputs.settings.time_limit_minutes
    shares = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value)
    how = "" if plain is None else f"{describe_plain(plain)}; "
    if inputs.streamed is not None:
        on_host = inputs.streamed.host_gib
        how = describe_streamed(inputs.streamed) + (f", {on_host:.0f} GiB of the host; " if on_host else "; ")
    notes = [f"{how}memory by parts, GiB: {shares}" if tuning is None else describe_tuning(tuning)]
    if tuning is not None and tuning.form != "whole":
        notes.append(describe_trade(tuning.form))
    experts = describe_experts(
        inputs.shape, adapted=inputs.work.experts, four_bits=inputs.work.method == "qlora"
    )
    notes += [] if experts is None else [experts]
    if (together := _prompts_at_once(inputs.work)) is not None and inputs.work.rollouts is not None:
        prompts = inputs.work.rollouts.prompts
        notes.append(f"{together} of {prompts} prompts are answered at a time: all take too much memory")
    if inputs.work.rollouts is not None and inputs.work.rollouts.on_server:
        notes.append("the time in which the server writes its answers is not known here and comes on top")
    device = inputs.device
    if not inputs.learned and device.core_share is not None and device.core_share < BUSY_SHARE:
        notes.append(
            f"the speed was measured with {device.core_share:.0%} of the {device.threads} cores, since other "
            "processes or a quota took the rest: the times are those of such a machine, and the ranges reach "
            "to a free one"
        )
    if _is_beyond(memory, limit):
        notes.append(
            f"it may need {memory.high:.1f} GiB and there are {limit:.1f}: lower `train.batch_size` "
            "or `train.upper_layers`"
        )
    if longest and minutes.value > longest:
        notes.append(
            f"it takes about {minutes.value:.0f} minutes and may take {longest:.0f}: "
            "lower `train.epochs` or `train.max_rows`"
        )
    return tuple(notes)
