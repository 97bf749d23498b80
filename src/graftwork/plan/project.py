"""How a run is taken on this machine's GPU or CPU, before anything is loaded.

Input: a project's settings and base, the device, the work. Output: what the GPU reaches, how its memory is
spent, how the plain step goes through the rows of a step so that it fits (how many at a time, with which
blocks computed again); or a no that says what would help. Loads no weights.
"""

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, cast

from graftwork.costmodel.cpu_step import UNEVEN_REPLIES, choose_host_micro_batches
from graftwork.costmodel.gpu_memory import gpu_peak
from graftwork.costmodel.gpu_tuning import FIRST_WITH_EIGHT, GPU_SHARE, TuningRequest, choose_tuning
from graftwork.costmodel.plain_step import (
    Distribution,
    PlainRun,
    expected_longest,
    peak_of_each,
    plain_step_parts,
)
from graftwork.costmodel.probed_rates import rates_of_probe
from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.costmodel.rollouts import choose_prompts_at_once, sampling_gib
from graftwork.costmodel.streamed import StreamedWork, choose_streamed, describe_streamed
from graftwork.model.shape import total_parameters, trained_by
from graftwork.plan.catalog.hardware import default_rates, find_gpu, list_gpus
from graftwork.plan.estimate import describe_plain, find_biases
from graftwork.plan.fit.candidates import LARGE_PARAMETERS, RESERVED_SPREAD, memory_level
from graftwork.plan.fit.project import this_host
from graftwork.plan.fit.question import SYSTEM_GIB
from graftwork.plan.probe import stored_probe
from graftwork.project.open_project import OpenProject
from graftwork.records.base import ELEMENT_BYTES, GIB, Record
from graftwork.records.errors import NegativeResult, UserError
from graftwork.records.hardware import Machine
from graftwork.records.plan import (
    Bias,
    DeviceFacts,
    Level,
    MemoryPeak,
    ModelShape,
    Offload,
    PlainSetup,
    PlainStep,
    Precision,
    Sharding,
    StreamedStep,
    Tuning,
    Workload,
)
from graftwork.store.runs import PastRun
from graftwork.train.engine_choice import streams_layers, why_plain_step


def gpu_rates(work: OpenProject, device: DeviceFacts, shape: ModelShape) -> StepRates | None:
    """Rates of this GPU: as probed, else from the catalog; None if neither has it. A GPU of another machine
    is named as in the catalog: a probe of this machine does not apply to it.
    """
    if device.kind != "cuda":
        return None
    probe = stored_probe(work.project, shape=shape)
    is_computed = device.name in {gpu.name for gpu in list_gpus()} and device.certainty == "computed"
    if probe is not None and probe.device.kind == "cuda" and not is_computed:
        # A probe that was stopped early has measured no products.
        with suppress(ValueError):
            return rates_of_probe(probe)
    with suppress(UserError):
        return rates_of(find_gpu(device.name))
    return None


def plan_rollouts(
    work: OpenProject, device: DeviceFacts, shape: ModelShape, load: Workload, dtype: str
) -> Workload:
    """The work with as many prompts answered together as fit into memory."""
    if load.rollouts is None or load.rollouts.on_server:
        return load
    gpu = device.kind == "cuda"
    rollouts = choose_prompts_at_once(
        shape,
        load.rollouts,
        memory_gib=work.settings.plan.memory_limit_gib or device.memory_gib * (GPU_SHARE if gpu else 1),
        width=ELEMENT_BYTES[dtype],
        recorded=gpu,
    )
    return load.model_copy(update={"rollouts": rollouts})


def plan_passes(
    work: OpenProject,
    device: DeviceFacts,
    shape: ModelShape,
    load: Workload,
    dtype: str,
    *,
    rates: StepRates | None,
) -> PlainStep | None:
    """Plan how the plain step processes its rows, so that the first attempt fits."""
    settings = work.settings.train
    if device.kind != "cuda":
        limit = work.settings.plan.memory_limit_gib or device.memory_gib
        checkpointed = settings.gradient_checkpointing == "on"
        return choose_host_micro_batches(
            shape, load, limit_gib=limit, width=ELEMENT_BYTES[dtype], checkpointed=checkpointed
        )
    limit = work.settings.plan.memory_limit_gib or device.memory_gib * GPU_SHARE
    processes = settings.processes * settings.run.nodes
    shared = distribution_of(settings.strategy, processes, offload=settings.offload)
    config = base_config(work)
    run = PlainRun(
        shape=shape,
        architecture=config.get("model_type", "llama"),
        trainable=trained_by(shape, load),
        half=cast(Precision, dtype),
        rates=rates or default_rates(),
        machine=_machine(device, gpus=shared.gpus),
    )
    sampled = sampling_gib(shape, load)
    limit -= sampled
    step = choose_micro_batches(
        run, load, shared, limit_gib=limit, checkpointing=settings.gradient_checkpointing
    )
    level = memory_level(run.architecture)
    if needs_more(step, limit_gib=limit, level=level):
        raise NegativeResult(
            f"it does not fit into {limit:.1f} GiB{_describe_sampled(sampled)}",
            why=f"{step.peak_gib:.1f} GiB are needed with {describe_plain(step)}",
            fix=_FEWER_ANSWERS if sampled else _SMALLER_BATCHES,
        )
    if not sampled:
        return step
    parts = {**step.parts_gib, "rollouts": sampled}
    return step.model_copy(update={"peak_gib": step.peak_gib + sampled, "parts_gib": parts})


_SMALLER_BATCHES = (
    "set `train.method: qlora` or `train.gradient_checkpointing: auto`, lower `data.max_tokens`, share it "
    "(`train.strategy`), or give it a larger GPU; `plan.memory_limit_gib` states what there is"
)
_FEWER_ANSWERS = (
    "lower `train.rollouts.num_generations` or `train.rollouts.max_completion_length`, set "
    "`train.method: qlora`, or give it a larger GPU; `plan.memory_limit_gib` states what there is"
)


def _describe_sampled(sampled: float) -> str:
    return f", which {sampled:.1f} GiB for sampled answers leave" if sampled else ""


def plan_streamed(
    work: OpenProject,
    device: DeviceFacts,
    shape: ModelShape,
    load: Workload,
    dtype: str,
    *,
    rates: StepRates | None,
) -> StreamedStep | None:
    """Plan how the layers are streamed from host memory; None if the run does not use that."""
    settings = work.settings.train
    if not streams_layers(settings):
        return None
    gpu = device.kind == "cuda"
    limit = work.settings.plan.memory_limit_gib or device.memory_gib * (GPU_SHARE if gpu else 1)
    here = this_host()
    host = max(here.ram_gib - SYSTEM_GIB, 0.0)
    whole = load.adapted_layers == shape.layers
    run = PlainRun(
        shape=shape,
        architecture=base_config(work).get("model_type", "llama"),
        trainable=trained_by(shape, load),
        half=cast(Precision, dtype),
        rates=rates or default_rates(),
        machine=here.model_copy(update={"gpu": _machine(device, gpus=1).gpu, "gpus": 1}) if gpu else here,
    )
    rows = StreamedWork(
        lengths=load.lengths,
        batch_size=min(load.batch_size, len(load.lengths)),
        trained_share=min(load.trained_tokens / sum(load.lengths), 1.0),
        adapted_layers=None if whole else load.adapted_layers,
    )
    spread = RESERVED_SPREAD[memory_level(run.architecture)]
    step = choose_streamed(run, rows, limit_gib=limit, host_gib=host, spread=spread if gpu else 0.0)
    if not gpu:
        # One memory holds both.
        step = step.model_copy(
            update={"host_gib": 0.0, "peak_gib": step.peak_gib + step.host_gib, "seconds_per_token": None}
        )
    lacking = max(step.peak_gib * (1 + spread) - limit, step.host_gib - host)
    if lacking > 0:
        raise NegativeResult(
            f"it does not fit into {limit:.1f} GiB of the device and {host:.0f} GiB of the host",
            why=f"{step.peak_gib:.1f} and {step.host_gib:.0f} GiB are needed: {describe_streamed(step)}",
            fix="set `train.method: lora`, lower `data.max_tokens` or `train.batch_size`, train fewer layers "
            "(`train.upper_layers`), or give it more host memory",
        )
    return step


def as_plain(step: StreamedStep) -> PlainStep:
    """A streamed step as the plan's figures see it."""
    return PlainStep(
        micro_rows=step.micro_rows,
        checkpointed=True,
        peak_gib=step.peak_gib,
        parts_gib=step.parts_gib,
        seconds_per_token=step.seconds_per_token,
    )


def _machine(device: DeviceFacts, *, gpus: int) -> Machine:
    """This machine's GPUs as in the catalog; without their links if they are not in it."""
    gpu = None
    with suppress(UserError):
        gpu = find_gpu(device.name)
    return Machine(gpu=gpu, gpus=gpus, ram_gib=device.memory_gib)


def base_config(work: OpenProject) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(work.base.folder) / "config.json").read_text())
    return config


def plan_tuning(
    work: OpenProject, device: DeviceFacts, shape: ModelShape, load: Workload, *, rates: StepRates | None
) -> Tuning | None:
    """Plan a GPU's memory; None if the run uses the plain step or a CPU's."""
    settings = work.settings.train
    if device.kind != "cuda":
        return None
    if why_plain_step(
        settings, shape, device="cuda", precision=settings.precision, capability=device.capability
    ):
        return None
    whole = work.settings.plan.memory_limit_gib or device.memory_gib * GPU_SHARE
    sampled = sampling_gib(shape, load)
    limit = whole - sampled
    # Small models are quick in 16 bits, and 8 cost them most: on SmolLM2 the loss was 7 % higher.
    large = total_parameters(shape) >= LARGE_PARAMETERS
    wants_eight = settings.fp8 == "on" or (settings.fp8 == "auto" and large)
    request = TuningRequest(
        method=settings.method,
        adapted=load.adapted_layers,
        trainable=trained_by(shape, load),
        step_tokens=_largest_step(load),
        longest=max(load.lengths),
        eight=wants_eight and (device.capability or 0) >= FIRST_WITH_EIGHT,
        compile=settings.compile,
        run_tokens=sum(load.lengths) * load.epochs,
    )
    tuning = choose_tuning(shape, request, limit_gib=limit, rates=rates or default_rates())
    if tuning is None:
        raise NegativeResult(
            f"it does not fit into {limit:.1f} GiB{_describe_sampled(sampled)}",
            why=f"not even with one row of {max(load.lengths)} tokens at a time and nothing kept",
            fix=_FEWER_ANSWERS
            if sampled
            else "set `train.method: qlora`, lower `data.max_tokens`, or give it a larger GPU",
        )
    # A tuning is chosen as if every token were trained; the peak is that of the share that is.
    share = min(load.trained_tokens / sum(load.lengths), 1.0)
    peak = gpu_peak(
        shape,
        tuning,
        trainable=trained_by(shape, load),
        adapted=load.adapted_layers,
        places=math.ceil(share * tuning.micro_tokens),
        even=min(load.lengths) == max(load.lengths),
    )
    peak_gib = min(peak.reserved / GIB, tuning.peak_gib)
    return tuning.model_copy(update={"peak_gib": peak_gib, "sampling_gib": sampled})


def _largest_step(load: Workload) -> int:
    """Tokens that hardly any step exceeds: a step in two passes takes nearly twice as long as in one."""
    rows, lengths = load.batch_size, sorted(load.lengths)
    mean, spread = statistics.fmean(lengths), statistics.pstdev(lengths)
    likely = rows * mean + 3 * spread * math.sqrt(rows)
    return min(math.ceil(likely), max(sum(lengths[-rows:]), round(rows * mean)))


SHARDINGS: dict[str, Sharding] = {
    "single": "none",
    "ddp": "ddp",
    "fsdp": "fsdp2",
    "zero2": "zero2",
    "zero3": "zero3",
}


def distribution_of(strategy: str, processes: int = 1, *, offload: bool = False) -> Distribution:
    """Who shares a run, from how the trainer's settings name it."""
    sharding = SHARDINGS[strategy]
    moved: Offload = "none"
    if offload and sharding in ("zero2", "zero3", "fsdp2"):
        moved = "optimizer" if sharding == "zero2" else "weights"
    return Distribution(sharding, moved, processes if sharding != "none" else 1)


def choose_micro_batches(
    run: PlainRun,
    work: Workload,
    shared: Distribution,
    *,
    limit_gib: float,
    checkpointing: Literal["auto", "on", "off"] = "auto",
) -> PlainStep:
    """The fastest option within the limit; if there is none, the one that needs the least."""
    room = limit_gib * GIB / (1 + RESERVED_SPREAD[memory_level(run.architecture, run.correction)])

    def seconds_per_token(setup: PlainSetup) -> float:
        return _seconds_per_token(run, work, setup, shared)

    def step(setup: PlainSetup, peak: MemoryPeak) -> PlainStep:
        return PlainStep(
            micro_rows=setup.rows,
            checkpointed=setup.checkpointed > 0,
            peak_gib=peak.reserved / GIB,
            parts_gib={name: size / GIB for name, size in peak.parts.items() if size > 0},
            seconds_per_token=seconds_per_token(setup),
        )

    options = [
        (_peak(run, work, setup, shared, exact=False).reserved, setup)
        for setup in _setups(run, work, shared, checkpointing=checkpointing)
    ]
    roomy = [setup for reserved, setup in options if reserved <= room]
    # Of equals the one that computes nothing again.
    for setup in sorted(roomy, key=lambda setup: (seconds_per_token(setup), setup.checkpointed)):
        # The search follows straight lines; what is chosen is computed tensor by tensor.
        peak = _peak(run, work, setup, shared, exact=True)
        if peak.reserved <= room:
            return step(setup, peak)
    _, leanest = min(options, key=lambda option: option[0])
    return step(leanest, _peak(run, work, leanest, shared, exact=True))


def needs_more(step: PlainStep, *, limit_gib: float, level: Level = "computed") -> bool:
    """Whether even this option may exceed the limit."""
    return step.peak_gib * (1 + RESERVED_SPREAD[level]) > limit_gib


def _setups(
    run: PlainRun, work: Workload, shared: Distribution, *, checkpointing: Literal["auto", "on", "off"]
) -> Iterator[PlainSetup]:
    full, layers = work.method == "full", run.shape.layers
    depths = {"auto": (0, layers), "on": (layers,), "off": (0,)}[checkpointing]
    longest, common = max(work.lengths), work.shared_tokens
    for checkpointed in depths:
        # Else a row has its part of the beginning that all rows share.
        whole = checkpointed or shared.sharding in ("fsdp2", "zero3")
        rows = -(-min(work.batch_size, len(work.lengths)) // shared.gpus)
        while rows:
            yield PlainSetup(
                method=work.method,
                rank=max([work.rank, *work.ranks.values()]),
                targets=work.targets,
                adapted_layers=work.adapted_layers,
                # Trained weights are in float32; precisions are mixed only where one process works alone.
                dtype="float32" if full else run.half,
                autocast=run.half != "float32" and not (full and shared.sharding != "none"),
                rows=rows,
                tokens=longest if whole else longest - common + -(-common // rows),
                checkpointed=checkpointed,
                kbit_upcast=False,
                fused_nf4=True,
            )
            rows //= 2


def _peak(
    run: PlainRun, work: Workload, setup: PlainSetup, shared: Distribution, *, exact: bool
) -> MemoryPeak:
    longest = max(work.lengths)
    of_step = min(1.0, UNEVEN_REPLIES * setup.rows * shared.gpus / work.batch_size)
    replies = (work.most_replies or work.batch_size * longest) * of_step
    predicted = min(1.0, replies / (setup.rows * setup.tokens))
    peak = peak_of_each(run._replace(predicted=predicted), setup, shared, exact=exact)
    # Every row has the keys and values of the shared prefix in front of its own.
    copied = setup.rows * (longest - setup.tokens) * 2 * run.shape.kv_heads * run.shape.head_dim
    size = float(copied * ELEMENT_BYTES[setup.dtype] * setup.adapted_layers)
    return peak.plus({"activations": size})


def _seconds_per_token(run: PlainRun, work: Workload, setup: PlainSetup, shared: Distribution) -> float:
    """Seconds per token of an optimizer step of usual rows, over all processes."""
    usual = max(1, round(expected_longest(work.lengths, setup.rows) * setup.tokens / max(work.lengths)))
    passes = math.ceil(work.batch_size / (setup.rows * shared.gpus))
    step = setup.model_copy(update={"tokens": usual})
    seconds = sum(plain_step_parts(run, step, shared, passes=passes).values())
    return seconds / (sum(work.lengths) / len(work.lengths) * work.batch_size)


class PastResiduals(Record):
    """Errors of plans over past runs."""

    runs: tuple[PastRun, ...]
    biases: tuple[Bias, ...]


def past_residuals(work: OpenProject, *, runs: int) -> PastResiduals:
    past = work.residuals.past(runs=runs)
    return PastResiduals(runs=past, biases=find_biases(run.residuals for run in past))
