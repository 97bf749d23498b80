"""The two steps as candidates: graft's own on one GPU at its best tunings, and the plain one. Pure.

Input: a question, how the run is shared, what the GPU reaches. Output: candidates, each one strategy with its
figures: the memory of GPU and host, the seconds of a step, the generation of GRPO, whether it fits, its
settings and its name. The engine of our own step measures its first one and keeps less where that was too
much; so what decides is whether the leanest tuning fits. Plain means transformers and PEFT, or the step of
`graft train` for families that it has no step of its own for.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from graftwork.costmodel.gpu_memory import count, gpu_peak, load_peak, peak_bytes
from graftwork.costmodel.gpu_step import step_recipe
from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_passes, gpu_step_parts
from graftwork.costmodel.gpu_tuning import GPU_SHARE, TuningRequest, choose_tuning, heads
from graftwork.costmodel.plain_step import (
    Distribution,
    PlainRun,
    expected_longest,
    peak_of_each,
    plain_step_parts,
)
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import (
    FORWARD_SHARE,
    forward_rows,
    gpu_seconds,
    launched_bytes,
    launched_seconds,
    sampling_memory,
    weight_width,
)
from graftwork.model.families import has_recipe
from graftwork.model.shape import (
    active_layer_parameters,
    adapter_parameters,
    cache_bytes,
    layer_parameters,
    total_parameters,
)
from graftwork.plan.fit.question import (
    TIGHT,
    gpu_room,
    graders,
    half_precision,
    host_room,
    plain_setup,
    rollout_load,
)
from graftwork.records.base import GIB, Figure
from graftwork.records.errors import UserError
from graftwork.records.plan import (
    Considered,
    FitQuestion,
    Level,
    MemoryPeak,
    ModelShape,
    PlainSetup,
    Strategy,
    StreamedStep,
    Tuning,
)

ALLOCATED_SPREAD: dict[Level, float] = {"guessed": 0.25, "computed": 0.05, "traced": 0.03, "probed": 0.015}
RESERVED_SPREAD: dict[Level, float] = {"guessed": 0.25, "computed": 0.08, "traced": 0.04, "probed": 0.02}
"""Relative error of the figure, either way; docs/accuracy.md shows what was measured. Guessed: a family
without a step recipe is estimated as a Llama, which was 11 to 18 % off on Gemma 2 and StarCoder 2.
"""
TIME_SPREAD: dict[Level, float] = {"guessed": 1.35, "computed": 1.35, "traced": 1.35, "probed": 1.08}
"""Factor, either way. A trace measures memory, not time."""
CPU_TIME_SPREAD = 2.0
"""The same on CPUs without a probe: there is one published run with many cores."""
SIMPLEST = ("none", "ddp", "zero2", "fsdp2", "zero3")
PLAINEST = ("none", "optimizer", "weights")


def memory_level(architecture: str, correction: float = 1.0) -> Level:
    """Confidence in the memory of a plain step of this family; a correction comes from a trace."""
    if has_recipe(architecture):
        return "computed"
    return "guessed" if correction == 1.0 else "traced"


class StrategyOption(NamedTuple):
    """A way to do the run."""

    engine: str
    own_step: bool
    """`graft train`'s own step on one GPU; else the plain one."""
    shared: Distribution
    micro_rows: int
    checkpointed: int


class FitCandidate(NamedTuple):
    """An option with its figures. Bytes and seconds."""

    way: StrategyOption
    setup: PlainSetup | None
    tuning: Tuning | None
    peak: MemoryPeak
    floor: float
    """The least reserved memory of the engine: our own step measures and keeps less."""
    host: Figure
    seconds_per_step: float
    step_parts: dict[str, float]
    tokens_per_step: float
    passes: int
    streamed: StreamedStep | None = None
    """How layers are streamed from host memory, if they are."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step


def allocated_figure(candidate: FitCandidate, level: Level) -> Figure:
    value, spread = candidate.peak.allocated / GIB, ALLOCATED_SPREAD[level]
    return Figure.about(value, down=1 - spread, up=1 + spread, unit="GiB")


def reserved_figure(candidate: FitCandidate, question: FitQuestion, level: Level) -> Figure:
    """The range ends where an engine that measures its first step would reduce its memory."""
    value, spread = candidate.peak.reserved / GIB, RESERVED_SPREAD[level]
    high = value * (1 + spread)
    if candidate.tuning is not None:
        room = gpu_room(question, gpus=candidate.way.shared.gpus).value
        high = max(value, candidate.floor / GIB * (1 + spread), min(high, room))
    return Figure(value=value, low=value * (1 - spread), high=high, unit="GiB")


def fits(candidate: FitCandidate, question: FitQuestion, level: Level) -> bool:
    """No figure within the range may exceed what is available; on the host, only the usual figure."""
    return gpu_excess(candidate, question, level) <= 0 and host_excess(candidate, question) <= 0


def gpu_excess(candidate: FitCandidate, question: FitQuestion, level: Level) -> float:
    """GiB missing on each GPU."""
    room = gpu_room(question, gpus=candidate.way.shared.gpus)
    return reserved_figure(candidate, question, level).high - room.value


def host_excess(candidate: FitCandidate, question: FitQuestion) -> float:
    """GiB missing on the host."""
    if question.machine.gpu is None:
        return 0.0
    return candidate.host.value - host_room(question)


def is_tight(candidate: FitCandidate, question: FitQuestion) -> bool:
    """It fits, but other programs on the host may make it swap."""
    return candidate.host.high > TIGHT * question.machine.ram_gib


def preference(candidate: FitCandidate) -> tuple[float, int, int, float]:
    """The fastest; of equals the simplest, then the smallest."""
    shared = candidate.way.shared
    return (
        candidate.seconds_per_step / candidate.tokens_per_step,
        SIMPLEST.index(shared.sharding),
        PLAINEST.index(shared.offload),
        candidate.peak.reserved,
    )


TRAIN_STRATEGY = {"none": "single", "ddp": "ddp", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp"}
FORMS = {"whole": "16 bits", "eight": "8 bits", "four": "4 bits (NF4)"}
TITLES = {"none": "one GPU", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}


def strategy_of(candidate: FitCandidate, question: FitQuestion) -> Strategy:
    """The settings of a candidate."""
    way, tuning = candidate.way, candidate.tuning
    longest = max(question.lengths)
    graft = way.engine == "graft"
    return Strategy(
        engine="graft" if graft else "hf",
        precision=half_precision(question),
        weights=_weights(candidate, question),
        micro_rows=way.micro_rows,
        micro_tokens=tuning.micro_tokens if tuning is not None else way.micro_rows * longest,
        accumulation=candidate.passes,
        checkpointed_layers=way.checkpointed,
        sharding=way.shared.sharding,
        offload=way.shared.offload,
        optimizer=question.optimizer,
        packing=way.own_step,
        tuning=tuning,
        streamed=candidate.streamed,
        train=train_settings(candidate, question) if graft else {},
    )


def train_settings(candidate: FitCandidate, question: FitQuestion) -> dict[str, Any]:
    """The `train:` section of graft.yaml that does this."""
    shared = candidate.way.shared
    settings: dict[str, Any] = {
        "method": question.method,
        "rank": question.rank,
        "batch_size": question.batch_size,
        "epochs": max(round(question.epochs), 1),
        "precision": half_precision(question),
        "strategy": TRAIN_STRATEGY[shared.sharding],
        "processes": shared.gpus,
        "offload": shared.offload != "none",
    }
    if question.algorithm != "sft":
        settings["objective"] = question.algorithm
    if (load := rollout_load(question)) is not None:
        settings["rollouts"] = {
            "prompts": load.prompts,
            "num_generations": load.answers,
            "max_completion_length": load.max_tokens,
        }
        # Supervised rows are not trained on.
        del settings["batch_size"], settings["epochs"]
    if candidate.way.checkpointed and not candidate.way.own_step and candidate.streamed is None:
        settings["gradient_checkpointing"] = "on"
    if question.adapted_layers < question.shape.layers:
        settings["upper_layers"] = question.adapted_layers
    return settings


def _weights(candidate: FitCandidate, question: FitQuestion) -> Any:
    if candidate.tuning is not None:
        return FORMS[candidate.tuning.form]
    if question.method == "qlora":
        return FORMS["four"]
    setup = candidate.setup
    if candidate.streamed is not None:
        return "32 bits" if candidate.streamed.dtype == "float32" else "16 bits"
    dtype = setup.dtype if setup is not None else half_precision(question)
    if question.method == "full" and setup is None:
        dtype = "float32"
    return "32 bits" if dtype == "float32" else "16 bits"


def name_of(candidate: FitCandidate, question: FitQuestion) -> str:
    """A short name that distinguishes the strategy from others."""
    way = candidate.way
    shared = way.shared
    title = TITLES[shared.sharding] + (f" × {shared.gpus}" if shared.gpus > 1 else "")
    parts = [title if question.machine.gpu is not None else "CPU"]
    if candidate.streamed is not None:
        return ", ".join((*parts, "layers streamed from the host"))
    if way.own_step:
        parts.append("graft's own step")
    else:
        parts.append("graft's plain step" if way.engine == "graft" else "HF + PEFT")
    if way.checkpointed and not way.own_step:
        parts.append("checkpointed")
    if shared.offload != "none":
        parts.append("optimizer on the host" if shared.offload == "optimizer" else "all on the host")
    return ", ".join(parts)


def flops_per_token(question: FitQuestion) -> float:
    """Least operations per token: forward, and backward through the adapted layers."""
    shape = question.shape
    weights = shape.layers * active_layer_parameters(shape)
    table = shape.vocab_size * shape.hidden_size
    backward = 2 if question.method == "full" else 1
    learned = weights * question.adapted_layers / shape.layers
    return 2.0 * (weights + backward * learned) + 2.0 * table * (1 + backward) * question.trained_share


def most_tokens_per_second(question: FitQuestion, *, eight: bool = False) -> float | None:
    """All GPUs at their stated peak; None without a GPU."""
    gpu, machine = question.machine.gpu, question.machine
    if gpu is None:
        return None
    peak = gpu.half_tflops
    if eight and gpu.has_fp8 and gpu.eight_tflops is not None:
        peak = gpu.eight_tflops
    return machine.gpus * peak * 1e12 / flops_per_token(question)


def require_possible(question: FitQuestion, claimed: float, *, eight: bool = False) -> float:
    """Return the share of the peak that a claimed rate needs; an error if that is more than all."""
    gpu = question.machine.gpu
    most = most_tokens_per_second(question, eight=eight)
    if gpu is None or most is None:
        return 0.0
    share = claimed / most
    if share <= 1:
        return share
    flops = flops_per_token(question)
    needed = claimed * flops / 1e12
    has = needed / share
    raise UserError(
        f"{claimed:,.0f} tokens/s is not possible: it needs {needed:,.0f} of {has:,.0f} TFLOPS",
        why=f"a token of {question.model} takes {flops / 1e9:.1f} GFLOP at the very least",
        fix=f"the upper limit of {question.machine.name} is {most:,.0f} tokens/s: ask how that was measured",
        where="--claim",
    )


def time_spread(question: FitQuestion, level: Level) -> float:
    """Factor, either way, on seconds."""
    if question.machine.gpu is None and level != "probed":
        return CPU_TIME_SPREAD
    return TIME_SPREAD[level]


def speed_figure(candidate: FitCandidate, question: FitQuestion, level: Level) -> Figure:
    """Tokens per second over all GPUs; no end of the range exceeds the roofline."""
    spread, value = time_spread(question, level), candidate.tokens_per_second
    tuning = candidate.tuning
    eight = tuning is not None and "eight" in (tuning.form, tuning.head)
    roof = most_tokens_per_second(question, eight=eight)
    high = value * spread if roof is None else max(value, min(value * spread, roof))
    return Figure(value=value, low=value / spread, high=high, unit="tokens/s")


def consider(candidate: FitCandidate, question: FitQuestion, *, name: str, level: Level) -> Considered:
    return Considered(
        name=name,
        fits=fits(candidate, question, level),
        peak_reserved_gib=reserved_figure(candidate, question, level),
        gpu_gib=gpu_room(question, gpus=candidate.way.shared.gpus),
        host_gib=candidate.host,
        tokens_per_second=speed_figure(candidate, question, level),
        strategy=strategy_of(candidate, question),
    )


PROCESS_GIB = (2.0, 2.5, 3.5)
"""Python, torch and CUDA of one process on the host: least, usual, most (measured on small runs)."""
OFFLOADED_BYTES = (16.0, 17.0, 18.0)
"""Host bytes per trained parameter with its gradient, states and pinned buffers."""
DEEPSPEED_PADS = 1.5


def host_memory(question: FitQuestion, shared: Distribution, *, trainable: int, base_bytes: float) -> Figure:
    """GiB of the host over all processes."""
    low, usual, high = (gib * shared.gpus for gib in PROCESS_GIB)
    least, most = base_bytes / GIB, base_bytes / GIB
    if shared.sharding in ("fsdp2", "zero3") and question.engine == "graft":
        # Every process reads the whole base itself: its hash is proven before it is cut up.
        most = least = shared.gpus * base_bytes / GIB
    elif shared.offload != "weights":
        # Read shard by shard: of a file, pages that the system takes back where it must.
        least = 0.0
    down, middle, up = least, (least + most) / 2, most
    if shared.offload != "none":
        learned = tuple(trainable * size / GIB for size in OFFLOADED_BYTES)
        frozen = base_bytes / GIB if shared.offload == "weights" and question.method != "full" else 0.0
        # The reading is over when the states are made.
        down, middle, up = (
            max(read, states + frozen) for read, states in zip((down, middle, up), learned, strict=True)
        )
    return Figure(value=usual + middle, low=low + down, high=high + up, unit="GiB")


def padded_gb(question: FitQuestion) -> float:
    """Host memory that DeepSpeed's estimator gives for an offloaded optimizer, in 10⁹ bytes."""
    return total_parameters(question.shape) * OFFLOADED_BYTES[2] * DEEPSPEED_PADS / 1e9


LASTING = ("weights", "adapters", "optimizer", "reference")


def rows_at_once(question: FitQuestion, lasting: float, *, room: float, gpus: int) -> int:
    """Answers that a GPU generates in parallel: all of its own, or even rounds that fit."""
    most = max(-(-question.batch_size // gpus), 1)
    a_row = sum(_generation_bytes(question, rows=1).values())
    rounds = -(-most // max(min(most, int((room - lasting) // a_row)), 1))
    return -(-most // rounds)


def sampled_parts(question: FitQuestion) -> dict[str, float]:
    """Bytes of a GPU that `graft train` holds for the answers of a step, by purpose."""
    load = rollout_load(question)
    if load is None:
        return {}
    return sampling_memory(question.shape, load, width=2.0, recorded=True)


def _generation_bytes(question: FitQuestion, *, rows: int) -> dict[str, float]:
    prompt, completion = question.prompt_tokens, question.completion_tokens
    return launched_bytes(question.shape, prompt=prompt, completion=completion, rows=rows)


def generation_seconds(
    question: FitQuestion, *, rows: int, gpus: int, rates: StepRates, training: float
) -> dict[str, float]:
    """Seconds of a step before anything is learned: each GPU generates its own rows."""
    rows_per_gpu = max(-(-question.batch_size // gpus), 1)
    prompts = (
        rows_per_gpu * question.prompt_tokens * 2.0 * question.shape.layers * layer_parameters(question.shape)
    )
    graded = rows_per_gpu * question.reward_seconds / graders(question)
    a_round = launched_seconds(
        question.shape,
        prompt=question.prompt_tokens,
        completion=question.completion_tokens,
        rows=min(rows, rows_per_gpu),
        rates=rates,
        four_bits=question.method == "qlora",
    )
    load = rollout_load(question)
    # TRL's reference reads every answer.
    read = 1.0 if load is None else forward_rows(load, own_step=False) / load.rows
    return {
        "generation": -(-rows_per_gpu // rows) * a_round,
        "reading prompts": prompts / rates.half,
        "reference": FORWARD_SHARE * read * training,
        **({"rewards": graded} if graded else {}),
    }


def say_why(question: FitQuestion) -> tuple[str, ...]:
    """GRPO compared with PPO, in figures."""
    copy = total_parameters(question.shape) * 2.0 / GIB
    tokens = question.prompt_tokens + question.completion_tokens
    cache = cache_bytes(question.shape, tokens=tokens, rows=question.generations, width=2.0) / GIB
    first = (
        f"GRPO needs no reference copy: it is the base with its adapters off; PPO would add a value model of "
        f"{copy:.1f} GiB in 16 bits, with its own gradients and states"
        if question.method != "full"
        else f"with full weights GRPO keeps a reference copy of {copy:.1f} GiB; PPO would add a value model "
        "of that size, with its own gradients and states"
    )
    return (first, f"keys and values of {question.generations} answers to a prompt take {cache:.2f} GiB")


GENERATION_SHARE = 0.88
"""Share of the room for answers in parallel: the rest covers inexact estimates."""


def plain_candidate(
    question: FitQuestion,
    way: StrategyOption,
    *,
    rates: StepRates,
    correction: float = 1.0,
    exact: bool = False,
) -> FitCandidate:
    """Memory at the longest row, time at the mean one. `exact` computes memory tensor by tensor."""
    shared, longest = way.shared, max(question.lengths)
    run = plain_run(question, rates=rates, correction=correction)
    setup = plain_setup(
        question, sharding=shared.sharding, rows=way.micro_rows, tokens=longest, checkpointed=way.checkpointed
    )
    peak = peak_of_each(run, setup, shared, exact=exact)
    passes = -(-question.batch_size // (way.micro_rows * shared.gpus))
    usual = setup.model_copy(update={"tokens": round(expected_longest(question.lengths, way.micro_rows))})
    parts = plain_step_parts(run, usual, shared, passes=passes)
    mean = sum(question.lengths) / len(question.lengths)
    if question.algorithm == "grpo":
        peak, generation_parts = _with_generation(
            question, run, setup, shared, peak, training=sum(parts.values())
        )
        parts |= generation_parts
    base = run.base_bytes(setup)
    return FitCandidate(
        way=way,
        setup=setup,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=host_memory(question, shared, trainable=run.trainable, base_bytes=base),
        seconds_per_step=sum(parts.values()),
        step_parts=parts,
        tokens_per_step=question.batch_size * mean,
        passes=passes,
    )


def plain_run(question: FitQuestion, *, rates: StepRates, correction: float) -> PlainRun:
    return PlainRun(
        shape=question.shape,
        architecture=question.architecture,
        trainable=trained(question),
        half=half_precision(question),
        rates=rates,
        machine=question.machine,
        predicted=question.trained_share if question.engine == "graft" else 1.0,
        correction=correction,
    )


def _with_generation(
    question: FitQuestion,
    run: PlainRun,
    setup: PlainSetup,
    shared: Distribution,
    peak: MemoryPeak,
    *,
    training: float,
) -> tuple[MemoryPeak, dict[str, float]]:
    """The peak and the seconds including the generation of answers before they are learned from."""
    if question.method == "full":
        # Without adapters to turn off, the reference is a second copy in 16 bits.
        peak = peak.plus({"reference": total_parameters(question.shape) * 2.0})
    lasting = {name: peak.parts.get(name, 0.0) for name in LASTING}
    # Where weights are cut up, TRL gathers them to generate.
    whole = run.base_bytes(setup) if shared.sharding in ("zero3", "fsdp2") else 0.0
    room = gpu_room(question, gpus=shared.gpus).value * GIB * GENERATION_SHARE
    rows = rows_at_once(
        question,
        max(sum(lasting.values()), whole),
        room=max(room, peak.allocated),
        gpus=shared.gpus,
    )
    seconds = generation_seconds(question, rows=rows, gpus=shared.gpus, rates=run.rates, training=training)
    if sampled := sampled_parts(question):
        # Recorded passes keep their memory while a step is computed: both are there.
        return peak.plus(sampled), seconds
    lasting["weights"] = max(lasting["weights"], whole)
    passing = _generation_bytes(question, rows=rows)
    generating = sum(lasting.values()) + sum(passing.values())
    if generating <= peak.allocated:
        return peak, seconds
    unallocated = max(peak.reserved - peak.allocated, 0.02 * sum(passing.values()))
    parts = {name: size for name, size in lasting.items() if size} | passing
    generation = MemoryPeak(
        allocated=generating, reserved=generating + unallocated, parts=parts, phase="generation"
    )
    return generation, seconds


def trained(question: FitQuestion) -> int:
    return adapter_parameters(
        question.shape,
        rank=question.rank,
        targets=question.targets,
        layers=question.adapted_layers,
        method=question.method,
        experts=question.experts,
    )


ALONE = Distribution("none", "none", 1)
LARGE_PARAMETERS = 1e9
"""8-bit products are used only above: small models are fast in 16 bits, and lose most with 8."""
LEAST_CHUNK, LEAST_HEAD = 1024, 256
FAR_BEYOND = 1.15
"""Factor on the room beyond which no allocator setting helps."""
HALF_BYTES = 2.0


def own_limit(question: FitQuestion) -> float:
    """GiB that `graft train` lets its own step use: the stated limit, else a share of the memory, less what
    sampling needs between steps.
    """
    room, gpu = gpu_room(question, gpus=1).value, question.machine.gpu
    if question.memory_limit_gib is None and gpu is not None:
        room = min(room, gpu.memory_gib * GPU_SHARE)
    return max(room - sampled_bytes(question) / GIB, 0.0)


def sampled_bytes(question: FitQuestion) -> float:
    """Memory on a GPU for the answers of a step that are sampled together."""
    return sum(sampled_parts(question).values())


def own_step_candidates(question: FitQuestion, *, rates: StepRates, level: Level) -> list[FitCandidate]:
    """The fastest tuning that fits; if none does, the leanest one. A tuning that fills the GPU needs a
    fallback; if it has none, one with a margin is used.
    """
    room, spread = own_limit(question), RESERVED_SPREAD[level]
    for limit in (room, room / (1 + spread)):
        tuning = _tune(question, limit=limit, rates=rates)
        if tuning is None:
            # Under a lower limit there is nothing either.
            break
        if min(_floor(question, tuning), tuning.peak_gib * GIB) * (1 + spread) <= room * GIB:
            return [_candidate(question, tuning, rates=rates)]
    return [_candidate(question, leanest_tuning(question), rates=rates)]


def _floor(question: FitQuestion, tuning: Tuning) -> float:
    """Bytes with nothing kept, the least that the engine can reduce itself to."""
    bare = tuning.model_copy(update={"keep": 0, "lean": 0})
    return peak_bytes(question.shape, bare, trainable=trained(question), adapted=question.adapted_layers)


def may_fit(question: FitQuestion, *, spread: float) -> bool:
    """Return whether the leanest tuning fits, by the formula only: fast enough for frequent calls."""
    room = own_limit(question) * GIB
    lean = leanest_tuning(question)
    return lean.peak_gib * GIB * (1 + spread) <= room and load_peak(question.shape, lean) <= room


def leanest_tuning(question: FitQuestion) -> Tuning:
    """The tuning with the least memory, at any cost in time; with the head as it can be loaded."""
    longest, eight, limit = max(question.lengths), uses_eight(question), own_limit(question)
    tunings = []
    for head in heads(question.shape, eight=eight):
        lean = Tuning(
            form="four" if question.method == "qlora" else "eight" if eight else "whole",
            head=head,
            micro_tokens=longest,
            longest=longest,
            keep=0,
            lean=0,
            chunk_tokens=min(LEAST_CHUNK, longest),
            head_tokens=min(LEAST_HEAD, longest),
            turned=False,
            host_embedding=True,
            recorded=True,
            limit_gib=limit,
            peak_gib=0.0,
            seconds_per_token=0.0,
        )
        tunings.append(lean.model_copy(update={"peak_gib": _floor(question, lean) / GIB}))
    loadable = [tuning for tuning in tunings if load_peak(question.shape, tuning) <= limit * GIB]
    if loadable:
        return min(loadable, key=lambda tuning: tuning.peak_gib)
    return min(tunings, key=lambda tuning: load_peak(question.shape, tuning))


def uses_eight(question: FitQuestion) -> bool:
    """Whether frozen weights are multiplied in 8 bits, as `train.fp8: auto` decides."""
    gpu = question.machine.gpu
    return gpu is not None and gpu.has_fp8 and total_parameters(question.shape) >= LARGE_PARAMETERS


def _tune(question: FitQuestion, *, limit: float, rates: StepRates) -> Tuning | None:
    tokens = step_tokens(question)
    request = TuningRequest(
        method=question.method,
        adapted=question.adapted_layers,
        trainable=trained(question),
        step_tokens=round(tokens),
        longest=max(question.lengths),
        eight=uses_eight(question),
        compile="auto",
        run_tokens=tokens / question.batch_size * question.rows * question.epochs,
    )
    return _chosen(question.shape.model_dump_json(), request, limit, rates.model_dump_json())


@lru_cache(maxsize=512)
def _chosen(shape: str, request: TuningRequest, limit: float, rates: str) -> Tuning | None:
    """Cached: many questions differ only in things that the tuning does not depend on."""
    return choose_tuning(
        ModelShape.model_validate_json(shape),
        request,
        limit_gib=limit,
        rates=StepRates.model_validate_json(rates),
    )


@lru_cache(maxsize=512)
def _peak(shape: str, tuning: str, trainable: int, adapted: int) -> MemoryPeak:
    return gpu_peak(
        ModelShape.model_validate_json(shape),
        Tuning.model_validate_json(tuning),
        trainable=trainable,
        adapted=adapted,
    )


def step_tokens(question: FitQuestion) -> float:
    return question.batch_size * sum(question.lengths) / len(question.lengths)


def _candidate(question: FitQuestion, tuning: Tuning, *, rates: StepRates) -> FitCandidate:
    shape, trainable, adapted = question.shape, trained(question), question.adapted_layers
    tokens = step_tokens(question)
    rows = max(round(tuning.micro_tokens * question.batch_size / tokens), 1)
    parts = gpu_step_parts(
        shape,
        tuning,
        TrainedPart(adapted, trainable, rates),
        RowStatistics.of(question.lengths, trained_share=question.trained_share),
        tokens=tokens,
    )
    parts |= sampling_parts(question, tuning, rates=rates, training=sum(parts.values()))
    if tuning.peak_gib > FAR_BEYOND * tuning.limit_gib:
        # What does not fit by far, without the allocator: replaying many layers takes long, for nothing.
        top = count(step_recipe(shape, tuning, trainable=trainable, adapted=adapted))
        reserved = max(float(top.bytes), tuning.peak_gib * GIB)
        peak = MemoryPeak(allocated=top.bytes, reserved=reserved, parts=top.parts, phase=top.phase)
    else:
        peak = _peak(shape.model_dump_json(), tuning.model_dump_json(), trainable, adapted)
    loaded, floor = load_peak(shape, tuning), min(_floor(question, tuning), peak.reserved)
    if loaded > own_limit(question) * GIB:
        # It is over before the first step.
        peak = peak.model_copy(update={"reserved": float(max(loaded, peak.reserved)), "phase": "loading"})
        floor = float(loaded)
    # Recorded passes keep their memory while a step is computed: both are there.
    peak, floor = peak.plus(sampled_parts(question)), floor + sampled_bytes(question)
    return FitCandidate(
        way=StrategyOption("graft", True, ALONE, rows, adapted - tuning.keep),
        setup=None,
        tuning=tuning,
        peak=peak,
        floor=floor,
        host=host_memory(
            question, ALONE, trainable=trainable, base_bytes=total_parameters(shape) * HALF_BYTES
        ),
        seconds_per_step=sum(parts.values()),
        step_parts=parts,
        tokens_per_step=tokens,
        passes=gpu_passes(tuning, tokens),
    )


def sampling_parts(
    question: FitQuestion, tuning: Tuning, *, rates: StepRates, training: float
) -> dict[str, float]:
    """Seconds of a step besides training: generation for GRPO, the reference pass of DPO."""
    load = rollout_load(question)
    if load is not None:
        sampling = gpu_seconds(question.shape, load, rates=rates, weight_bytes=weight_width(tuning))
        read = forward_rows(load, own_step=True) / load.rows
        return sampling | {"reference": FORWARD_SHARE * read * training}
    # The packed step needs the log-probabilities of a pair before its gradient.
    return {"comparing": FORWARD_SHARE * training} if question.algorithm == "dpo" else {}
