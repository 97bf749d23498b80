"""`graft train`'s own step on one card: the best tunings within its memory, as candidates. Pure.

In: a question, what the card reaches. Out: candidates. The engine measures its first step and keeps less
where that was too much; so what decides is whether the leanest tuning fits.
"""

from functools import lru_cache

from graftwork.costmodel.distributed import Distribution
from graftwork.costmodel.gpu_memory import count, gpu_peak, load_peak, peak_bytes
from graftwork.costmodel.gpu_step import step_recipe
from graftwork.costmodel.gpu_time import RowStatistics, TrainedPart, gpu_passes, gpu_step_parts
from graftwork.costmodel.gpu_tuning import GPU_SHARE, TuningRequest, choose_tuning, heads
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import FORWARD_SHARE, forward_rows, gpu_seconds, weight_width
from graftwork.model.shape import total_parameters
from graftwork.plan.fit.candidate import RESERVED_SPREAD, FitCandidate, StrategyOption
from graftwork.plan.fit.plain_step import host_memory, sampled_parts, trained
from graftwork.plan.fit.question import card_room, rollout_load
from graftwork.records.plan import FitQuestion, Level, MemoryPeak, ModelShape, Tuning
from graftwork.records.units import GIB

ALONE = Distribution("none", "none", 1)
LARGE_PARAMETERS = 1e9
"""8-bit products only above: small models are quick in 16 bits, and 8 cost them most."""
LEAST_CHUNK, LEAST_HEAD = 1024, 256
FAR_BEYOND = 1.15
"""Times the room: no allocator makes that good."""
HALF_BYTES = 2.0


def own_limit(question: FitQuestion) -> float:
    """GiB that `graft train` lets its own step take: what is stated, else a share of what there is, less
    what answers are sampled in between steps."""
    room, gpu = card_room(question, cards=1).value, question.machine.gpu
    if question.memory_limit_gib is None and gpu is not None:
        room = min(room, gpu.memory_gib * GPU_SHARE)
    return max(room - sampled_bytes(question) / GIB, 0.0)


def sampled_bytes(question: FitQuestion) -> float:
    """Of a card, for the answers of a step that are sampled together."""
    return sum(sampled_parts(question).values())


def own_step_candidates(question: FitQuestion, *, rates: StepRates, level: Level) -> list[FitCandidate]:
    """The fastest tuning that fits; where none does, the leanest that there is.

    A tuning that fills the card needs room to give way; where it has none, one with a margin is taken.
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
    """Bytes with nothing kept, which is what the engine comes down to by itself."""
    bare = tuning.model_copy(update={"keep": 0, "lean": 0})
    return peak_bytes(question.shape, bare, trainable=trained(question), adapted=question.adapted_layers)


def may_fit(question: FitQuestion, *, spread: float) -> bool:
    """Whether the leanest tuning has room, by the formula alone: quick enough to be asked often."""
    room = own_limit(question) * GIB
    lean = leanest_tuning(question)
    return lean.peak_gib * GIB * (1 + spread) <= room and load_peak(question.shape, lean) <= room


def leanest_tuning(question: FitQuestion) -> Tuning:
    """The tuning that needs the least, whatever it costs in time; with the head as it can be loaded."""
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
            seconds_a_token=0.0,
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
        run_tokens=tokens / question.batch_rows * question.rows * question.epochs,
    )
    return _chosen(question.shape.model_dump_json(), request, limit, rates.model_dump_json())


@lru_cache(maxsize=512)
def _chosen(shape: str, request: TuningRequest, limit: float, rates: str) -> Tuning | None:
    """Cached: many questions differ only in something that the tuning does not depend on."""
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
    return question.batch_rows * sum(question.lengths) / len(question.lengths)


def _candidate(question: FitQuestion, tuning: Tuning, *, rates: StepRates) -> FitCandidate:
    shape, trainable, adapted = question.shape, trained(question), question.adapted_layers
    tokens = step_tokens(question)
    rows = max(round(tuning.micro_tokens * question.batch_rows / tokens), 1)
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
        seconds_a_step=sum(parts.values()),
        step_parts=parts,
        tokens_a_step=tokens,
        passes=gpu_passes(tuning, tokens),
    )


def sampling_parts(
    question: FitQuestion, tuning: Tuning, *, rates: StepRates, training: float
) -> dict[str, float]:
    """Seconds of a step besides training: answers of GRPO, the comparing pass of DPO."""
    load = rollout_load(question)
    if load is not None:
        sampling = gpu_seconds(question.shape, load, rates=rates, weight_bytes=weight_width(tuning))
        read = forward_rows(load, own_step=True) / load.rows
        return sampling | {"reference": FORWARD_SHARE * read * training}
    # The packed step needs the log-probabilities of a pair before its gradient.
    return {"comparing": FORWARD_SHARE * training} if question.algorithm == "dpo" else {}
