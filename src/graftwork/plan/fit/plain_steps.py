"""A way of the plain step reckoned through: memory of a card and of the host, seconds of a step. Pure.

In: a question, a way, what the card reaches. Out: a candidate. Plain means transformers and PEFT, or the
path of `graft train` for what it has not written out.
"""

from graftwork.model.shape import adapter_parameters, total_parameters
from graftwork.plan.fit import rl
from graftwork.plan.fit.candidate import Candidate, Way
from graftwork.plan.fit.late import expected_longest
from graftwork.plan.fit.offload import host_memory, transfers
from graftwork.plan.fit.peaks import exact_peak, quick_peak
from graftwork.plan.fit.room import card_room
from graftwork.plan.fit.setups import half_precision, plain_setup
from graftwork.plan.fit.sharding import WIDTH, Shared, is_cut_up, passing_setup, share
from graftwork.plan.timing.links import link_seconds
from graftwork.plan.timing.plain import plain_step
from graftwork.plan.timing.rates import Rates
from graftwork.records.fit import FitQuestion, MemoryPeak, PlainSetup
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB

LINK_SHARE = 0.6
"""Of a connector's rate, what two cards reach through the host: 19 to 20 of 32 GB/s on A40s (published)."""
GENERATION_SHARE = 0.88
"""Of the room, what answers may fill side by side: the rest is for what is not known to the last byte."""
NOT_HIDDEN = 0.35
"""Of what is sent while the card computes, what it has to wait for (derived from published scaling)."""


def plain_candidate(
    question: FitQuestion, way: Way, *, rates: Rates, correction: float = 1.0, exact: bool = False
) -> Candidate:
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
        peak, more = _generating(question, setup, shared, peak, rates=rates, training=sum(parts.values()))
        parts |= more
    return Candidate(
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


def _generating(
    question: FitQuestion,
    setup: PlainSetup,
    shared: Shared,
    peak: MemoryPeak,
    *,
    rates: Rates,
    training: float,
) -> tuple[MemoryPeak, dict[str, float]]:
    """The peak and the seconds with the answers that are generated before they are learned from."""
    peak = rl.with_reference(peak, question)
    cut_up = shared.sharding in ("zero3", "fsdp2")
    whole = base_bytes(question, setup) if cut_up else 0.0
    room = card_room(question, cards=shared.cards).value * GIB * GENERATION_SHARE
    lasting = rl.lasting_bytes(peak, whole_weights=whole)
    rows = rl.rows_at_once(question, lasting, room=max(room, peak.allocated), cards=shared.cards)
    grown = rl.with_generation(peak, question, rows=rows, whole_weights=whole)
    return grown, rl.generation_seconds(
        question, rows=rows, cards=shared.cards, rates=rates, training=training
    )


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
    shared: Shared,
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
    shared: Shared,
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
    shared: Shared,
    *,
    rates: Rates,
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
    question: FitQuestion, setup: PlainSetup, shared: Shared, *, trainable: int, base: float, passes: int
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
