"""What would make a run fit that does not: one change at a time, each computed. Pure.

In: a question whose answer is no. Out: changes that turn it into a yes, with their figures. Reads the shipped
catalog for smaller models.
"""

from collections.abc import Iterator
from typing import NamedTuple

from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.model.shape import linear_names, total_parameters
from graftwork.plan.catalog.models import CatalogModel, list_models
from graftwork.plan.fit.candidate import (
    RESERVED_SPREAD,
    FitCandidate,
    card_excess,
    consider,
    fits,
    preference,
)
from graftwork.plan.fit.own_step import may_fit
from graftwork.plan.fit.plain_step import plain_candidate
from graftwork.plan.fit.question import card_room
from graftwork.plan.fit.search import search, takes_own_step
from graftwork.records.plan import Considered, FitQuestion, Level, Method, ModelShape
from graftwork.records.units import GIB

LIGHTER: dict[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "dora": ("lora", "qlora"),
    "lora": ("qlora",),
    "qlora": (),
}
CARDS = (2, 3, 4, 8)
SHORTEST, GRAIN = 128, 64
TRIED_EXACTLY, SHORTER = 4, 0.9
SMALLER_TRIED = 2
LEAST_SHARE = 0.75
"""Of a card, what weights may take where anything is to be learned with the rest."""


ROOMY = 0.12
"""Of a card, what must stay free for straight lines to be trusted without a count to the tensor."""


class QuestionChange(NamedTuple):
    """A question that differs in one thing."""

    says: str
    question: FitQuestion


def find_remedies(question: FitQuestion, *, rates: StepRates | None, level: Level) -> tuple[Considered, ...]:
    """Each kind of change that makes it fit, the smallest first."""
    found = []
    for change in _changes(question):
        best = _best(change.question, rates=rates, level=level)
        if best is not None:
            found.append(consider(best, change.question, name=change.says, level=level))
    if (shorter := _shorter(question, rates=rates, level=level)) is not None:
        found.insert(min(1, len(found)), shorter)
    for finding in (_more_cards, _smaller_model):
        if (more := finding(question, rates=rates, level=level)) is not None:
            found.append(more)
    return tuple(found)


def _best(question: FitQuestion, *, rates: StepRates | None, level: Level) -> FitCandidate | None:
    gpu = question.machine.gpu
    known = rates or (rates_of(gpu) if gpu is not None else None)
    fitting = search(question, rates=known, level=level).fitting
    for item in sorted(fitting, key=preference)[:TRIED_EXACTLY]:
        exact = item
        roomy = card_excess(item, question, level) < -ROOMY * card_room(question, cards=1).value
        if item.setup is not None and known is not None and not roomy:
            exact = plain_candidate(question, item.way, rates=known, exact=True)
        if fits(exact, question, level):
            return exact
    return None


def _has_room(question: FitQuestion, *, rates: StepRates | None, level: Level) -> bool:
    """Whether anything fits. Our own step is asked by its formula first: the search is the same, and slow."""
    if takes_own_step(question) and may_fit(question, spread=RESERVED_SPREAD[level]):
        return True
    if takes_own_step(question) and question.machine.gpus == 1:
        return False
    gpu = question.machine.gpu
    known = rates or (rates_of(gpu) if gpu is not None else None)
    return bool(search(question, rates=known, level=level, own_step=False).fitting)


def _changes(question: FitQuestion) -> Iterator[QuestionChange]:
    for method in LIGHTER[question.method]:
        yield QuestionChange(
            f"{method} instead of {question.method}", question.model_copy(update={"method": method})
        )
    if question.offload != "auto":
        yield QuestionChange(
            f"offload auto instead of {question.offload}", question.model_copy(update={"offload": "auto"})
        )
    if question.engine == "graft" and question.machine.gpu is not None:
        yield QuestionChange(
            "transformers + PEFT instead of graft train (--engine hf)",
            question.model_copy(update={"engine": "hf"}),
        )
    if question.optimizer != "adamw_8bit" and question.method == "full" and question.machine.gpu is not None:
        yield QuestionChange(
            "the 8-bit AdamW (--optimizer adamw_8bit), with --engine hf",
            question.model_copy(update={"optimizer": "adamw_8bit", "engine": "hf"}),
        )


def cut_at(question: FitQuestion, most: int) -> FitQuestion:
    """The question with rows of at most so many tokens."""
    lengths = tuple(min(length, most) for length in question.lengths)
    update: dict[str, object] = {"lengths": lengths}
    if question.algorithm == "grpo":
        update["completion_tokens"] = max(most - question.prompt_tokens, 1)
    return question.model_copy(update=update)


def _shorter(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The longest rows that fit, to 64 tokens."""
    low = (SHORTEST + (question.prompt_tokens if question.algorithm == "grpo" else 0)) // GRAIN
    high = (max(question.lengths) - 1) // GRAIN
    found: int | None = None
    while low <= high:
        middle = (low + high) // 2
        if _has_room(cut_at(question, middle * GRAIN), rates=rates, level=level):
            found, low = middle * GRAIN, middle + 1
        else:
            high = middle - 1
    best = None
    for _ in range(TRIED_EXACTLY):
        if found is None or best is not None:
            break
        best = _best(cut_at(question, found), rates=rates, level=level)
        # The search goes by straight lines: where they were too low, a tenth shorter is tried.
        found = found if best is not None else int(SHORTER * found) // GRAIN * GRAIN or None
    if found is None or best is None:
        return None
    most = found
    longer = sum(length > most for length in question.lengths) / len(question.lengths)
    cut = "every row" if longer == 1 else f"{100 * longer:.1f} % of the rows"
    return consider(
        best, cut_at(question, most), name=f"rows of at most {most:,} tokens (cuts {cut})", level=level
    )


def _more_cards(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    machine = question.machine
    if machine.gpu is None:
        return None
    for cards in CARDS:
        if cards > machine.gpus:
            more = question.model_copy(update={"machine": machine.model_copy(update={"gpus": cards})})
            if (best := _best(more, rates=rates, level=level)) is not None:
                return consider(best, more, name=f"{cards} cards instead of {machine.gpus}", level=level)
    return None


def _smaller_model(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The largest of the catalog that fits, of the same family of names first."""
    here = total_parameters(question.shape)
    room = card_room(question, cards=1).value * GIB
    smaller = sorted(
        (model for model in list_models() if total_parameters(model.shape) < 0.95 * here),
        key=lambda model: (_shared_name(model, question), total_parameters(model.shape)),
        reverse=True,
    )
    tried = 0
    for model in smaller:
        if least_bytes(model.shape, question.method) > room or tried == SMALLER_TRIED:
            continue
        tried += 1
        other = question.model_copy(
            update={
                "model": model.name,
                "shape": model.shape,
                "architecture": model.architecture,
                "targets": linear_names(model.shape),
                "adapted_layers": model.shape.layers,
            }
        )
        if (best := _best(other, rates=rates, level=level)) is not None:
            return consider(best, other, name=f"{model.name} instead of {question.model}", level=level)
    return None


def least_bytes(shape: ModelShape, method: Method) -> float:
    """Of the weights alone, what a card must hold of a model at the very least."""
    a_weight = {"qlora": 0.5, "full": 0.0}.get(method, 1.0)
    return a_weight * total_parameters(shape) / LEAST_SHARE


def _shared_name(model: CatalogModel, question: FitQuestion) -> int:
    """How much of its name a model shares with the asked one."""
    ours, theirs = question.model.lower().split("-"), model.name.lower().split("-")
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))
