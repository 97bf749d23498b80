"""`graft plan compare` and `graft plan buy`: where to run, what it costs, and whether to buy hardware."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from graftwork.plan.cost.runs import MeasuredRun
    from graftwork.records.fit import FitQuestion

ANY_CARD = "H100 SXM"

RUN = "The run"
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", help="A name in the catalog, a folder or a config.json. Default: the project's base."
    ),
]
Method = Annotated[
    Literal["qlora", "lora", "dora", "full"] | None,
    typer.Option(
        "--method", help="Default: the method of the project, otherwise qlora.", rich_help_panel=RUN
    ),
]
Seq = Annotated[
    str | None,
    typer.Option(
        "--seq",
        help="Tokens per row, or `data` for the lengths in the project's dataset.",
        rich_help_panel=RUN,
    ),
]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows per epoch.", min=1, rich_help_panel=RUN)]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", help="Number of epochs.", min=0.001, rich_help_panel=RUN),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Rows per optimizer step.", min=1, rich_help_panel=RUN)
]
Rank = Annotated[int | None, typer.Option("--rank", help="Adapter rank.", min=1, rich_help_panel=RUN)]
Engine = Annotated[
    Literal["graft", "hf"],
    typer.Option("--engine", help="graft, or hf for transformers and PEFT.", rich_help_panel=RUN),
]
Electricity = Annotated[float, typer.Option("--electricity", help="USD per kWh, for your own GPUs.", min=0)]
Waiting = Annotated[
    float, typer.Option("--waiting", help="What an hour of waiting costs you, in USD.", min=0)
]
Places = Annotated[list[str] | None, typer.Option("--place", help="Rent only from this place. Repeatable.")]
Catalog = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder with your own prices.csv, places.csv, … Default: $GRAFT_CATALOG."),
]
Today = Annotated[
    datetime | None,
    typer.Option("--today", formats=["%Y-%m-%d"], help="Date for the age of prices. Default: today."),
]


def compare(
    model: ModelName = None,
    method: Method = None,
    seq: Seq = None,
    rows: Rows = None,
    epochs: Epochs = None,
    batch: Batch = None,
    rank: Rank = None,
    engine: Engine = "graft",
    budget: Annotated[float | None, typer.Option("--budget", help="Budget in USD.", min=0)] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="Hours until the result is needed.", min=0)
    ] = None,
    goal: Annotated[
        Literal["cost", "time"], typer.Option("--goal", help="Sort by cost or by time.")
    ] = "cost",
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only offers with this GPU.")] = None,
    cards: Annotated[
        int | None,
        typer.Option(
            "--cards", help="Maximum GPUs per machine. Default: the smallest that fits, 8 for full.", min=1
        ),
    ] = None,
    place: Places = None,
    own: Annotated[
        list[str] | None, typer.Option("--own", help='GPUs that you own, such as "2x RTX 5060 Ti 16GB".')
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Measured hours of the run; requires --on.", min=0),
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="The GPU on which --hours was measured.")] = None,
    value: Annotated[
        float | None, typer.Option("--value", help="Value of a successful run in USD.", min=0)
    ] = None,
    success: Annotated[
        float, typer.Option("--success", help="Share of runs that succeed.", min=0, max=1)
    ] = 1.0,
    runs_a_month: Annotated[
        float, typer.Option("--runs-a-month", help="Runs per month that share a subscription.", min=0.01)
    ] = 4.0,
    preemptions: Annotated[
        float | None,
        typer.Option("--preemptions", help="Spot preemptions per hour.", min=0),
    ] = None,
    waiting: Waiting = 0.0,
    electricity: Electricity = 0.30,
    today: Today = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every offer instead of the best of each place.")
    ] = False,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare places for this run: hours, price, cost, interruptions, limits, and what changes the winner.

    Exit code 1: no place fits the budget and the deadline.
    Example:  graft plan compare --model olmo-7b --rows 5000 --epochs 3 --budget 500 --deadline 24
    """
    from datetime import date

    from graftwork.cli.output import print_json, stdout
    from graftwork.plan.cost.compare import OfferFilter, compare_places
    from graftwork.plan.cost.types import Terms

    question = run_asked(
        model, method=method, seq=seq, rows=rows, epochs=epochs, batch=batch, rank=rank, engine=engine,
        catalog=catalog, project=project,
    )  # fmt: skip
    found = compare_places(
        question,
        OfferFilter(tuple(place or ()), gpu, cards, [cards_of(text, "--own") for text in own or ()]),
        terms=Terms(
            today=today.date() if today else date.today(),
            goal=goal,
            budget_usd=budget,
            deadline_hours=deadline,
            value_usd=value,
            success_share=success,
            runs_a_month=runs_a_month,
            waiting_usd_per_hour=waiting,
            electricity_usd_kwh=electricity,
            preemptions_per_hour=preemptions,
        ),
        overlay=catalog,
        measured=_measured(hours, on),
    )
    if json:
        print_json(found)
    else:
        from graftwork.cli.show.costs import show_comparison

        show_comparison(stdout, found, everything=everything)
    raise typer.Exit(0 if found.best else EXIT_ANSWER_IS_NO)


def run_asked(
    model: str | None, *, catalog: Path | None, project: Path | None, **stated: Any
) -> "FitQuestion":
    """The run as a question for `graft plan fit`; the GPU only completes it."""
    from graftwork.pipeline.fit import FitRequest, question_of

    return question_of(
        FitRequest(model=model, catalog=catalog, project=project, gpu=ANY_CARD, gpus=1, **stated)
    )


def cards_of(text: str, option: str) -> tuple[str, int]:
    from graftwork.plan.purchase.types import read_purchase_option

    purchase = read_purchase_option(text, option=option)
    return purchase.name, purchase.cards


def _measured(hours: float | None, on: str | None) -> "MeasuredRun | None":
    from graftwork.plan.cost.runs import MeasuredRun
    from graftwork.records.errors import UserMistake

    if hours is None and on is None:
        return None
    if hours is None or on is None or hours <= 0:
        raise UserMistake(
            "--hours and --on must be given together",
            why="hours can be converted to other GPUs only if the GPU is known",
            fix='give both, such as --hours 2 --on "A100 40GB"',
            where="--hours",
        )
    name, count = cards_of(on, "--on")
    return MeasuredRun(gpu=name, gpus=count, hours=hours)


def buy(
    have: Annotated[str, typer.Option("--have", help='Your current hardware, such as "RTX 5060 Ti 16GB".')],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help='Hardware to consider and its price, such as "2x RTX 5060 Ti 16GB=700". '
            "Repeatable. Default price: the launch price of the GPUs.",
        ),
    ] = None,
    model: ModelName = None,
    method: Method = None,
    seq: Seq = None,
    rows: Rows = None,
    epochs: Epochs = None,
    batch: Batch = None,
    rank: Rank = None,
    engine: Engine = "graft",
    runs_a_week: Annotated[float, typer.Option("--runs-a-week", help="Runs per week.", min=0.01)] = 1.0,
    years: Annotated[float, typer.Option("--years", help="Years of use.", min=0.1)] = 2.0,
    electricity: Electricity = 0.30,
    residual: Annotated[
        float,
        typer.Option("--residual", help="Resale value as a share of the price.", min=0, max=1),
    ] = 0.5,
    host_watts: Annotated[
        float, typer.Option("--host-watts", help="Power of the machine without its GPUs, in watts.", min=0)
    ] = 120.0,
    ram: Annotated[
        float | None, typer.Option("--ram", help="Host memory in GiB. Default: 64.", min=1)
    ] = None,
    place: Places = None,
    waiting: Waiting = 0.0,
    today: Today = None,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare keeping, buying and renting hardware: capability, speed-up, cost per run, payback.

    Exit code 1: no option can do the run.

    Example:  graft plan buy --have "RTX 5060 Ti 16GB" --option "2x RTX 5060 Ti 16GB=700" --model olmo-7b
    """
    from datetime import date

    from graftwork.cli.output import print_json, stdout
    from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
    from graftwork.plan.cost.types import Terms
    from graftwork.plan.purchase.decide import WEEKS_A_MONTH, Use, weigh_purchase
    from graftwork.plan.purchase.types import read_purchase_option

    question = run_asked(
        model, method=method, seq=seq, rows=rows, epochs=epochs, batch=batch, rank=rank, engine=engine,
        catalog=catalog, project=project,
    )  # fmt: skip
    found = weigh_purchase(
        question,
        have=read_purchase_option(have, option="--have"),
        options=[read_purchase_option(text, option="--option") for text in option or ()],
        use=Use(
            runs_a_week=runs_a_week,
            years=years,
            electricity_usd_kwh=electricity,
            residual_share=residual,
            host_watts=host_watts,
            waiting_usd_per_hour=waiting,
            ram_gib=USUAL_RAM_GIB if ram is None else ram,
        ),
        terms=Terms(
            today=today.date() if today else date.today(),
            runs_a_month=runs_a_week * WEEKS_A_MONTH,
            waiting_usd_per_hour=waiting,
            electricity_usd_kwh=electricity,
        ),
        overlay=catalog,
        places=tuple(place or ()),
    )
    if json:
        print_json(found)
    else:
        from graftwork.cli.show.costs import show_purchase

        show_purchase(stdout, found)
    raise typer.Exit(0 if found.best else EXIT_ANSWER_IS_NO)
