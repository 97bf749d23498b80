"""How long each stage of a run takes, besides training, which has a plan of its own. Pure.

Input: the size of the logs, the prompts and answers of those who are evaluated, the machine, how far earlier
estimates of the same stage were off. Output: seconds of each stage, by what they are spent on: answering is
reading prompts, writing answers and recording passes on a GPU, in batches and one at a time. Constants were
measured on two cores and on an H200; ranges are wide until the stage has run here a few times.
"""

import math
from collections.abc import Mapping, Sequence

from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import TOKEN_SECONDS_PER_BLOCK
from graftwork.costmodel.run import engine_start
from graftwork.model.generate.scheduler import PREFILL_TOKENS, DecoderSizes
from graftwork.model.shape import (
    active_layer_parameters,
    active_parameters,
    cache_bytes,
    total_parameters,
)
from graftwork.plan.catalog.hardware import GUESSED_GFLOPS_PER_THREAD, default_rates
from graftwork.plan.estimate import pool_runs
from graftwork.records.base import Figure, Record
from graftwork.records.plan import DeviceFacts, ModelShape, Residual

READING_SHARE, PADDED_READING_SHARE = 0.84, 0.60
"""Share of a CPU's matrix rate that reading prompts reaches: packed, and padded by the model's own pass
(SmolLM2, one core: 78 and 56 of 92 GFLOP/s).
"""
WRITING_SHARE = 0.72
"""The same for rows that are generated together, besides reading the weights and their keys (SmolLM2, 72
rows).
"""
BLOCK_SECONDS = 2.5e-4
"""Overhead per block of a pass over one token on a CPU, besides products: small operations."""
GUESSED_WEIGHTS_S = 10e9
"""Bytes per second that products with one row read, if not measured."""
LAUNCHED_BLOCK_SECONDS = 1.0e-3
"""Time per block of a pass that is not recorded on a GPU: the host launches it kernel by kernel (H200: 22 ms
for a token of 30 blocks with transformers, and half as much again for the code around it).
"""
RECORDING_PASSES = 3
"""Two passes to warm up and one to record."""
CHOOSING_SECONDS = 3e-4
"""Time on a GPU to choose the tokens of a pass and send them to the host."""


class AnswerLoad(Record):
    """Prompts that one model answers, and the settings."""

    cases: int
    rows: int
    """Most rows answered together."""
    prompt_tokens: float
    shared_tokens: float = 0.0
    """First tokens that all prompts have in common: read once per batch."""
    answer_tokens: float
    """Mean."""
    longest_answer: float
    """Passes that a batch takes; it ends with its longest answer."""

    @property
    def batches(self) -> int:
        return math.ceil(self.cases / max(self.rows, 1))

    @property
    def read_tokens(self) -> float:
        return self.batches * self.shared_tokens + self.cases * (self.prompt_tokens - self.shared_tokens)

    @property
    def columns(self) -> float:
        """Columns that a token attends to, on average."""
        return self.prompt_tokens + self.answer_tokens / 2


def alone(load: AnswerLoad) -> AnswerLoad:
    """A single request: nothing is shared, and it ends with its own last token."""
    return load.model_copy(
        update={"cases": 1, "rows": 1, "shared_tokens": 0.0, "longest_answer": load.answer_tokens}
    )


def cpu_answers(
    shape: ModelShape, load: AnswerLoad, *, gflops: float, weights_s: float | None
) -> dict[str, float]:
    """On a CPU with this matrix rate, and this rate of reading weights in thin products."""
    rate, reading_rate = gflops * 1e9, weights_s or GUESSED_WEIGHTS_S
    share = PADDED_READING_SHARE if shape.architecture else READING_SHARE
    tokens = load.cases * load.answer_tokens
    passes = load.batches * load.longest_answer
    # Each pass reads the weights once; each row of it its own keys and values.
    fixed = 4.0 * total_parameters(shape) / reading_rate + shape.layers * BLOCK_SECONDS
    keys = cache_bytes(shape, tokens=load.columns, rows=1, width=4.0) / reading_rate
    a_token = 2.0 * active_parameters(shape) / (rate * WRITING_SHARE) if load.rows > 1 else 0.0
    return {
        "reading": load.read_tokens * _read_flops(shape, load) / (rate * share),
        "writing": passes * fixed + tokens * (a_token + keys),
    }


def gpu_answers(shape: ModelShape, load: AnswerLoad, *, rates: StepRates) -> dict[str, float]:
    """On a GPU, which replays a recorded pass for every token and launches those over prompts."""
    sizes = DecoderSizes(padded=True)
    rows = sizes.rows(min(load.rows, load.cases))
    read = math.ceil(load.read_tokens / PREFILL_TOKENS) + load.batches
    weights = 2.0 * active_parameters(shape)
    columns = sizes.columns(math.ceil(load.prompt_tokens + load.longest_answer))
    bytes_read = weights + cache_bytes(shape, tokens=columns, rows=rows, width=2.0)
    products = rows * 2.0 * active_parameters(shape) / rates.half
    a_pass = shape.layers * TOKEN_SECONDS_PER_BLOCK + max(bytes_read / rates.bandwidth, products)
    return {
        "reading": read * shape.layers * LAUNCHED_BLOCK_SECONDS
        + load.read_tokens * _read_flops(shape, load) / rates.half,
        "writing": load.batches * load.longest_answer * (a_pass + CHOOSING_SECONDS),
    }


def recording_answers(shape: ModelShape, *, sizes: int) -> float:
    """Seconds in which a GPU records passes of this many sizes."""
    return sizes * RECORDING_PASSES * shape.layers * LAUNCHED_BLOCK_SECONDS


def _read_flops(shape: ModelShape, load: AnswerLoad) -> float:
    """Floating-point operations to read one token of a prompt: products with weights, and attention to half
    of the prompt.
    """
    attention = 2.0 * load.prompt_tokens * shape.heads * shape.head_dim
    return shape.layers * (2.0 * active_layer_parameters(shape) + attention)


MEASURED = ("audit", "prepare", "plan", "evaluate", "gate", "release", "try", "report")
"""Stages whose time is recorded here. Training has its own residuals."""
FIXED_SECONDS = {
    "audit": 1.8,
    "prepare": 0.5,
    "plan": 2.5,
    "evaluate": 0.5,
    "gate": 0.1,
    "release": 0.2,
    "try": 1.0,
    "report": 0.3,
}
"""Fixed time of a stage. `plan` waits for the imports of the process that measures the machine; `try`
verifies the release, and stops the endpoint.
"""
BYTES_PER_SECOND = {"audit": 2.5e6, "prepare": 1.5e6}
"""Bytes of logs per second on two cores."""
GRADE_SECONDS = 2e-3
"""Time to grade one answer, without code to run and without a judge."""
RECORDED_SIZES, TRIED_SIZES = 4, 3
"""Passes that a GPU records for each subject: tokens of a batch, tokens and prompts of single requests. And
those of the serving check."""
SPREAD = {"audit": 4.0, "prepare": 4.0, "evaluate": 1.6, "try": 2.0}
USUAL_SPREAD, GUESSED_SPREAD = 2.5, 3.0


class StageFacts(Record):
    """Facts that the time of the stages depends on."""

    log_bytes: int
    shape: ModelShape | None = None
    device: DeviceFacts
    rates: StepRates | None = None
    """Rates of a GPU, if known."""
    forked: bool = True
    """Whether workers are forked from a process that has done their imports."""
    answers: tuple[AnswerLoad, ...] = ()
    """Load of each subject of the evaluation: base and adapter, the champion, others."""
    tried: AnswerLoad | None = None
    """Load of the serving check."""
    timed_cases: int = 0
    repeats: int = 1


def stage_parts(stage: str, facts: StageFacts) -> dict[str, float]:
    """Seconds by purpose."""
    parts = {"fixed": FIXED_SECONDS[stage]}
    if stage in BYTES_PER_SECOND:
        parts["logs"] = facts.log_bytes / BYTES_PER_SECOND[stage]
    if facts.shape is None:
        return parts
    if stage == "evaluate" and facts.answers:
        parts |= _evaluate(facts, facts.shape)
    if stage == "try" and facts.tried is not None:
        parts |= _engine_start(facts, facts.shape)
        parts |= _answer(facts, facts.shape, facts.tried)
        parts |= _recording(facts, facts.shape, sizes=TRIED_SIZES)
    return parts


def estimate_stage(stage: str, facts: StageFacts) -> Figure:
    """The estimate before any run of this stage here."""
    spread = SPREAD.get(stage, USUAL_SPREAD)
    if stage in ("evaluate", "try") and facts.device.gflops is None:
        spread = GUESSED_SPREAD
    free = facts.model_copy(update={"device": facts.device.when_free})
    now, when_free = (sum(stage_parts(stage, scenario).values()) for scenario in (facts, free))
    return Figure(value=now, low=min(now, when_free) / spread, high=now * spread, unit="s")


def pool_stage(stage: str, prior: Figure, past: Sequence[Residual]) -> tuple[Figure, int]:
    """The estimate corrected by the errors of earlier ones, and their number."""
    spread, ratios = SPREAD.get(stage, USUAL_SPREAD), []
    for residual in past:
        planned, actual = residual.planned, residual.actual
        if residual.name == residual_name(stage) and planned.value > 0:
            # How far it was off besides what others' load explains: it was planned for a machine as busy as
            # when it was measured, and done on one that was as busy, free, or between.
            when_free = min(planned.low * spread, planned.value)
            ratios.append(actual / min(max(actual, when_free), planned.value))
    pooled = pool_runs(prior, [prior.value * ratio for ratio in ratios])
    if prior.low * spread < prior.value * (1 - 1e-9):
        # The machine is busy now, and may become free.
        pooled = pooled.model_copy(update={"low": min(pooled.low, prior.low)})
    return pooled, len(ratios)


MODEL = 2
"""Incremented when estimates change: errors of earlier ones then do not apply."""


def residual_name(stage: str) -> str:
    return f"stage.{stage}.{MODEL}"


def add_up(seconds: Mapping[str, Figure]) -> Figure:
    """Stages of one run meet the same load, so the ends of their ranges add up. In minutes."""
    figures = seconds.values()
    return Figure(
        value=sum(figure.value for figure in figures) / 60,
        low=sum(figure.low for figure in figures) / 60,
        high=sum(figure.high for figure in figures) / 60,
        unit="min",
    )


def _evaluate(facts: StageFacts, shape: ModelShape) -> dict[str, float]:
    """On a CPU each subject has its own process, and one more times single requests in turn; on a GPU one
    process does everything.
    """
    subjects = len(facts.answers)
    on_gpu = facts.device.kind == "cuda"
    processes = 1 if on_gpu else subjects + bool(facts.timed_cases)
    # The first request of each subject is not timed.
    requests = facts.timed_cases + 1 if facts.timed_cases else 0
    requests += on_gpu
    answered = [_answer(facts, shape, load) for load in facts.answers]
    asked_alone = [_answer(facts, shape, alone(load)) for load in facts.answers]
    return {
        **{name: processes * seconds for name, seconds in _engine_start(facts, shape).items()},
        **_recording(facts, shape, sizes=RECORDED_SIZES * subjects),
        "reading": facts.repeats * sum(parts["reading"] for parts in answered),
        "writing": facts.repeats * sum(parts["writing"] for parts in answered),
        "single requests": requests * sum(sum(parts.values()) for parts in asked_alone),
        # The log is graded too.
        "grading": GRADE_SECONDS * facts.answers[0].cases * facts.repeats * (subjects + 1),
    }


def _engine_start(facts: StageFacts, shape: ModelShape) -> dict[str, float]:
    return engine_start(facts.device.kind, parameters=total_parameters(shape), forked=facts.forked)


def _recording(facts: StageFacts, shape: ModelShape, *, sizes: int) -> dict[str, float]:
    return {"recording": recording_answers(shape, sizes=sizes)} if facts.device.kind == "cuda" else {}


def _answer(facts: StageFacts, shape: ModelShape, load: AnswerLoad) -> dict[str, float]:
    device = facts.device
    if device.kind == "cuda":
        return gpu_answers(shape, load, rates=facts.rates or default_rates())
    gflops = device.gflops or GUESSED_GFLOPS_PER_THREAD * device.threads
    return cpu_answers(shape, load, gflops=gflops, weights_s=device.weights_s)
