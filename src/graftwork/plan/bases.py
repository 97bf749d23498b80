"""Which base a log and a machine ask for. Pure.

Input: the task of the log, the lengths and number of its rows, a machine. Output: every base of the catalog
with its memory, minutes and suitability, and the one that is proposed, with the reason.
"""

from pathlib import Path
from typing import Literal

from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.bases import (
    CatalogBase,
    Grade,
    TaskNeed,
    list_bases,
    model_of,
    name_in_settings,
)
from graftwork.plan.catalog.models import CatalogModel
from graftwork.plan.fit.answer import fit, say_time
from graftwork.plan.fit.question import make_question
from graftwork.records.base import Figure, Record
from graftwork.records.errors import UserError
from graftwork.records.hardware import Machine
from graftwork.records.plan import FitAnswer, FitOptions, Method

DEFAULT_MINUTES = 60.0
"""The longest training that is proposed without being asked for."""
LONGEST_PLANNED = 2048
"""Longer rows are planned as if they had so many tokens: `data.max_tokens` limits them, not the base."""
MOST_CUT = 0.05
"""Share of the rows that may be longer than the context."""
ORDER: dict[Grade, int] = {"good": 2, "fair": 1, "poor": 0}
LANGUAGES = {
    "en": "English", "de": "German", "fr": "French", "es": "Spanish", "it": "Italian", "pt": "Portuguese",
    "nl": "Dutch", "ru": "Russian", "zh": "Chinese", "ja": "Japanese", "ko": "Korean", "ar": "Arabic",
    "hi": "Hindi", "th": "Thai",
}  # fmt: skip
NEEDS: dict[TaskNeed, str] = {
    "json": "JSON and labels",
    "tools": "tool calls",
    "code": "code",
    "text": "free text",
}


class BaseNeed(Record):
    """What the log asks of a base, and how it would be trained."""

    task: TaskNeed
    language: str | None
    """Code of ISO 639-1; None if it was not recognized."""
    lengths: tuple[int, ...]
    """Tokens of the rows, estimated."""
    rows: int
    """Rows to train on."""
    epochs: float
    batch_size: int
    rank: int
    upper_layers: int | None
    method: Method
    minutes: float = DEFAULT_MINUTES
    license: str | None = None
    """Only bases with this license; None: any without terms of its own."""


Refusal = Literal["memory", "context", "license"]


class BaseOption(Record):
    """A base of the catalog for this log and machine."""

    name: str
    base: str
    """What `base` in graft.yaml says."""
    parameters: float
    context: int
    license: str
    terms: str
    grade: Grade
    good_for: str
    not_for: str
    gib: Figure
    minutes: Figure
    refused: Refusal | None
    """Why it cannot be proposed."""
    note: str


class BaseProposal(Record):
    """The base that is proposed, why, and all others."""

    chosen: str
    """The name in the catalog; empty if the user named a base that is not in it."""
    why: str
    machine: str
    language: str | None
    options: tuple[BaseOption, ...]

    @property
    def option(self) -> BaseOption | None:
        return next((option for option in self.options if option.name == self.chosen), None)


def plan_base(model: CatalogModel, need: BaseNeed, machine: Machine) -> FitAnswer:
    """Memory and minutes of the training run that the log asks for."""
    room = min(model.shape.max_positions, LONGEST_PLANNED)
    lengths = tuple(min(length, room) for length in need.lengths)
    options = FitOptions(
        method=need.method,
        algorithm="sft",
        seq=lengths,
        rows=need.rows,
        epochs=need.epochs,
        batch_size=need.batch_size,
        rank=need.rank,
        adapted_layers=need.upper_layers,
    )
    return fit(make_question(model, options, machine=machine), advise=False)


def weigh_bases(need: BaseNeed, machine: Machine, *, overlay: Path | None = None) -> tuple[BaseOption, ...]:
    """Every base of the catalog, the smallest first."""
    options = [_weigh(base, need, machine, overlay) for base in list_bases(overlay=overlay)]
    return tuple(sorted(options, key=lambda option: option.parameters))


def _weigh(base: CatalogBase, need: BaseNeed, machine: Machine, overlay: Path | None) -> BaseOption:
    model = model_of(base, overlay=overlay)
    answer = plan_base(model, need, machine)
    context = model.shape.max_positions
    too_long = sum(length > context for length in need.lengths)
    permitted = base.license == need.license if need.license is not None else not base.terms
    grade, notes = base.grades.of(need.task), []
    if need.language is not None and need.language not in base.languages:
        grade = "poor"
        notes.append(f"not made for {LANGUAGES.get(need.language, need.language)}")
    refused: Refusal | None = None
    if not answer.fits:
        refused = "memory"
        notes.insert(0, "does not fit")
    elif too_long > MOST_CUT * len(need.lengths):
        refused = "context"
        notes.insert(0, f"{too_long} of {len(need.lengths)} rows are longer than its {context:,} tokens")
    elif not permitted:
        refused = "license"
        notes.insert(0, base.terms or f"not {need.license}")
    gpu = machine.gpu is not None
    return BaseOption(
        name=base.name,
        base=name_in_settings(model),
        parameters=total_parameters(model.shape),
        context=context,
        license=base.license,
        terms=base.terms,
        grade=grade,
        good_for=base.good_for,
        not_for=base.not_for,
        gib=answer.peak_reserved_gib if gpu else answer.host_gib,
        minutes=answer.run_minutes,
        refused=refused,
        note="; ".join(notes),
    )


def choose_base(need: BaseNeed, machine: Machine, *, overlay: Path | None = None) -> BaseProposal:
    """The best grade that trains in time; of equals the fastest, since it is also the cheapest to serve."""
    options = weigh_bases(need, machine, overlay=overlay)
    usable = [option for option in options if option.refused is None]
    if not usable:
        reasons = {option.refused for option in options}
        raise UserError(
            "no base of the catalog can be proposed",
            why=f"{machine.name}: " + "; ".join(f"{option.name}: {option.note}" for option in options),
            fix="choose a license of the catalog with --license (`graft plan catalog bases`)"
            if reasons == {"license"}
            else "set a base with --base, or the GPU that will train it with --gpu",
            where="--license" if reasons == {"license"} else "--base",
        )
    timely = [option for option in usable if option.minutes.value <= need.minutes]
    if timely:
        chosen = max(timely, key=lambda option: (ORDER[option.grade], -option.minutes.value))
    else:
        chosen = min(usable, key=lambda option: option.minutes.value)
    return BaseProposal(
        chosen=chosen.name,
        why=_say_why(chosen, need, usable, timely),
        machine=machine.name,
        language=need.language,
        options=options,
    )


def _say_why(chosen: BaseOption, need: BaseNeed, usable: list[BaseOption], timely: list[BaseOption]) -> str:
    limit = say_time(need.minutes)
    if not timely:
        return f"the fastest to train here, though it takes longer than {limit}"
    better = [option for option in usable if ORDER[option.grade] > ORDER[chosen.grade]]
    why = f"{chosen.grade} for {NEEDS[need.task]}, and the fastest such to train here"
    if better:
        next_best = min(better, key=lambda option: option.minutes.value)
        why += (
            f"; {next_best.name} is {next_best.grade} for it and would take about "
            f"{say_time(next_best.minutes.value)}, more than {limit}"
        )
    return why


def refuse_unless_it_fits(
    model: CatalogModel, need: BaseNeed, machine: Machine, *, overlay: Path | None = None
) -> FitAnswer:
    """The plan of a base that the user named; an error with the largest that fits if it does not."""
    answer = plan_base(model, need, machine)
    if answer.fits:
        return answer
    fitting = [option for option in weigh_bases(need, machine, overlay=overlay) if option.refused != "memory"]
    largest = max(fitting, key=lambda option: option.parameters, default=None)
    smaller = (
        f"use the largest of the catalog that fits: --base {largest.base} "
        f"(about {say_time(largest.minutes.value)} to train); or "
        if largest
        else ""
    )
    raise UserError(
        f"the base {name_in_settings(model)} does not fit this machine"
        if machine.gpu is None
        else f"the base {name_in_settings(model)} does not fit {machine.name}",
        why=answer.verdict,
        fix=f"{smaller}specify the GPU that will train it: --gpu 'RTX 4090'; "
        f"`graft plan fit --model {model.name}` shows what would make it fit",
        where="--base",
    )
