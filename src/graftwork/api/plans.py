"""Plans without a project: does a run fit a machine, how long does it take, where, and what does it cost?

Also the catalog that these answers come from: models, hardware and prices, each with its source and age.
"""

from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.bases import list_bases
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB, list_cpus, list_gpus
from graftwork.plan.catalog.models import find_model, list_models
from graftwork.plan.catalog.prices import (
    age_days,
    is_stale,
    list_offers,
    list_places,
    list_quoted_offers,
    list_token_prices,
)
from graftwork.plan.fit.project import FitRequest, answer_fit, named_machine, question_of
from graftwork.records.base import Figure, Record
from graftwork.records.errors import UserError
from graftwork.records.plan import FitAnswer, FitQuestion
from graftwork.text.wording import explain_error

if TYPE_CHECKING:
    from graftwork.plan.cost import PlaceComparison
    from graftwork.plan.purchase import Purchase
    from graftwork.plan.serving_question import ServeAnswer

R = TypeVar("R", bound=Record)
ANY_GPU = "H100 SXM"
"""GPU for questions that do not name one."""
ELECTRICITY_USD = 0.30


def plan_fit(
    model: str | None = None, *, on_progress: Callable[[str], None] = lambda _message: None, **options: Any
) -> FitAnswer:
    """Whether a training run fits, its best settings, memory and time: what `graft plan fit` answers.

    The options are those of the command, by the same names: `method`, `gpu`, `gpus`, `seq`, `rows` …
    """
    unknown = sorted(set(options) - set(FitRequest.model_fields))
    if unknown:
        raise UserError(
            f"plan_fit has no option {unknown[0]!r}",
            why=f"it takes: {', '.join(FitRequest.model_fields)}",
            fix="use one of these names",
            where=unknown[0],
        )
    try:
        if isinstance(options.get("seq"), int):
            options["seq"] = str(options["seq"])
        asked = FitRequest.model_validate({"model": model, **options})
    except ValidationError as refused:
        first = refused.errors()[0]
        name = str(first["loc"][0])
        fix = "`graft plan fit --help` lists the accepted values"
        if name == "algorithm" and str(first["input"]).lower() == "ppo":
            fix = "use grpo, which needs no value model; docs/reinforcement.md maps the settings of PPO to it"
        raise UserError(
            f"--{name} is {first['input']!r}",
            why=explain_error(first),
            fix=fix,
            where=f"--{name}",
        ) from refused
    return answer_fit(asked, on_progress=on_progress)


def plan_serve(model: str, **options: Any) -> "ServeAnswer":
    """Memory, latency and users of a model on a machine: what `graft plan serve` answers."""
    from graftwork.plan.serving import make_question, serve
    from graftwork.plan.serving_question import ServeLoad

    named = {name: options.pop(name, None) for name in ("gpu", "gpus", "cpu", "ram")}
    load = _validated(ServeLoad, options)
    machine = named_machine(gpu=named["gpu"], gpus=named["gpus"], cpu=named["cpu"], ram_gib=named["ram"])
    return serve(make_question(find_model(model), load, machine=machine), gpus=list_gpus())


class ComparedPlaces(Record):
    """What `graft plan compare` is asked, besides the run itself."""

    gpu: str | None = None
    max_gpus: int | None = None
    place: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    budget: float | None = None
    deadline: float | None = None
    goal: Literal["cost", "time"] = "cost"


def plan_compare(model: str | None = None, **options: Any) -> "PlaceComparison":
    """Where to run, how long it takes and what it costs: what `graft plan compare` answers."""
    from graftwork.plan.cost import Terms
    from graftwork.plan.cost_comparison import OfferFilter, compare_places
    from graftwork.plan.purchase import read_purchase_option

    asked, run = _split_options(ComparedPlaces, options)
    own = [read_purchase_option(text, option="--own") for text in asked.own]
    return compare_places(
        _run_question(model, run),
        OfferFilter(asked.place, asked.gpu, asked.max_gpus, [(option.name, option.gpus) for option in own]),
        terms=Terms(
            today=date.today(),
            goal=asked.goal,
            budget_usd=asked.budget,
            deadline_hours=asked.deadline,
            electricity_usd_kwh=ELECTRICITY_USD,
        ),
    )


class WeighedPurchase(Record):
    """What `graft plan buy` is asked, besides the run itself."""

    have: str
    option: tuple[str, ...] = ()
    runs_per_week: float = Field(1.0, gt=0)
    years: float = Field(2.0, gt=0)
    electricity: float = Field(0.30, ge=0)


def plan_buy(model: str | None = None, **options: Any) -> "Purchase":
    """Keep, buy or rent, over the years: what `graft plan buy` answers."""
    from graftwork.plan.cost import Terms
    from graftwork.plan.purchase import WEEKS_PER_MONTH, Use, read_purchase_option, weigh_purchase

    asked, run = _split_options(WeighedPurchase, options)
    return weigh_purchase(
        _run_question(model, run),
        have=read_purchase_option(asked.have, option="--have"),
        options=[read_purchase_option(text, option="--option") for text in asked.option],
        use=Use(
            runs_per_week=asked.runs_per_week,
            years=asked.years,
            electricity_usd_kwh=asked.electricity,
            residual_share=0.5,
            host_watts=120.0,
            waiting_usd_per_hour=0.0,
            ram_gib=USUAL_RAM_GIB,
        ),
        terms=Terms(
            today=date.today(),
            runs_per_month=asked.runs_per_week * WEEKS_PER_MONTH,
            electricity_usd_kwh=asked.electricity,
        ),
    )


def list_known_hardware() -> dict[str, list[str]]:
    """Names in the catalog, for forms: models, GPUs and CPUs."""
    return {
        "models": [model.name for model in list_models()],
        "gpus": [gpu.name for gpu in list_gpus()],
        "cpus": [cpu.name for cpu in list_cpus()],
    }


def _run_question(model: str | None, options: dict[str, Any]) -> FitQuestion:
    """The run as a question; the GPU only completes it."""

    return question_of(_validated(FitRequest, {"model": model, "gpu": ANY_GPU, "gpus": 1, **options}))


def _split_options(kind: type[R], options: dict[str, Any]) -> tuple[R, dict[str, Any]]:
    """The options of a question, and those of its run."""
    own = {name: value for name, value in options.items() if name in kind.model_fields}
    run = {name: value for name, value in options.items() if name not in kind.model_fields}
    return _validated(kind, own), run


def _validated(kind: type[R], options: dict[str, Any]) -> R:
    try:
        return kind.model_validate(options)
    except ValidationError as refused:
        first = refused.errors(include_url=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise UserError(
            f"{name} is {first['input']!r}" if name else "the options do not fit together",
            why=explain_error(first),
            fix="enter another value",
            where=name,
        ) from refused


CATALOG_PARTS = ("models", "bases", "gpus", "cpus", "prices", "quoted", "places", "api_prices")


def list_catalog(kind: str | None, *, overlay: Path | None, today: date) -> dict[str, Any]:
    """The rows of one kind, or of all, each with its age in days; prices also say whether they are stale."""
    if kind is not None and kind not in CATALOG_PARTS:
        raise UserError(
            f"the catalog has no part {kind!r}",
            why="no catalog part has this name",
            fix=f"use one of {', '.join(CATALOG_PARTS)}",
            where=kind,
        )
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "models": lambda: [
            _aged(model, today)
            | {"parameters": Figure.exact(total_parameters(model.shape)).model_dump(mode="json")}
            for model in list_models(overlay=overlay)
        ],
        "bases": lambda: [_aged(base, today) for base in list_bases(overlay=overlay)],
        "gpus": lambda: [_aged(gpu, today) for gpu in list_gpus(overlay=overlay)],
        "cpus": lambda: [_aged(cpu, today) for cpu in list_cpus(overlay=overlay)],
        "prices": lambda: [_priced(offer, today) for offer in list_offers(overlay=overlay)],
        "quoted": lambda: [_priced(offer, today) for offer in list_quoted_offers(overlay=overlay)],
        "places": lambda: [_priced(place, today) for place in list_places(overlay=overlay)],
        "api_prices": lambda: [_priced(price, today) for price in list_token_prices(overlay=overlay)],
    }
    return {name: make() for name, make in parts.items() if kind in {None, name}}


def _aged(row: Record, today: date) -> dict[str, Any]:
    body = row.model_dump(mode="json")
    return {**body, "age_days": age_days(body["dated"], today=today)}


def _priced(row: Record, today: date) -> dict[str, Any]:
    body = _aged(row, today)
    return {**body, "stale": is_stale(body["dated"], today=today)}
