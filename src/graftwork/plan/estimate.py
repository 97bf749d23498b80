"""The plan of a run: every figure with a range, before anything is loaded; and how far it was off. Pure.

Input: the shape of the base, the work, the machine, what earlier runs took; a plan and what came of it.
Output: a Plan; residuals by figure and by part, drifts that name their cause, the bias of each kind of
figure, and the factor by which the next plan corrects its memory. Does not know how training is done, only
what it costs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from graftwork.costmodel.cpu_step import (
    lost_states_share,
    seconds_per_token,
    training_memory,
    validation_share,
    with_rows,
)
from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_step_parts
from graftwork.costmodel.gpu_tuning import describe_tuning
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
    START_SECONDS,
    VALIDATION_SECONDS,
    recording_seconds,
    start_seconds,
)
from graftwork.costmodel.streamed import describe_streamed
from graftwork.model.shape import describe_experts, total_parameters, trained_by
from graftwork.plan.catalog.hardware import GUESSED_GFLOPS_PER_THREAD, default_rates, describe_trade
from graftwork.plan.settings import PlanSettings
from graftwork.records.base import ELEMENT_BYTES, GIB, Figure
from graftwork.records.plan import (
    Bias,
    Certainty,
    DeviceFacts,
    Drift,
    Level,
    ModelShape,
    PlainStep,
    Plan,
    Residual,
    RunParts,
    StreamedStep,
    Tuning,
    Workload,
)
from graftwork.records.run import TrainOutcome

MEMORY, TIME, SPEED = "peak_memory_gib", "minutes", "tokens_per_second"
COMPUTED = f"{MEMORY}.computed"
LOADED, STEP_PEAK = "what is loaded", "what a step needs"
GROUPS = {
    LOADED: ("context", "runtime", "weights", "packed", "adapter", "adapters"),
    STEP_PEAK: ("gradients", "optimizer", "states", "activations", "logits", "workspace"),
}
"""A run reports its memory before the first step and at its peak; planned parts are grouped likewise."""
WAITING, COMPUTE, ROLLOUTS = "waiting for data", "compute", "rollouts"
MEASURED_GFLOPS = 700_000.0
"""Half-precision rate of the GPU that tunings are estimated for if no rates are known."""
GPU_SPREAD: dict[Level, float] = {"guessed": 1.35, "computed": 1.35, "traced": 1.35, "probed": 1.15}
"""Factor, either way, on a GPU with known rates: a run also has checkpoints and evaluations."""


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
    """From a GPU's rates or a measured matrix rate, else a guess; pooled with earlier runs of the same kind.

    `rates` are those of this very GPU: of a probe, or of the catalog.
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
    """Tokens of all rows per second if a batch is sampled first and its prompts are read once per group."""
    sampling, sampling_when_free = (
        sum(rollout_seconds(shape, work, machine, tuning=tuning, rates=rates).values())
        for machine in (device, device.when_free)
    )
    tokens = sum(work.lengths) * work.epochs
    # Packed passes on a GPU share nothing.
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
    return device.gflops or GUESSED_GFLOPS_PER_THREAD * device.threads


def rollout_seconds(
    shape: ModelShape, work: Workload, device: DeviceFacts, *, tuning: Tuning | None, rates: StepRates | None
) -> dict[str, float]:
    """Seconds of the whole run for sampling and rewards."""
    load = work.rollouts
    if load is None:
        return {}
    if device.kind == "cuda":
        gpu_rates = rates or default_rates()
        parts = gpu_seconds(shape, load, rates=gpu_rates, weight_bytes=weight_width(tuning))
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
    """Expected rate before any run of this kind."""
    if rates is not None and device.kind == "cuda":
        rate = _gpu_rate(shape, work, tuning=tuning, plain=plain, rates=rates)
        if rate is not None:
            spread = GPU_SPREAD[rates.certainty]
            return Figure.about(rate, down=1 / spread, up=spread, unit="tokens/s")
    if tuning is not None:
        # Estimated for one GPU; others are slower in proportion to their matrix products.
        share = (device.gflops or MEASURED_GFLOPS) / MEASURED_GFLOPS
        return Figure.about(share / tuning.seconds_per_token, down=0.6, up=1.25, unit="tokens/s")
    measured = device.gflops is not None
    rate, rate_when_free = (
        1 / sum(seconds_per_token(shape, work, gflops=_matrix_rate(machine), cores=machine.cores).values())
        for machine in (device, device.when_free)
    )
    down, up = (0.55, 1.6) if measured else (0.25, 4.0)
    return Figure(value=rate, low=rate * down, high=max(rate, rate_when_free) * up, unit="tokens/s")


def _gpu_rate(
    shape: ModelShape, work: Workload, *, tuning: Tuning | None, plain: PlainStep | None, rates: StepRates
) -> float | None:
    """Tokens per second of the run's step on a GPU."""
    if tuning is None:
        return None if plain is None or plain.seconds_per_token is None else 1 / plain.seconds_per_token
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
GPU_MEMORY_RANGE = (0.92, 1.08)
"""Range of the plain step's memory on a GPU, computed tensor by tensor: see docs/accuracy.md."""
CPU_MEMORY_RANGE = (0.88, 1.15)
"""Six settings of one base were between 4 % below the estimate and exact; another base may differ more."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Inputs of a plan."""

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
    learned_memory: Figure | None = None
    tuning: Tuning | None = None
    plain: PlainStep | None = None
    """Setup of the plain step if all rows of a step at once would not fit; on GPUs always."""
    streamed: StreamedStep | None = None
    """How layers are streamed from host memory; `plain` then has its figures."""
    rates: StepRates | None = None
    """Rates of this GPU, from a probe or from the catalog."""
    forked: bool = False
    """Whether the process is forked from one that has done its imports."""
    repeated_steps: int | None = None
    """Steps that a rehearsed crash makes the run repeat; None without one."""

    @property
    def memory_limit_gib(self) -> float:
        return self.settings.memory_limit_gib or self.device.memory_gib


def make_plan(inputs: PlanInputs) -> Plan:
    """Make the plan. With a tuning, memory is what it was tuned to; without one, it is corrected by earlier
    runs of the same kind.
    """
    shape, work, device = inputs.shape, inputs.work, inputs.device
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
        share = min(sampling / spent[COMPUTE].value, 0.95)
        spent |= {
            ROLLOUTS: spent[COMPUTE].times(share, "min"),
            COMPUTE: spent[COMPUTE].times(1 - share, "min"),
        }
    minutes = Figure.total(spent.values(), "min")
    fits = not _is_beyond(memory, inputs.memory_limit_gib)
    # The parts of the minutes and, where it is computed here, of the memory.
    by_part = {f"{TIME}.{name}": figure for name, figure in spent.items()}
    if tuning is None:
        for name, size in parts.items():
            by_part[f"{MEMORY}.{name}"] = Figure.about(size / GIB, down=0.85, up=1.2, unit="GiB")
        by_part[COMPUTED] = computed
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
    """Return whether the total exceeds the limit by more than rounding."""
    return memory.high > limit * (1 + 1e-9)


def _computed_memory(inputs: PlanInputs, trainable: int) -> tuple[dict[str, float], Figure]:
    """Bytes by purpose, and the peak before the correction by earlier runs."""
    shape, work, plain = inputs.shape, inputs.work, inputs.plain
    if plain is not None and inputs.device.kind == "cuda":
        down, up = GPU_MEMORY_RANGE
        parts = {name: size * GIB for name, size in plain.parts_gib.items()}
        return parts, Figure.about(plain.peak_gib, down=down, up=up, unit="GiB")
    width = ELEMENT_BYTES[inputs.dtype]
    passes = [
        training_memory(
            shape,
            workload if plain is None else with_rows(workload, min(plain.micro_rows, workload.batch_size)),
            parameters=total_parameters(shape),
            trainable=trainable,
            width=width,
            checkpointed=plain is not None and plain.checkpointed,
        )
        for workload in passes_of(work)
    ]
    parts = max(passes, key=lambda parts: sum(parts.values()))
    if work.rollouts is not None:
        parts["rollouts"] = sampling_beyond(shape, work.rollouts, parts, width=width)
    down, up = MEMORY_RANGE if work.cpu_step is None else CPU_MEMORY_RANGE
    return parts, Figure.about(sum(parts.values()) / GIB, down=down, up=up, unit="GiB")


class RunStart(NamedTuple):
    """How a run begins, and whether it begins twice."""

    kind: str
    tuning: Tuning | None = None
    forked: bool = False
    repeated_steps: int | None = None
    """Steps that a rehearsed crash makes the run repeat; None without one."""


def minutes_by_part(shape: ModelShape, work: Workload, speed: Figure, start: RunStart) -> dict[str, Figure]:
    """Training, and the rest: loading with the initial loss, checkpoints, a rehearsed crash, the final
    loss.
    """
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
        COMPUTE: _minutes(tokens, speed),
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
    """Describe the setup of the plain step, for messages."""
    checkpointing = ", with activation checkpointing" if plain.checkpointed else ""
    return f"{plain.micro_rows} row{'s' * (plain.micro_rows != 1)} at a time{checkpointing}"


BUSY_SHARE = 0.7
"""A measurement with a smaller share of the cores does not represent an idle machine."""


def _notes(inputs: PlanInputs, parts: dict[str, float], memory: Figure, minutes: Figure) -> tuple[str, ...]:
    """How memory is used; then which limits the run exceeds."""
    tuning, plain, limit = inputs.tuning, inputs.plain, inputs.memory_limit_gib
    shares = ", ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items() if value)
    plain_note = "" if plain is None else f"{describe_plain(plain)}; "
    if inputs.streamed is not None:
        on_host = inputs.streamed.host_gib
        plain_note = describe_streamed(inputs.streamed) + (
            f", {on_host:.0f} GiB of the host; " if on_host else "; "
        )
    notes = [f"{plain_note}memory by parts, GiB: {shares}" if tuning is None else describe_tuning(tuning)]
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
    return tuple(notes)


LEAST_FACTOR, MOST_FACTOR = 0.6, 1.8
"""Bounds of the learned memory correction: anything further off was another kind of run."""
LEAST_RANGE, UNSURE_RANGE = 0.05, 0.15
"""Around the learned factor: from many runs, and from one."""
TITLES = {
    MEMORY: "peak memory",
    TIME: "time",
    SPEED: "speed",
    "steps": "steps",
    "trainable_parameters": "trainable parameters",
}


def compare(plan: Plan, outcome: TrainOutcome, *, minutes: float) -> tuple[Residual, ...]:
    """The plan compared with the outcome. `minutes` is the time that the user waited."""
    actual = {
        "trainable_parameters": float(outcome.trainable_parameters),
        MEMORY: outcome.peak_memory_gib,
        "steps": float(outcome.steps),
        SPEED: outcome.tokens_per_second,
        TIME: minutes,
    }
    return tuple(
        Residual(name=name, planned=getattr(plan, name), actual=value) for name, value in actual.items()
    )


def compare_parts(plan: Plan, outcome: TrainOutcome, parts: RunParts) -> tuple[Residual, ...]:
    """The parts of time and memory compared, where both sides know them."""
    residuals: list[Residual] = []
    for name, planned in planned_minutes(plan).items():
        actual = parts.seconds.get(name)
        if actual is not None:
            residuals.append(Residual(name=f"{TIME}.{name}", planned=planned, actual=actual / 60))
    for name, planned in planned_memory(plan).items():
        measured_gib = parts.memory_gib.get(name)
        if measured_gib is not None:
            residuals.append(Residual(name=f"{MEMORY}.{name}", planned=planned, actual=measured_gib))
    if COMPUTED in plan.parts:
        residuals.append(
            Residual(name=COMPUTED, planned=plan.parts[COMPUTED], actual=outcome.peak_memory_gib)
        )
    return tuple(residuals)


def planned_minutes(plan: Plan) -> dict[str, Figure]:
    """Planned minutes by parts. A plan without them has at least its steps, the loading, and a rest."""
    parts = _parts_of(plan, TIME)
    if not parts:
        speed = plan.tokens_per_second
        compute = Figure(
            value=plan.tokens.value / speed.value / 60,
            low=plan.tokens.low / speed.high / 60,
            high=plan.tokens.high / speed.low / 60,
            unit="min",
        )
        load = Figure.about(START_SECONDS[plan.device.kind] / 60, down=0.5, up=2.0, unit="min")
        remaining = max(0.0, plan.minutes.value - compute.value - load.value)
        parts = {
            "load": load,
            COMPUTE: compute,
            "validation": Figure.about(remaining, down=0.5, up=2.0, unit="min"),
        }
    # Waiting for data, evaluations or restarts is never planned: all of it exceeds the plan.
    unplanned = {name: Figure.exact(0.0, "min") for name in (WAITING, "looks", "restarts", "checkpoints")}
    return {**unplanned, **parts}


def planned_memory(plan: Plan) -> dict[str, Figure]:
    """Planned memory in the two groups that a run measures; empty if the plan names no parts."""
    parts = _parts_of(plan, MEMORY)
    groups: dict[str, Figure] = {}
    for group, names in GROUPS.items():
        members = [parts[name] for name in names if name in parts]
        if members:
            groups[group] = Figure.total(members, "GiB")
    return groups if len(groups) == len(GROUPS) else {}


def _parts_of(plan: Plan, figure: str) -> dict[str, Figure]:
    head = f"{figure}."
    return {
        name.removeprefix(head): planned
        for name, planned in plan.parts.items()
        if name.startswith(head) and name != COMPUTED
    }


def find_drifts(residuals: Sequence[Residual], parts: Sequence[Residual]) -> tuple[Drift, ...]:
    """Every figure outside its range, and the part that moved most in the same direction."""
    drifts = []
    for residual in residuals:
        if residual.inside:
            continue
        planned, title = residual.planned, TITLES.get(residual.name, residual.name)
        says = f"{title} came to {_number(residual.actual)} {planned.unit}".rstrip()
        says += f", planned {_number(planned.low)} … {_number(planned.high)}"
        if planned.low == planned.high:
            says = f"{title} came to {_number(residual.actual)}, planned {_number(planned.value)}"
        drift = Drift(figure=residual.name, planned=planned, actual=residual.actual, says=says)
        cause = _cause(residual, parts)
        if cause is not None:
            component = cause.name.partition(".")[2]
            says += (
                f": mostly {component}, {_number(cause.actual)} {cause.planned.unit} "
                f"in place of {_number(cause.planned.value)}"
            )
            changes = {
                "component": component,
                "component_planned": cause.planned.value,
                "component_actual": cause.actual,
                "says": says,
            }
            drift = drift.model_copy(update=changes)
        drifts.append(drift)
    return tuple(drifts)


def _cause(residual: Residual, parts: Sequence[Residual]) -> Residual | None:
    """The part with the largest difference in the drift's own direction."""
    candidates = [
        part for part in parts if part.name.startswith(f"{residual.name}.") and part.name != COMPUTED
    ]
    exceeded = residual.actual > residual.planned.value
    if residual.name == SPEED:
        # Tokens a second are the inverse of the steps' time: more of one is less of the other.
        in_steps = [f"{TIME}.{part}" for part in (COMPUTE, WAITING, ROLLOUTS)]
        candidates = [part for part in parts if part.name in in_steps]
        exceeded = not exceeded
    moved = [(residual.actual - residual.planned.value) * (1 if exceeded else -1) for residual in candidates]
    if not moved or max(moved) <= 0:
        return None
    return candidates[moved.index(max(moved))]


def find_biases(runs: Iterable[Sequence[Residual]]) -> tuple[Bias, ...]:
    """Over past runs: the median error of each kind of figure, and how often it was within its range."""
    kinds: dict[str, list[Residual]] = {}
    for residuals in runs:
        for residual in residuals:
            if residual.planned.value:
                kinds.setdefault(residual.name, []).append(residual)
    biases = []
    for name, residuals in kinds.items():
        off = [residual.off for residual in residuals]
        inside = sum(residual.inside for residual in residuals) / len(residuals)
        biases.append(
            Bias(
                figure=name,
                runs=len(residuals),
                off=Figure(value=median(off), low=min(off), high=max(off)),
                inside=Figure.exact(inside),
            )
        )
    return tuple(biases)


def learned_memory(residuals: Sequence[Residual], *, most: int = 10) -> Figure | None:
    """From the latest runs of the same kind, newest first: the factor on the computed peak. If plans include
    the peak before correction, that is used: else a corrected plan that came true would unlearn its own
    correction.
    """
    kinds = {
        name: [residual for residual in residuals if residual.name == name and residual.planned.value > 0]
        for name in (COMPUTED, MEMORY)
    }
    recent = (kinds[COMPUTED] or kinds[MEMORY])[:most]
    ratios = [residual.actual / residual.planned.value for residual in recent]
    ratios = [ratio for ratio in ratios if LEAST_FACTOR <= ratio <= MOST_FACTOR]
    if not ratios:
        return None
    middle = median(ratios)
    room = LEAST_RANGE + (UNSURE_RANGE - LEAST_RANGE) / len(ratios)
    return Figure(value=middle, low=min(*ratios, middle * (1 - room)), high=max(*ratios, middle * (1 + room)))


def correct_memory(figure: Figure, learned: Figure | None) -> Figure:
    """The computed peak, corrected by earlier runs."""
    if learned is None:
        return figure
    value = figure.value
    return Figure(
        value=value * learned.value, low=value * learned.low, high=value * learned.high, unit=figure.unit
    )


def split_memory(*, loaded: float | None, peak: float) -> Mapping[str, float]:
    """The groups of a measured peak; empty if memory was not measured before the first step."""
    if loaded is None or not 0 < loaded <= peak:
        return {}
    return {LOADED: loaded, STEP_PEAK: peak - loaded}


def _number(value: float) -> str:
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


ENOUGH_RUNS = 3
"""From this many runs on, their own spread determines the range."""
USUAL_SPREAD = 0.12
"""Standard deviation of the log of a run's speed between runs on an otherwise idle machine."""
PRIOR_DEGREES = 2.0
"""Weight of `USUAL_SPREAD` against the spread seen, in degrees of freedom."""
RUN_SPREAD = 0.35
"""The same if other load varies: how far a single run can be trusted against the prior."""
NORMAL_95 = 1.6449
"""Ranges are stated as 90 % intervals."""


def pool_runs(prior: Figure, measured: Sequence[float]) -> Figure:
    """The prior corrected by the values seen. Values that are not positive are ignored."""
    usable = [value for value in measured if value > 0]
    if not usable or prior.value <= 0:
        return prior
    logs = [math.log(value) for value in usable]
    if len(usable) < ENOUGH_RUNS:
        # Prior and runs, each by the inverse of its variance.
        tau = math.log(prior.high / prior.low) / (2 * NORMAL_95) if prior.low > 0 else math.inf
        weight = (RUN_SPREAD / tau) ** 2 if tau > 0 else math.inf
        value, low, high = prior.value, prior.low, prior.high
        if math.isfinite(weight):
            value = math.exp((weight * math.log(prior.value) + sum(logs)) / (weight + len(logs)))
    else:
        # A 90 % prediction interval for the next run, on the log scale.
        mean = sum(logs) / len(logs)
        squares = sum((log - mean) ** 2 for log in logs)
        degrees = PRIOR_DEGREES + len(logs) - 1
        spread = math.sqrt((PRIOR_DEGREES * USUAL_SPREAD**2 + squares) / degrees)
        reach = math.exp(student_95(degrees) * spread * math.sqrt(1 + 1 / len(logs)))
        value = median(usable)
        low, high = value / reach, value * reach
    low, high = min(low, *usable), max(high, *usable)
    return Figure(value=min(max(value, low), high), low=low, high=high, unit=prior.unit)


def student_95(degrees: float) -> float:
    """The 95 % quantile of Student's t (within 1 % from 3 degrees of freedom on)."""
    z = NORMAL_95
    first = (z**3 + z) / (4 * degrees)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees**3)
    return z + first + second + third
