"""A candidate as a strategy with the settings that do it, and in words. Pure."""

from typing import Any

from graftwork.plan.fit.candidate import FitCandidate
from graftwork.plan.fit.setups import half_precision
from graftwork.records.fit import FitQuestion, Strategy

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
        train=train_settings(candidate, question) if graft else {},
    )


def train_settings(candidate: FitCandidate, question: FitQuestion) -> dict[str, Any]:
    """The `train:` section of graft.yaml that does this."""
    shared = candidate.way.shared
    settings: dict[str, Any] = {
        "method": question.method,
        "rank": question.rank,
        "batch_rows": question.batch_rows,
        "epochs": max(round(question.epochs), 1),
        "precision": half_precision(question),
        "strategy": TRAIN_STRATEGY[shared.sharding],
        "processes": shared.cards,
        "offload": shared.offload != "none",
    }
    if candidate.way.checkpointed and not candidate.way.own_step:
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
    dtype = setup.dtype if setup is not None else half_precision(question)
    if question.method == "full" and setup is None:
        dtype = "float32"
    return "32 bits" if dtype == "float32" else "16 bits"


def name_of(candidate: FitCandidate, question: FitQuestion) -> str:
    """A way in a few words: what tells it from the others."""
    way = candidate.way
    shared = way.shared
    title = TITLES[shared.sharding] + (f" × {shared.cards}" if shared.cards > 1 else "")
    words = [title if question.machine.gpu is not None else "processor"]
    if way.own_step:
        words.append("graft's own step")
    else:
        words.append("graft's plain step" if way.engine == "graft" else "HF + PEFT")
    if way.checkpointed and not way.own_step:
        words.append("checkpointed")
    if shared.offload != "none":
        words.append("optimizer on the host" if shared.offload == "optimizer" else "all on the host")
    return ", ".join(words)
