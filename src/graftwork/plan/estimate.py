"""The plan of a run: every figure with a range, before anything is loaded. Pure.

In: the shape of the base, the work, the machine, what earlier runs took. Out: a Plan. Does not know
how training is done, only what it costs.
"""

import math
from collections.abc import Iterable
from typing import Any

from graftwork.costmodel.card_memory import describe_tuning
from graftwork.costmodel.processor import training_memory
from graftwork.costmodel.time import StepRates, card_step
from graftwork.model.shape import adapter_parameters, layer_parameters, total_parameters
from graftwork.plan.micro_batches import with_rows
from graftwork.plan.residuals import ENOUGH_RUNS, correct_memory, pool_runs
from graftwork.plan.settings import PlanSettings
from graftwork.records.figure import Figure
from graftwork.records.fit import Level
from graftwork.records.plan import Certainty, DeviceFacts, ModelShape, PlainStep, Plan, Tuning, Workload
from graftwork.records.residual import LearnedMemory
from graftwork.records.units import GIB

LOAD_SECONDS = 10.0
"""Interpreter, libraries, the base and two proofs of it (measured: 11 s with a small base on 2 cores)."""
CHECKPOINT_SECONDS = 0.15
GUESSED_GFLOPS_A_THREAD = 35.0
"""A server core of recent years in fp32, for machines that nobody has measured."""

EFFICIENCY = 0.55
"""Share of the measured matrix rate that a whole training step reaches (measured on CPU)."""
PROCESSOR_EFFICIENCY = 0.67
"""The same of the step that is written for processors (measured: 0.67 learning, 0.71 in frozen blocks)."""

MEASURED_GFLOPS = 700_000.0
"""Half-precision products of the card that tunings are reckoned for where no rates are known."""
CARD_SPREAD: dict[Level, float] = {"computed": 1.35, "traced": 1.35, "probed": 1.15}
"""Factor, either way, on a card whose rates are known. A run has checkpoints and looks between steps."""
FIXED = "beginning and end"


def training_flops(shape: ModelShape, work: Workload) -> float:
    """Operations of the whole run."""
    if work.processor is not None:
        return processor_flops(shape, work)
    return _plain_flops(shape, work)


def _plain_flops(shape: ModelShape, work: Workload) -> float:
    """Forward through all layers; backward through the adapted ones alone, for activations only, since
    their weights are frozen; the head only where a reply token is predicted; what all rows begin with
    once a batch.
    """
    tokens = _read_tokens(work)
    replies = work.trained_tokens * work.epochs
    layer = layer_parameters(shape)
    forward = 2.0 * layer * shape.layers * tokens
    # Frozen weights need no gradient of their own.
    backward = (4.0 if work.method == "full" else 2.0) * layer * work.adapted_layers * tokens
    head = 2 * 2.0 * shape.vocab_size * shape.hidden_size * replies
    scores = _scores(shape, work)
    return forward + backward + head + scores * tokens * (shape.layers + 2 * work.adapted_layers)


def processor_flops(shape: ModelShape, work: Workload) -> float:
    """The processor's step: frozen blocks once a row and not once an epoch where their output is kept; the
    last block beyond keys and values only where a reply is predicted; the adapters beside the weights."""
    own = work.processor
    tokens, layer = _read_tokens(work), layer_parameters(shape)
    replies = work.trained_tokens * work.epochs
    frozen = shape.layers - work.adapted_layers
    kept = own is not None and own.kept != "nowhere"
    trunk_tokens = own.distinct_tokens + work.shared_tokens if own is not None and kept else tokens
    scores = _scores(shape, work)
    trunk = trunk_tokens * frozen * (2.0 * layer + scores)
    grafted = adapter_parameters(shape, rank=work.rank, targets=work.targets, layers=1, ranks=work.ranks)
    # Forward and back through frozen weights; an adapter has its own gradient besides.
    block = 4.0 * layer + 6.0 * grafted + 3.0 * scores
    entered = 4.0 * 2 * shape.hidden_size * shape.kv_heads * shape.head_dim
    above = tokens * ((work.adapted_layers - 1) * block + entered) + replies * block
    head = 4.0 * shape.vocab_size * shape.hidden_size * replies
    return trunk + above + head


def validation_share(shape: ModelShape, work: Workload) -> float:
    """Of a trained token's time, what reading one without learning takes: all blocks, once, forward."""
    if work.processor is None:
        return 0.5
    replies = work.trained_tokens / sum(work.lengths)
    read = shape.layers * (2.0 * layer_parameters(shape) + _scores(shape, work))
    read += 2.0 * shape.vocab_size * shape.hidden_size * replies
    return read * sum(work.lengths) * work.epochs / training_flops(shape, work)


def _read_tokens(work: Workload) -> float:
    """Tokens of a run, the common beginning once a batch."""
    rows = len(work.lengths)
    batches = math.ceil(rows / work.batch_rows)
    return float((sum(work.lengths) - work.shared_tokens * (rows - batches)) * work.epochs)


def _scores(shape: ModelShape, work: Workload) -> float:
    """Operations of one token's attention in one block."""
    mean_length = sum(work.lengths) / len(work.lengths)
    return 4.0 * mean_length * shape.heads * shape.head_dim


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
    return pool_runs(prior, learned)


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
        # Reckoned for one card; others are as much slower as their products are.
        share = (device.gflops or MEASURED_GFLOPS) / MEASURED_GFLOPS
        return Figure.about(share / tuning.seconds_a_token, down=0.6, up=1.25, unit="tokens/s")
    flops_a_token = training_flops(shape, work) / (sum(work.lengths) * work.epochs)
    efficiency = EFFICIENCY if work.processor is None else PROCESSOR_EFFICIENCY
    if device.gflops is not None:
        rate = device.gflops * 1e9 * efficiency / flops_a_token
        return Figure.about(rate, down=0.55, up=1.6, unit="tokens/s")
    rate = GUESSED_GFLOPS_A_THREAD * 1e9 * device.threads * efficiency / flops_a_token
    return Figure.about(rate, down=0.25, up=4.0, unit="tokens/s")


def _card_rate(
    shape: ModelShape, work: Workload, *, tuning: Tuning | None, plain: PlainStep | None, rates: StepRates
) -> float | None:
    """Tokens a second of the step that the run takes on a card."""
    if tuning is None:
        return None if plain is None or plain.seconds_a_token is None else 1 / plain.seconds_a_token
    total = sum(work.lengths)
    step = card_step(
        shape,
        tuning,
        adapted=work.adapted_layers,
        trainable=adapter_parameters(
            shape, rank=work.rank, targets=work.targets, layers=work.adapted_layers, ranks=work.ranks
        ),
        rates=rates,
        # Of the row that a token is in, not of all rows.
        mean_length=sum(length * length for length in work.lengths) / total,
        trained_share=min(work.trained_tokens / total, 1.0),
        uneven=min(work.lengths) < max(work.lengths),
    )
    tokens = total * work.batch_rows / len(work.lengths)
    fixed = step.parts.get(FIXED, 0.0)
    # The last pass of a step is seldom full: its tokens count, its beginning and end too.
    passes = max(math.ceil(tokens / tuning.micro_tokens), 1)
    seconds = (sum(step.parts.values()) - fixed) * tokens / tuning.micro_tokens + fixed * passes
    return tokens / (seconds + sum(step.once_a_step.values()))


BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MEMORY_RANGE = (0.85, 1.2)
CARD_MEMORY_RANGE = (0.92, 1.08)
"""Of the plain step on a card, reckoned to the tensor: docs/accuracy.md shows what was found."""
PROCESSOR_MEMORY_RANGE = (0.88, 1.15)
"""Six settings of one base came out between 4 % less and as much; another base may lie further off."""


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
    learned_memory: LearnedMemory | None = None,
    tuning: Tuning | None = None,
    plain: PlainStep | None = None,
    rates: StepRates | None = None,
) -> Plan:
    """Say what will happen. With a tuning, memory is what it was tuned to; without one, what earlier runs
    of the same kind took over what was reckoned for them corrects it. `plain` says how the plain step is
    taken where all rows of a step at once would be too many; on cards always. `rates` are this card's."""
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
    speed = tokens_per_second(shape, work, device, learned=learned, tuning=tuning, plain=plain, rates=rates)
    parts = _memory_parts(shape, work, trainable=trainable, dtype=dtype, device=device, plain=plain)
    computed = _computed(parts, work, device=device, plain=plain)
    memory = correct_memory(computed, learned_memory)
    if tuning is not None:
        # The engine measures, and keeps less where that was too much.
        memory = Figure(value=tuning.peak_gib, low=tuning.peak_gib * 0.9, high=tuning.limit_gib, unit="GiB")
    spent = minutes_by_part(shape, work, speed)
    minutes = _add_up(spent.values(), unit="min")
    limit = settings.memory_limit_gib or device.memory_gib
    fits = memory.high <= limit and minutes.value <= (settings.time_limit_minutes or math.inf)
    return Plan(
        base=base,
        base_fingerprint=base_fingerprint,
        dataset_hash=dataset_hash,
        method=work.method,
        dtype=dtype,
        device=device,
        certainty=_certainty(device, learned, rates),
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
        train=train,
        parts=_parts(parts, spent, computed, tuning=tuning),
        notes=_notes(parts, memory, minutes, limit=limit, settings=settings, tuning=tuning, plain=plain),
    )


def _memory_parts(
    shape: ModelShape,
    work: Workload,
    *,
    trainable: int,
    dtype: str,
    device: DeviceFacts,
    plain: PlainStep | None,
) -> dict[str, float]:
    """Bytes by what they are for."""
    if plain is not None and device.kind == "cuda":
        return {name: size * GIB for name, size in plain.parts_gib.items()}
    parts = training_memory(
        shape,
        work if plain is None else with_rows(work, plain.micro_rows),
        parameters=total_parameters(shape),
        trainable=trainable,
        width=BYTES[dtype],
        checkpointed=plain is not None and plain.checkpointed,
    )
    return {name: float(size) for name, size in parts.model_dump().items()}


def _computed(
    parts: dict[str, float], work: Workload, *, device: DeviceFacts, plain: PlainStep | None
) -> Figure:
    """The peak before earlier runs correct it."""
    if plain is not None and device.kind == "cuda":
        down, up = CARD_MEMORY_RANGE
        return Figure.about(plain.peak_gib, down=down, up=up, unit="GiB")
    down, up = MEMORY_RANGE if work.processor is None else PROCESSOR_MEMORY_RANGE
    return Figure.about(sum(parts.values()) / GIB, down=down, up=up, unit="GiB")


def minutes_by_part(shape: ModelShape, work: Workload, speed: Figure) -> dict[str, Figure]:
    """Training, and what stands around it: loading with the loss before, checkpoints, the loss after."""
    tokens = sum(work.lengths) * work.epochs
    validation = _minutes(work.validation_tokens * validation_share(shape, work), speed)
    loading = Figure.about(LOAD_SECONDS / 60, down=0.7, up=2.0, unit="min")
    return {
        "load": _add_up((loading, validation), unit="min"),
        "compute": _minutes(tokens, speed),
        "checkpoints": Figure.about(CHECKPOINT_SECONDS * work.checkpoints / 60, down=0.3, up=3.0, unit="min"),
        "validation": validation,
    }


def _minutes(tokens: float, speed: Figure) -> Figure:
    return Figure(
        value=tokens / speed.value / 60,
        low=tokens / speed.high / 60,
        high=tokens / speed.low / 60,
        unit="min",
    )


def _add_up(figures: Iterable[Figure], *, unit: str) -> Figure:
    """Figures that move together: the ends of their ranges add up too."""
    members = tuple(figures)
    return Figure(
        value=sum(one.value for one in members),
        low=sum(one.low for one in members),
        high=sum(one.high for one in members),
        unit=unit,
    )


def _parts(
    parts: dict[str, float], spent: dict[str, Figure], computed: Figure, *, tuning: Tuning | None
) -> dict[str, Figure]:
    """What minutes and, where it is reckoned here, memory are made of."""
    found = {f"minutes.{name}": figure for name, figure in spent.items()}
    if tuning is not None:
        return found
    for name, size in parts.items():
        found[f"peak_memory_gib.{name}"] = Figure.about(size / GIB, down=0.85, up=1.2, unit="GiB")
    return {**found, "peak_memory_gib.computed": computed}


def _certainty(device: DeviceFacts, learned: tuple[float, ...], rates: StepRates | None) -> Certainty:
    if len(learned) >= ENOUGH_RUNS:
        return "learned"
    if rates is not None:
        return "probed" if rates.certainty == "probed" else "computed"
    return "probed" if device.gflops is not None else "computed"


def describe_plain(plain: PlainStep) -> str:
    """How the plain step is taken, in a few words."""
    again = ", blocks compute again on the way back" if plain.checkpointed else ""
    return f"{plain.micro_rows} row{'s' * (plain.micro_rows != 1)} at a time{again}"


def _notes(
    parts: dict[str, float],
    memory: Figure,
    minutes: Figure,
    *,
    limit: float,
    settings: PlanSettings,
    tuning: Tuning | None,
    plain: PlainStep | None,
) -> tuple[str, ...]:
    """How memory is spent; then what stands against the run."""
    shares = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value)
    how = "" if plain is None else f"{describe_plain(plain)}; "
    notes = [f"{how}memory by parts, GiB: {shares}" if tuning is None else describe_tuning(tuning)]
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
