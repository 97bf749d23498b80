"""What waits in host memory, and what it costs to fetch it. Pure.

In: how a run is shared and how many parameters it has. Out: GiB of the host, and seconds of transfers and of
Adam on the processor. The bytes a parameter are DeepSpeed's own (16 to 18); its estimators add half as
much again, which we say and do not reckon with.
"""

from typing import NamedTuple

from graftwork.costmodel.plain_memory import (
    WIDTH,
    Distribution,
    exact_peak,
    is_cut_up,
    passing_setup,
    quick_peak,
    share,
)
from graftwork.costmodel.time import StepRates, link_seconds, plain_step
from graftwork.model.shape import adapter_parameters, layer_parameters, total_parameters
from graftwork.plan.fit.candidate import FitCandidate, StrategyOption
from graftwork.plan.fit.question import card_room, expected_longest, half_precision, plain_setup
from graftwork.records.figure import Figure
from graftwork.records.fit import FitQuestion, MemoryPeak, PlainSetup
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB

PROCESS_GIB = (2.0, 2.5, 3.5)
"""Python, torch and CUDA of one process on the host: least, usual, most (measured on small runs)."""
OFFLOADED_BYTES = (16.0, 17.0, 18.0)
"""A learned parameter with its gradient, states and pinned buffers on the host."""
DEEPSPEED_PADS = 1.5
ADAM_TRAFFIC = 28.0
"""Bytes that Adam moves in host memory for a parameter."""
HOST_BANDWIDTH_SHARE = 0.6
GUESSED_HOST_GB_S = 60.0
"""Two channels of DDR5, for machines whose processor is not named."""
PCIE_SHARE = 0.8
"""Of a connector's rate, what pinned memory reaches."""


class HostTransfers(NamedTuple):
    """Seconds between card and host: of one pass, and of a step's end."""

    a_pass: float
    a_step: float
    adam: float


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
        learned = tuple(trainable * one / GIB for one in OFFLOADED_BYTES)
        frozen = base_bytes / GIB if shared.offload == "weights" and question.method != "full" else 0.0
        # The reading is over when the states are made.
        down, middle, up = (
            max(read, one + frozen) for read, one in zip((down, middle, up), learned, strict=True)
        )
    return Figure(value=usual + middle, low=low + down, high=high + up, unit="GiB")


def transfers(
    machine: Machine, shared: Distribution, setup: PlainSetup, *, trainable: int, base_bytes: float
) -> HostTransfers:
    """What offloading adds to a pass and to a step."""
    if shared.offload == "none" or machine.gpu is None:
        return HostTransfers(0.0, 0.0, 0.0)
    pcie = machine.gpu.pcie_gb_s * PCIE_SHARE * 1e9
    full = setup.method == "full"
    width = WIDTH[setup.dtype] if full else WIDTH[setup.adapter_dtype]
    gradients = trainable * width / shared.cards / pcie
    fetched = 0.0
    if shared.offload == "weights":
        # Forward and backward each fetch a card's own part; the rest comes from the other cards.
        held = trainable * width if full else base_bytes
        fetched = 2 * held / shared.cards / pcie
    back = trainable * width / shared.cards / pcie if shared.offload == "optimizer" else 0.0
    return HostTransfers(a_pass=fetched + gradients, a_step=back, adam=adam_seconds(machine, trainable))


def adam_seconds(machine: Machine, trainable: int) -> float:
    """All processes step at once, out of one memory."""
    rate = machine.cpu.bandwidth_gb_s if machine.cpu is not None else GUESSED_HOST_GB_S
    return trainable * ADAM_TRAFFIC / (rate * HOST_BANDWIDTH_SHARE * 1e9)


def padded_gb(question: FitQuestion) -> float:
    """What DeepSpeed's estimator would ask of the host for an offloaded optimizer, in 10⁹ bytes."""
    return total_parameters(question.shape) * OFFLOADED_BYTES[2] * DEEPSPEED_PADS / 1e9


KV_BYTES = 2
LASTING = ("weights", "adapters", "optimizer", "reference")
LAUNCH_KERNELS_A_BLOCK = 60
"""Kernels of a block for one token, called from Python one by one (derived from the plain step's)."""
REFERENCE_SHARE = 1 / 3
"""Of a pass forward and backward, what the forward pass of the reference takes."""


def cache_bytes(shape: ModelShape, *, tokens: int, sequences: int) -> float:
    """Keys and values of `sequences` answers that grow to `tokens`."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * KV_BYTES * tokens * sequences


def rows_at_once(question: FitQuestion, lasting: float, *, room: float, cards: int) -> int:
    """Answers that a card generates side by side: all of its own, or even rounds that there is room for."""
    most = max(-(-question.batch_rows // cards), 1)
    a_row = sum(_generation_bytes(question, rows=1).values())
    rounds = -(-most // max(min(most, int((room - lasting) // a_row)), 1))
    return -(-most // rounds)


def lasting_bytes(peak: MemoryPeak, *, whole_weights: float) -> float:
    """What is there while answers are generated. Where weights are cut up, TRL gathers them for it."""
    held = sum(peak.parts.get(name, 0.0) for name in LASTING)
    return max(held, whole_weights)


def with_reference(peak: MemoryPeak, question: FitQuestion) -> MemoryPeak:
    """Without adapters to turn off, the reference is a second copy in 16 bits."""
    if question.method != "full":
        return peak
    copy = total_parameters(question.shape) * 2.0
    return peak.model_copy(
        update={
            "allocated": peak.allocated + copy,
            "reserved": peak.reserved + copy,
            "parts": {**peak.parts, "reference": copy},
        }
    )


def with_generation(
    peak: MemoryPeak, question: FitQuestion, *, rows: int, whole_weights: float
) -> MemoryPeak:
    """The peak of training or of generating, whichever is higher."""
    lasting = {name: peak.parts.get(name, 0.0) for name in LASTING}
    lasting["weights"] = max(lasting["weights"], whole_weights)
    passing = _generation_bytes(question, rows=rows)
    generating = sum(lasting.values()) + sum(passing.values())
    if generating <= peak.allocated:
        return peak
    beyond = max(peak.reserved - peak.allocated, 0.02 * sum(passing.values()))
    return MemoryPeak(
        allocated=generating,
        reserved=generating + beyond,
        parts={**{name: size for name, size in lasting.items() if size}, **passing},
        phase="generation",
    )


def _generation_bytes(question: FitQuestion, *, rows: int) -> dict[str, float]:
    """What passes while `rows` answers are generated side by side."""
    shape = question.shape
    tokens = question.prompt_tokens + question.completion_tokens
    return {
        "key-value cache": cache_bytes(shape, tokens=tokens, sequences=rows),
        # Hidden states of all prompts at once.
        "activations": 8.0 * (shape.hidden_size + shape.intermediate_size) * question.prompt_tokens * rows,
        # Of one token, in float32, sorted for sampling.
        "logits": 12.0 * shape.vocab_size * rows,
    }


def generation_seconds(
    question: FitQuestion, *, rows: int, cards: int, rates: StepRates, training: float
) -> dict[str, float]:
    """Seconds of a step that are spent before anything is learned: each card generates its own rows."""
    own = max(-(-question.batch_rows // cards), 1)
    read = own * question.prompt_tokens * 2.0 * _weights(question.shape)
    return {
        "generation": -(-own // rows) * decode_seconds(question, rows=min(rows, own), rates=rates),
        "reading prompts": read / rates.half,
        "reference": REFERENCE_SHARE * training,
    }


def decode_seconds(question: FitQuestion, *, rows: int, rates: StepRates) -> float:
    """One answer of `completion_tokens` in each of `rows` rows: all weights are read for every token."""
    shape = question.shape
    weights = _weights(shape)
    table = shape.vocab_size * shape.hidden_size * 2.0
    reading = (weights * 2.0 + table) / rates.bandwidth
    if question.method == "qlora":
        # Half a byte read, two written, two read again for the product.
        reading = (weights * 0.52 + table) / rates.bandwidth
        reading += weights * 4.0 / (rates.bandwidth * rates.dequantising) * 0.5
    middle = question.prompt_tokens + question.completion_tokens / 2
    cache = cache_bytes(shape, tokens=round(middle), sequences=rows) / rates.bandwidth
    launching = LAUNCH_KERNELS_A_BLOCK * shape.layers * rates.launch_seconds
    return question.completion_tokens * max(reading + cache, launching)


def _weights(shape: ModelShape) -> float:
    return float(shape.layers * layer_parameters(shape))


def say_why(question: FitQuestion) -> tuple[str, ...]:
    """GRPO beside PPO, in figures."""
    copy = total_parameters(question.shape) * 2.0 / GIB
    tokens = question.prompt_tokens + question.completion_tokens
    cache = cache_bytes(question.shape, tokens=tokens, sequences=question.generations) / GIB
    first = (
        f"GRPO needs no reference copy: it is the base with its adapters off; PPO would add a value model of "
        f"{copy:.1f} GiB in 16 bits, with its own gradients and states"
        if question.method != "full"
        else f"with full weights GRPO keeps a reference copy of {copy:.1f} GiB; PPO would add a value model "
        "of that size, with its own gradients and states"
    )
    return (first, f"keys and values of {question.generations} answers to a prompt take {cache:.2f} GiB")


LINK_SHARE = 0.6
"""Of a connector's rate, what two cards reach through the host: 19 to 20 of 32 GB/s on A40s (published)."""
GENERATION_SHARE = 0.88
"""Of the room, what answers may fill side by side: the rest is for what is not known to the last byte."""
NOT_HIDDEN = 0.35
"""Of what is sent while the card computes, what it has to wait for (derived from published scaling)."""


def plain_candidate(
    question: FitQuestion,
    way: StrategyOption,
    *,
    rates: StepRates,
    correction: float = 1.0,
    exact: bool = False,
) -> FitCandidate:
    """Memory at the longest row, time at the mean one. `exact` reckons memory to the tensor."""
    shared = way.shared
    trainable = trained(question)
    longest = max(question.lengths)
    setup = plain_setup(
        question, sharding=shared.sharding, rows=way.micro_rows, tokens=longest, checkpointed=way.checkpointed
    )
    peak = shared_peak(question, setup, shared, trainable=trainable, correction=correction, exact=exact)
    passes = -(-question.batch_rows // (way.micro_rows * shared.cards))
    usual = setup.model_copy(update={"tokens": round(expected_longest(question.lengths, way.micro_rows))})
    parts = step_seconds(question, usual, shared, rates=rates, passes=passes, trainable=trainable)
    mean = sum(question.lengths) / len(question.lengths)
    if question.algorithm == "grpo":
        peak, more = _with_generation(
            question, setup, shared, peak, rates=rates, training=sum(parts.values())
        )
        parts |= more
    return FitCandidate(
        way=way,
        setup=setup,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=host_memory(question, shared, trainable=trainable, base_bytes=base_bytes(question, setup)),
        seconds_a_step=sum(parts.values()),
        step_parts=parts,
        tokens_a_step=question.batch_rows * mean,
        passes=passes,
    )


def _with_generation(
    question: FitQuestion,
    setup: PlainSetup,
    shared: Distribution,
    peak: MemoryPeak,
    *,
    rates: StepRates,
    training: float,
) -> tuple[MemoryPeak, dict[str, float]]:
    """The peak and the seconds with the answers that are generated before they are learned from."""
    peak = with_reference(peak, question)
    cut_up = shared.sharding in ("zero3", "fsdp2")
    whole = base_bytes(question, setup) if cut_up else 0.0
    room = card_room(question, cards=shared.cards).value * GIB * GENERATION_SHARE
    lasting = lasting_bytes(peak, whole_weights=whole)
    rows = rows_at_once(question, lasting, room=max(room, peak.allocated), cards=shared.cards)
    grown = with_generation(peak, question, rows=rows, whole_weights=whole)
    return grown, generation_seconds(question, rows=rows, cards=shared.cards, rates=rates, training=training)


def trained(question: FitQuestion) -> int:
    return adapter_parameters(
        question.shape,
        rank=question.rank,
        targets=question.targets,
        layers=question.adapted_layers,
        method=question.method,
    )


def base_bytes(question: FitQuestion, setup: PlainSetup) -> float:
    """The base as it is read."""
    return float(total_parameters(question.shape) * WIDTH[setup.dtype])


def shared_peak(
    question: FitQuestion,
    setup: PlainSetup,
    shared: Distribution,
    *,
    trainable: int,
    correction: float = 1.0,
    exact: bool = False,
) -> MemoryPeak:
    """The peak of one card, with the logits that are there where only replies are predicted."""
    return peak_of_each(
        question.shape,
        setup,
        shared,
        architecture=question.architecture,
        trainable=trainable,
        predicted=question.trained_share if question.engine == "graft" else 1.0,
        correction=correction,
        exact=exact,
    )


def peak_of_each(
    shape: ModelShape,
    setup: PlainSetup,
    shared: Distribution,
    *,
    architecture: str,
    trainable: int,
    predicted: float = 1.0,
    correction: float = 1.0,
    exact: bool = False,
) -> MemoryPeak:
    """What each card holds at most. `predicted`: of the tokens, those whose logits are built."""
    asked = passing_setup(setup) if is_cut_up(setup, shared) else setup
    if exact:
        alone = exact_peak(shape, asked, architecture=architecture)
    else:
        alone = quick_peak(shape, asked, architecture=architecture, trainable=trainable)
    alone = _with_fewer_logits(_corrected(alone, correction), predicted)
    return share(alone, shape, setup, shared, trainable=trainable)


def _corrected(peak: MemoryPeak, factor: float) -> MemoryPeak:
    """As far off as a trace found it to be."""
    if factor == 1.0:
        return peak
    return peak.model_copy(
        update={
            "allocated": peak.allocated * factor,
            "reserved": peak.reserved * factor,
            "parts": {name: size * factor for name, size in peak.parts.items()},
        }
    )


def _with_fewer_logits(peak: MemoryPeak, share_: float) -> MemoryPeak:
    if share_ == 1.0:
        return peak
    saved = peak.parts.get("logits", 0.0) * (1 - share_)
    parts = {**peak.parts, "logits": peak.parts.get("logits", 0.0) - saved}
    return peak.model_copy(
        update={"parts": parts, "allocated": peak.allocated - saved, "reserved": peak.reserved - saved}
    )


def step_seconds(
    question: FitQuestion,
    setup: PlainSetup,
    shared: Distribution,
    *,
    rates: StepRates,
    passes: int,
    trainable: int,
) -> dict[str, float]:
    """Seconds of an optimizer step: the passes, what is sent between cards and to the host, the update."""
    # With autocast, products go in 16 bits whatever the weights are kept in.
    worked = setup.model_copy(update={"dtype": half_precision(question)}) if setup.autocast else setup
    once = plain_step(question.shape, setup, rates=rates).once_a_step
    a_pass = plain_step(question.shape, worked, rates=rates).parts
    computing = sum(a_pass.values()) * passes
    base = base_bytes(question, worked)
    sent = sending_seconds(question, worked, shared, trainable=trainable, base=base, passes=passes)
    moved = transfers(question.machine, shared, setup, trainable=trainable, base_bytes=base)
    waiting = exposed(computing, sent + moved.a_pass * passes)
    update = sum(once.values()) / (shared.cards if shared.sharding not in ("none", "ddp") else 1)
    parts = {name: seconds * passes for name, seconds in a_pass.items()}
    link_share = sent / (sent + moved.a_pass * passes) if sent else 0.0
    parts["link between cards"] = waiting * link_share
    parts["host transfers"] = waiting * (1 - link_share) + moved.a_step
    parts["optimizer"] = moved.adam if shared.offload != "none" else update
    return {name: seconds for name, seconds in parts.items() if seconds}


def exposed(computing: float, moving: float) -> float:
    """What the card waits for: what does not go on while it computes, and all that takes longer."""
    return max(moving - computing, 0.0) + NOT_HIDDEN * min(moving, computing)


def sending_seconds(
    question: FitQuestion,
    setup: PlainSetup,
    shared: Distribution,
    *,
    trainable: int,
    base: float,
    passes: int,
) -> float:
    """Gradients once a step (DDP), and where weights are cut up these in every pass."""
    if shared.cards < 2:
        return 0.0
    gb_s = link_rate(question.machine)
    width = WIDTH[setup.dtype] if setup.method == "full" else WIDTH[setup.adapter_dtype]
    whole = link_seconds(trainable * width, cards=shared.cards, gb_s=gb_s)
    if shared.sharding == "ddp":
        return whole
    if shared.sharding == "zero2":
        # Half of an all-reduce in every pass, and the stepped weights once.
        return whole / 2 * passes + whole / 2
    held = trainable * width if setup.method == "full" else base
    gathered = link_seconds(held, cards=shared.cards, gb_s=gb_s) / 2
    return (2 * gathered + whole / 2) * passes


def link_rate(machine: Machine) -> float:
    """GB/s between two cards: as stated, by NVLink where they are bridged, else through the host."""
    if machine.link_gb_s is not None:
        return machine.link_gb_s
    return machine.gpu.pcie_gb_s * LINK_SHARE if machine.gpu is not None else 10.0
