"""One strategy with its figures: memory, seconds, whether it fits, its settings and its name. Pure."""

from typing import Any, NamedTuple

from graftwork.costmodel.plain_step import Distribution
from graftwork.model.families import has_recipe
from graftwork.model.shape import active_layer_parameters
from graftwork.plan.fit.question import TIGHT, card_room, half_precision, host_room, rollout_load
from graftwork.records.base import GIB, Figure
from graftwork.records.errors import UserMistake
from graftwork.records.plan import (
    Considered,
    FitQuestion,
    Level,
    MemoryPeak,
    PlainSetup,
    Strategy,
    StreamedStep,
    Tuning,
)

ALLOCATED_SPREAD: dict[Level, float] = {"guessed": 0.25, "computed": 0.05, "traced": 0.03, "probed": 0.015}
RESERVED_SPREAD: dict[Level, float] = {"guessed": 0.25, "computed": 0.08, "traced": 0.04, "probed": 0.02}
"""How far the truth may be from the figure, either way; docs/accuracy.md shows what was measured. Guessed: a
family without a step recipe is estimated as a Llama, which was 11 to 18 % off on Gemma 2 and StarCoder 2."""
TIME_SPREAD: dict[Level, float] = {"guessed": 1.35, "computed": 1.35, "traced": 1.35, "probed": 1.08}
"""Factor, either way. A trace knows memory, not time."""
CPU_TIME_SPREAD = 2.0
"""The same on processors without a probe: for many cores there is one published run."""
SIMPLEST = ("none", "ddp", "zero2", "fsdp2", "zero3")
PLAINEST = ("none", "optimizer", "weights")


def memory_level(architecture: str, correction: float = 1.0) -> Level:
    """How sure the memory of a plain step of this family is; a correction comes from a trace."""
    if has_recipe(architecture):
        return "computed"
    return "guessed" if correction == 1.0 else "traced"


class StrategyOption(NamedTuple):
    """How it could be done."""

    engine: str
    own_step: bool
    """`graft train`'s own step on one card; else the plain one."""
    shared: Distribution
    micro_rows: int
    checkpointed: int


class FitCandidate(NamedTuple):
    """A way with its figures. Bytes and seconds."""

    way: StrategyOption
    setup: PlainSetup | None
    tuning: Tuning | None
    peak: MemoryPeak
    floor: float
    """The least that the engine comes down to by itself, reserved: our own step measures and keeps less."""
    host: Figure
    seconds_a_step: float
    step_parts: dict[str, float]
    tokens_a_step: float
    passes: int
    streamed: StreamedStep | None = None
    """How layers are streamed from host memory, where they are."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_a_step / self.seconds_a_step


def allocated_figure(candidate: FitCandidate, level: Level) -> Figure:
    value, spread = candidate.peak.allocated / GIB, ALLOCATED_SPREAD[level]
    return Figure.about(value, down=1 - spread, up=1 + spread, unit="GiB")


def reserved_figure(candidate: FitCandidate, question: FitQuestion, level: Level) -> Figure:
    """The range ends where an engine that measures its first step would give way."""
    value, spread = candidate.peak.reserved / GIB, RESERVED_SPREAD[level]
    high = value * (1 + spread)
    if candidate.tuning is not None:
        room = card_room(question, cards=candidate.way.shared.cards).value
        high = max(value, candidate.floor / GIB * (1 + spread), min(high, room))
    return Figure(value=value, low=value * (1 - spread), high=high, unit="GiB")


def fits(candidate: FitCandidate, question: FitQuestion, level: Level) -> bool:
    """No figure within the range may pass what there is; on the host the usual one may not."""
    return card_excess(candidate, question, level) <= 0 and host_excess(candidate, question) <= 0


def card_excess(candidate: FitCandidate, question: FitQuestion, level: Level) -> float:
    """GiB that are lacking on each card."""
    room = card_room(question, cards=candidate.way.shared.cards)
    return reserved_figure(candidate, question, level).high - room.value


def host_excess(candidate: FitCandidate, question: FitQuestion) -> float:
    """GiB that are lacking on the host."""
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
        candidate.seconds_a_step / candidate.tokens_a_step,
        SIMPLEST.index(shared.sharding),
        PLAINEST.index(shared.offload),
        candidate.peak.reserved,
    )


TRAIN_STRATEGY = {"none": "single", "ddp": "ddp", "zero2": "zero2", "zero3": "zero3", "fsdp2": "fsdp"}
FORMS = {"whole": "16 bits", "eight": "8 bits", "four": "4 bits (NF4)"}
TITLES = {"none": "one card", "ddp": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}


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
        "processes": shared.cards,
        "offload": shared.offload != "none",
    }
    if question.algorithm != "sft":
        settings["objective"] = question.algorithm
    if (load := rollout_load(question)) is not None:
        sampled = load.model_dump(include={"prompts", "answers", "max_tokens", "prompts_at_once"})
        settings["rollouts"] = sampled
        if load.prompts_at_once == load.prompts:
            del sampled["prompts_at_once"]
        # Supervised rows are not trained on.
        del settings["batch_size"], settings["epochs"]
    if candidate.way.checkpointed and not candidate.way.own_step and candidate.streamed is None:
        settings["checkpointing"] = "on"
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
    title = TITLES[shared.sharding] + (f" × {shared.cards}" if shared.cards > 1 else "")
    parts = [title if question.machine.gpu is not None else "processor"]
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


def flops_a_token(question: FitQuestion) -> float:
    """The least that a token takes: forward, and backward through the adapted layers."""
    shape = question.shape
    weights = shape.layers * active_layer_parameters(shape)
    table = shape.vocab_size * shape.hidden_size
    backward = 2 if question.method == "full" else 1
    learned = weights * question.adapted_layers / shape.layers
    return 2.0 * (weights + backward * learned) + 2.0 * table * (1 + backward) * question.trained_share


def most_tokens_per_second(question: FitQuestion, *, eight: bool = False) -> float | None:
    """All cards at their stated peak; None without a card."""
    gpu, machine = question.machine.gpu, question.machine
    if gpu is None:
        return None
    peak = gpu.half_tflops
    if eight and gpu.has_fp8 and gpu.eight_tflops is not None:
        peak = gpu.eight_tflops
    return machine.gpus * peak * 1e12 / flops_a_token(question)


def require_possible(question: FitQuestion, claimed: float, *, eight: bool = False) -> float:
    """The share of the peak that a claimed rate needs; a mistake where that is more than all."""
    gpu = question.machine.gpu
    most = most_tokens_per_second(question, eight=eight)
    if gpu is None or most is None:
        return 0.0
    share = claimed / most
    if share <= 1:
        return share
    needed = claimed * flops_a_token(question) / 1e12
    has = needed / share
    raise UserMistake(
        f"{claimed:,.0f} tokens/s cannot be: it needs {needed:,.0f} of {has:,.0f} TFLOPS",
        why=f"a token of {question.model} takes {flops_a_token(question) / 1e9:.1f} GFLOP at the very least",
        fix=f"the roof of {question.machine.name} is {most:,.0f} tokens/s: ask how that was measured",
        where="--claim",
    )


def time_spread(question: FitQuestion, level: Level) -> float:
    """Factor, either way, on seconds."""
    if question.machine.gpu is None and level != "probed":
        return CPU_TIME_SPREAD
    return TIME_SPREAD[level]


def speed_figure(candidate: FitCandidate, question: FitQuestion, level: Level) -> Figure:
    """Tokens a second over all cards; no end of the range passes the roof."""
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
        card_gib=card_room(question, cards=candidate.way.shared.cards),
        host_gib=candidate.host,
        tokens_per_second=speed_figure(candidate, question, level),
        strategy=strategy_of(candidate, question),
    )
