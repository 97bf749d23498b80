"""The plain step as a candidate: memory of card and host, seconds of a step, GRPO's generation. Pure.

In: a question, how the run is shared, what the card reaches. Out: a FitCandidate. Plain means transformers
and PEFT, or the step of `graft train` for families that it has no step of its own for.
"""

from graftwork.costmodel.distributed import Distribution, PlainRun, plain_step_parts
from graftwork.costmodel.plain_memory import peak_of_each
from graftwork.costmodel.plain_time import expected_longest
from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import (
    FORWARD_SHARE,
    forward_rows,
    launched_bytes,
    launched_seconds,
    sampling_memory,
)
from graftwork.model.shape import adapter_parameters, cache_bytes, layer_parameters, total_parameters
from graftwork.plan.fit.candidate import FitCandidate, StrategyOption
from graftwork.plan.fit.question import card_room, graders, half_precision, plain_setup, rollout_load
from graftwork.records.base import Figure
from graftwork.records.plan import FitQuestion, MemoryPeak, PlainSetup
from graftwork.records.units import GIB

PROCESS_GIB = (2.0, 2.5, 3.5)
"""Python, torch and CUDA of one process on the host: least, usual, most (measured on small runs)."""
OFFLOADED_BYTES = (16.0, 17.0, 18.0)
"""A learned parameter with its gradient, states and pinned buffers on the host."""
DEEPSPEED_PADS = 1.5


def host_memory(question: FitQuestion, shared: Distribution, *, trainable: int, base_bytes: float) -> Figure:
    """GiB of the host over all processes."""
    low, usual, high = (gib * shared.cards for gib in PROCESS_GIB)
    least, most = base_bytes / GIB, base_bytes / GIB
    if shared.sharding in ("fsdp2", "zero3") and question.engine == "graft":
        # Every process reads the whole base itself: its hash is proven before it is cut up.
        most = least = shared.cards * base_bytes / GIB
    elif shared.offload != "weights":
        # Read shard by shard: of a file, pages that the system takes back where it must.
        least = 0.0
    down, middle, up = least, (least + most) / 2, most
    if shared.offload != "none":
        learned = tuple(trainable * size / GIB for size in OFFLOADED_BYTES)
        frozen = base_bytes / GIB if shared.offload == "weights" and question.method != "full" else 0.0
        # The reading is over when the states are made.
        down, middle, up = (
            max(read, one + frozen) for read, one in zip((down, middle, up), learned, strict=True)
        )
    return Figure(value=usual + middle, low=low + down, high=high + up, unit="GiB")


def padded_gb(question: FitQuestion) -> float:
    """What DeepSpeed's estimator would ask of the host for an offloaded optimizer, in 10⁹ bytes."""
    return total_parameters(question.shape) * OFFLOADED_BYTES[2] * DEEPSPEED_PADS / 1e9


LASTING = ("weights", "adapters", "optimizer", "reference")


def rows_at_once(question: FitQuestion, lasting: float, *, room: float, cards: int) -> int:
    """Answers that a card generates side by side: all of its own, or even rounds that there is room for."""
    most = max(-(-question.batch_rows // cards), 1)
    a_row = sum(_generation_bytes(question, rows=1).values())
    rounds = -(-most // max(min(most, int((room - lasting) // a_row)), 1))
    return -(-most // rounds)


def sampled_parts(question: FitQuestion) -> dict[str, float]:
    """Bytes of a card that `graft train` holds for the answers of a step, by what they are for."""
    load = rollout_load(question)
    if load is None:
        return {}
    return sampling_memory(question.shape, load, width=2.0, recorded=True)


def _generation_bytes(question: FitQuestion, *, rows: int) -> dict[str, float]:
    prompt, completion = question.prompt_tokens, question.completion_tokens
    return launched_bytes(question.shape, prompt=prompt, completion=completion, rows=rows)


def generation_seconds(
    question: FitQuestion, *, rows: int, cards: int, rates: StepRates, training: float
) -> dict[str, float]:
    """Seconds of a step that are spent before anything is learned: each card generates its own rows."""
    own = max(-(-question.batch_rows // cards), 1)
    prompts = own * question.prompt_tokens * 2.0 * question.shape.layers * layer_parameters(question.shape)
    graded = own * question.reward_seconds / graders(question)
    a_round = launched_seconds(
        question.shape,
        prompt=question.prompt_tokens,
        completion=question.completion_tokens,
        rows=min(rows, own),
        rates=rates,
        four_bits=question.method == "qlora",
    )
    load = rollout_load(question)
    # TRL's reference reads every answer.
    read = 1.0 if load is None else forward_rows(load, own_step=False) / load.rows
    return {
        "generation": -(-own // rows) * a_round,
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
"""Of the room, what answers may fill side by side: the rest is for what is not known to the last byte."""


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
    passes = -(-question.batch_rows // (way.micro_rows * shared.cards))
    usual = setup.model_copy(update={"tokens": round(expected_longest(question.lengths, way.micro_rows))})
    parts = plain_step_parts(run, usual, shared, passes=passes)
    mean = sum(question.lengths) / len(question.lengths)
    if question.algorithm == "grpo":
        peak, more = _with_generation(question, run, setup, shared, peak, training=sum(parts.values()))
        parts |= more
    base = run.base_bytes(setup)
    return FitCandidate(
        way=way,
        setup=setup,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=host_memory(question, shared, trainable=run.trainable, base_bytes=base),
        seconds_a_step=sum(parts.values()),
        step_parts=parts,
        tokens_a_step=question.batch_rows * mean,
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
    """The peak and the seconds with the answers that are generated before they are learned from."""
    if question.method == "full":
        # Without adapters to turn off, the reference is a second copy in 16 bits.
        peak = peak.plus({"reference": total_parameters(question.shape) * 2.0})
    lasting = {name: peak.parts.get(name, 0.0) for name in LASTING}
    # Where weights are cut up, TRL gathers them to generate.
    whole = run.base_bytes(setup) if shared.sharding in ("zero3", "fsdp2") else 0.0
    room = card_room(question, cards=shared.cards).value * GIB * GENERATION_SHARE
    rows = rows_at_once(
        question,
        max(sum(lasting.values()), whole),
        room=max(room, peak.allocated),
        cards=shared.cards,
    )
    seconds = generation_seconds(question, rows=rows, cards=shared.cards, rates=run.rates, training=training)
    if sampled := sampled_parts(question):
        # Recorded passes keep their memory while a step is computed: both are there.
        return peak.plus(sampled), seconds
    lasting["weights"] = max(lasting["weights"], whole)
    passing = _generation_bytes(question, rows=rows)
    generating = sum(lasting.values()) + sum(passing.values())
    if generating <= peak.allocated:
        return peak, seconds
    beyond = max(peak.reserved - peak.allocated, 0.02 * sum(passing.values()))
    parts = {name: size for name, size in lasting.items() if size} | passing
    generation = MemoryPeak(
        allocated=generating, reserved=generating + beyond, parts=parts, phase="generation"
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
