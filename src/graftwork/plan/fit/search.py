"""Lists the candidates of a run: every strategy that the engine has, and the CPU. Pure.

Input: a question. Output: candidates that fit and candidates that do not. A strategy that does not fit with
some rows at a time is not tried with more. `graft train` asks the same function for a step whose layers are
streamed from host memory, under the same limits.
"""

from collections.abc import Iterator

from graftwork.costmodel.cpu_step import (
    MEMORY_SHARE,
    PEAK_SHARE,
    TrunkTokens,
    choose_host_micro_batches,
    choose_kept,
    packed_bytes,
    seconds_per_token,
    training_memory,
    with_rows,
)
from graftwork.costmodel.plain_step import Distribution
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import cpu_seconds, passes_of, sampling_beyond, update_seconds
from graftwork.costmodel.streamed import StreamedWork, choose_streamed, streamed_peak, streamed_step_parts
from graftwork.model.shape import total_parameters, trained_by
from graftwork.plan.fit.candidates import (
    ALONE,
    PROCESS_GIB,
    RESERVED_SPREAD,
    FitCandidate,
    StrategyOption,
    fits,
    own_limit,
    own_step_candidates,
    plain_candidate,
    plain_run,
)
from graftwork.plan.fit.question import gpu_room, half_precision, host_room, rollout_load, why_plain
from graftwork.records.base import ELEMENT_BYTES, GIB, Figure
from graftwork.records.hardware import Cpu
from graftwork.records.plan import CpuStepPlan, FitQuestion, Level, MemoryPeak, Offload, Sharding, Workload

ON_HOST = Distribution("none", "weights", 1)
HOST_RANGE = (0.98, 1.03)
"""Host memory is counted; pages of files and the allocator are not."""


def streams(question: FitQuestion) -> bool:
    """Whether `graft train` can stream the layers of this run."""
    return (
        question.engine == "graft"
        and question.algorithm == "sft"
        and question.method == "full"
        and question.optimizer == "adamw_fused"
        and question.offload in ("auto", "weights")
        and question.machine.gpu is not None
    )


def streamed_candidate(
    question: FitQuestion, *, rates: StepRates, level: Level, correction: float = 1.0
) -> FitCandidate:
    """The fastest that fits, or the one closest to fitting."""
    run = plain_run(question, rates=rates, correction=correction)
    whole = question.adapted_layers == question.shape.layers
    work = StreamedWork(
        lengths=question.lengths,
        batch_size=question.batch_size,
        trained_share=question.trained_share,
        adapted_layers=None if whole else question.adapted_layers,
    )
    step = choose_streamed(
        run,
        work,
        limit_gib=own_limit(question),
        host_gib=host_room(question),
        spread=RESERVED_SPREAD[level],
    )
    peak, parts = streamed_peak(run, work, step), streamed_step_parts(run, work, step)
    low, high = HOST_RANGE
    process, counted = PROCESS_GIB, step.host_gib - PROCESS_GIB[1]
    return FitCandidate(
        way=StrategyOption("graft", False, ON_HOST, step.micro_rows, question.adapted_layers),
        setup=None,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=Figure(
            value=step.host_gib, low=counted * low + process[0], high=counted * high + process[2], unit="GiB"
        ),
        seconds_per_step=sum(parts.values()),
        step_parts=parts,
        tokens_per_step=question.batch_size * sum(question.lengths) / len(question.lengths),
        passes=-(-question.batch_size // step.micro_rows),
        streamed=step,
    )


MOST_ROWS = 20_000
"""A longer run is represented by this many rows."""
UNKNOWN_CPU = Cpu(
    name="a CPU",
    cores=8,
    gflops=280.0,
    bandwidth_gb_s=40.0,
    watts=65.0,
    source="guessed: 35 GFLOPS a core, two channels of DDR4",
    dated="2026-11-15",
    reached=True,
)


def cpu_candidate(question: FitQuestion) -> FitCandidate:
    """As many rows per micro-batch as fit into host memory."""
    shape, cpu = question.shape, question.machine.cpu or UNKNOWN_CPU
    work, width = _cpu_work(question, cpu), ELEMENT_BYTES[half_precision(question)]
    limit = gpu_room(question, gpus=1).value
    fewer = choose_host_micro_batches(shape, work, limit_gib=limit, width=width)
    rows = question.batch_size if fewer is None else fewer.micro_rows
    sizes = max(
        (
            training_memory(
                shape,
                workload if fewer is None else with_rows(workload, min(rows, workload.batch_size)),
                parameters=total_parameters(shape),
                trainable=trained_by(shape, work),
                width=width,
            )
            for workload in passes_of(work)
        ),
        key=lambda parts: sum(parts.values()),
    )
    tokens = question.batch_size * sum(question.lengths) / len(question.lengths)
    # Without a matrix unit, bfloat16 saves memory and no time.
    gflops = cpu.gflops * (1.0 if cpu.reached else PEAK_SHARE)
    if work.rollouts is None:
        a_token = seconds_per_token(shape, work, gflops=gflops, cores=cpu.cores)
        seconds = {name: value * tokens for name, value in a_token.items()}
    else:
        seconds = update_seconds(shape, work, gflops=gflops, cores=cpu.cores)
        seconds |= cpu_seconds(shape, work.rollouts, gflops=gflops)
    # The C library takes and gives back pages: what is reserved is what is allocated.
    if work.rollouts is not None:
        sizes["rollouts"] = sampling_beyond(shape, work.rollouts, sizes, width=width)
    total = sum(sizes.values())
    peak = MemoryPeak(allocated=total, reserved=total, parts=sizes, phase="loss")
    return FitCandidate(
        way=StrategyOption("graft", False, ALONE, rows, 0),
        setup=None,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=Figure.about(total / GIB, down=0.85, up=1.2, unit="GiB"),
        seconds_per_step=sum(seconds.values()),
        step_parts=seconds,
        tokens_per_step=tokens,
        passes=-(-question.batch_size // rows),
    )


def _cpu_work(question: FitQuestion, cpu: Cpu) -> Workload:
    """The whole run, with graft's own step on CPUs if it uses that."""
    count = max(min(question.rows, MOST_ROWS), question.batch_size)
    ordered = sorted(question.lengths)
    lengths = tuple(ordered[index * len(ordered) // count] for index in range(count))
    work = Workload(
        lengths=lengths,
        trained_tokens=round(sum(lengths) * question.trained_share),
        batch_size=question.batch_size,
        epochs=max(round(question.epochs), 1),
        rank=question.rank,
        targets=question.targets,
        adapted_layers=question.adapted_layers,
        method=question.method,
        rollouts=rollout_load(question),
    )
    if why_plain(question) is not None:
        return work
    memory, distinct = question.machine.ram_gib * GIB, sum(lengths) - len(lengths)
    cpu_step = CpuStepPlan(
        packed=packed_bytes(question.shape, adapted=work.adapted_layers, method=work.method)
        <= memory * MEMORY_SHARE,
        kept=choose_kept(
            question.shape,
            TrunkTokens(distinct, distinct * work.epochs),
            adapted=work.adapted_layers,
            memory_bytes=memory,
            disk_bytes=0.0,
            threads=cpu.cores,
        ),
        distinct_tokens=distinct,
    )
    return work.model_copy(update={"cpu_step": cpu_step})


def search(
    question: FitQuestion,
    *,
    rates: StepRates | None,
    level: Level = "computed",
    correction: float = 1.0,
    own_step: bool = True,
) -> tuple[list[FitCandidate], list[FitCandidate]]:
    """All strategies with as many rows per micro-batch as fit; and those that do not fit, each with its
    minimum. `correction` is a traced peak over the computed one.
    """
    fitting: list[FitCandidate] = []
    failing: list[FitCandidate] = []
    candidates: list[FitCandidate] = []
    if question.machine.gpu is None or rates is None:
        candidates.append(cpu_candidate(question))
    else:
        for way in _families(question):
            rows = 1
            while True:
                candidate = plain_candidate(
                    question, way._replace(micro_rows=rows), rates=rates, correction=correction
                )
                if not fits(candidate, question, level):
                    if rows == 1:
                        failing.append(candidate)
                    break
                fitting.append(candidate)
                if rows * way.shared.gpus >= question.batch_size:
                    break
                rows = min(2 * rows, -(-question.batch_size // way.shared.gpus))
        if streams(question):
            candidates.append(streamed_candidate(question, rates=rates, level=level, correction=correction))
        if own_step and takes_own_step(question):
            candidates += own_step_candidates(question, rates=rates, level=level)
    for candidate in candidates:
        (fitting if fits(candidate, question, level) else failing).append(candidate)
    return fitting, failing


def takes_own_step(question: FitQuestion) -> bool:
    """Whether it uses graft's own step on a GPU."""
    is_ours = question.engine == "graft" and question.machine.gpu is not None
    return is_ours and why_plain(question) is None


def _families(question: FitQuestion) -> Iterator[StrategyOption]:
    """Variants of the plain step, before the number of rows is chosen."""
    layers = question.shape.layers
    graft = question.engine == "graft"
    # Both engines checkpoint all blocks or none.
    depths = (0, layers)
    for shared in _sharings(question, graft=graft):
        if graft and shared.gpus == 1 and takes_own_step(question):
            continue
        for checkpointed in depths:
            yield StrategyOption("graft" if graft else "hf", False, shared, 1, checkpointed)


def _sharings(question: FitQuestion, *, graft: bool) -> Iterator[Distribution]:
    """How GPUs can share it, and what may be offloaded to host memory."""
    gpus = question.machine.gpus
    yield Distribution("none", "none", 1)
    kinds: tuple[Sharding, ...] = ("zero2", "zero3", "fsdp2")
    if question.method == "qlora":
        # 4-bit weights and their scales must stay together; there is nothing else to cut up.
        kinds = ()
    elif (graft and half_precision(question) == "float16") or question.optimizer == "adamw_8bit":
        # DeepSpeed scales by itself, and keeps states of its own.
        kinds = ("fsdp2",)
    if gpus > 1:
        yield Distribution("ddp", "none", gpus)
    for kind in kinds:
        if gpus == 1 and (graft or kind == "fsdp2"):
            # Alone, there is nothing to share; only DeepSpeed's offload makes sense.
            continue
        for offload in _offloads(question, kind, graft=graft):
            if gpus > 1 or offload != "none":
                yield Distribution(kind, offload, gpus)


def _offloads(question: FitQuestion, kind: Sharding, *, graft: bool) -> Iterator[Offload]:
    """What may be offloaded: what was requested, what the kind supports, what is worth it."""
    able: tuple[Offload, ...] = {
        "zero2": ("none", "optimizer"),
        # Our own setting moves both or nothing.
        "zero3": ("none", "weights") if graft else ("none", "optimizer", "weights"),
        "fsdp2": ("none", "weights"),
    }[kind]
    for offload in able:
        if offload == "optimizer" and question.method != "full":
            continue
        if offload != "none" and question.optimizer == "adamw_8bit":
            # Its states are stepped on the GPU.
            continue
        if question.offload in ("auto", offload):
            yield offload
