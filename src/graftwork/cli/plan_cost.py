"""`graft plan compare`: where this run is best put, what it costs there, and what would change that."""

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
    typer.Option("--model", help="Name in the catalog, folder or config.json; else the project's base."),
]
Method = Annotated[
    Literal["qlora", "lora", "dora", "full"] | None,
    typer.Option("--method", help="qlora, or the project's, where left out.", rich_help_panel=RUN),
]
Seq = Annotated[
    str | None,
    typer.Option("--seq", help="Tokens of a row, or `data`: as the project's are.", rich_help_panel=RUN),
]
Rows = Annotated[int | None, typer.Option("--rows", help="Rows of an epoch.", min=1, rich_help_panel=RUN)]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", help="Times that all rows are seen.", min=0.001, rich_help_panel=RUN),
]
Batch = Annotated[
    int | None, typer.Option("--batch", help="Rows of an optimizer step.", min=1, rich_help_panel=RUN)
]
Rank = Annotated[int | None, typer.Option("--rank", help="Rank of the adapters.", min=1, rich_help_panel=RUN)]
Engine = Annotated[
    Literal["graft", "hf"],
    typer.Option("--engine", help="graft, or hf: transformers and PEFT.", rich_help_panel=RUN),
]
Electricity = Annotated[float, typer.Option("--electricity", help="USD a kWh, for own cards.", min=0)]
Waiting = Annotated[float, typer.Option("--waiting", help="USD that an hour of waiting costs you.", min=0)]
Places = Annotated[
    list[str] | None, typer.Option("--place", help="Rent only from this place; may be repeated.")
]
Catalog = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder with your own prices.csv, places.csv, …; else $GRAFT_CATALOG."),
]
Today = Annotated[
    datetime | None,
    typer.Option(
        "--today", formats=["%Y-%m-%d"], help="The day from which prices are aged; today by default."
    ),
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
    budget: Annotated[
        float | None, typer.Option("--budget", help="USD that there are in all.", min=0)
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="Hours from now to the result.", min=0)
    ] = None,
    goal: Annotated[
        Literal["cost", "time"], typer.Option("--goal", help="What the rows are sorted by.")
    ] = "cost",
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only offers of this card.")] = None,
    cards: Annotated[
        int | None,
        typer.Option("--cards", help="Machines of up to so many cards; the smallest, or 8 for full.", min=1),
    ] = None,
    place: Places = None,
    own: Annotated[
        list[str] | None, typer.Option("--own", help='Cards that you have, such as "2x RTX 5060 Ti 16GB".')
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option("--hours", help="Hours that the run took where you measured it, with --on.", min=0),
    ] = None,
    on: Annotated[str | None, typer.Option("--on", help="The card that --hours were measured on.")] = None,
    value: Annotated[
        float | None, typer.Option("--value", help="USD that a run is worth that comes out well.", min=0)
    ] = None,
    success: Annotated[
        float, typer.Option("--success", help="Share of runs that come out well.", min=0, max=1)
    ] = 1.0,
    runs_a_month: Annotated[
        float, typer.Option("--runs-a-month", help="Runs that share a subscription.", min=0.01)
    ] = 4.0,
    preemptions: Annotated[
        float | None,
        typer.Option("--preemptions", help="How often an hour spot machines are taken away.", min=0),
    ] = None,
    waiting: Waiting = 0.0,
    electricity: Electricity = 0.30,
    today: Today = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every offer, not the best of each place.")
    ] = False,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare places for this very run: hours, price, cost, interruptions, limits, what changes the winner.

    Exit code 1: it fits nowhere within the budget and the deadline.

    Example:  graft plan compare --model olmo-7b --rows 5000 --epochs 3 --budget 500 --deadline 24
    """
    from datetime import date

    from graftwork.cli.output import print_json, stdout
    from graftwork.plan.cost.compare import compare_places
    from graftwork.plan.cost.types import Terms

    question = run_asked(
        model, method=method, seq=seq, rows=rows, epochs=epochs, batch=batch, rank=rank, engine=engine,
        catalog=catalog, project=project,
    )  # fmt: skip
    found = compare_places(
        question,
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
        gpu=gpu,
        cards=cards,
        places=tuple(place or ()),
        own=[cards_of(text, "--own") for text in own or ()],
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
    """What is trained how, as `graft plan fit` understands it; a card is only named to complete it."""
    from graftwork.pipeline.fit import FitRequest, question_of

    return question_of(
        FitRequest(model=model, catalog=catalog, project=project, gpu=ANY_CARD, gpus=1, **stated)
    )


def cards_of(text: str, option: str) -> tuple[str, int]:
    from graftwork.plan.purchase.types import read_purchase_option

    wish = read_purchase_option(text, option=option)
    return wish.name, wish.cards


def _measured(hours: float | None, on: str | None) -> "MeasuredRun | None":
    from graftwork.plan.cost.runs import MeasuredRun
    from graftwork.records.errors import UserMistake

    if hours is None and on is None:
        return None
    if hours is None or on is None or hours <= 0:
        raise UserMistake(
            "--hours and --on belong together",
            why="hours say something about other cards only if theirs is known",
            fix='give both, such as --hours 2 --on "A100 40GB"',
            where="--hours",
        )
    name, count = cards_of(on, "--on")
    return MeasuredRun(gpu=name, gpus=count, hours=hours)


WEEKS_A_MONTH = 365.25 / 7 / 12


def buy(
    have: Annotated[str, typer.Option("--have", help='What you train on now, such as "RTX 5060 Ti 16GB".')],
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            help='The machine there would be, and what is paid for it, such as "2x RTX 5060 Ti 16GB=700". '
            "May be repeated; without a price, the cards' launch price.",
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
    runs_a_week: Annotated[
        float, typer.Option("--runs-a-week", help="How often such a run is made.", min=0.01)
    ] = 1.0,
    years: Annotated[float, typer.Option("--years", help="How long it will be used.", min=0.1)] = 2.0,
    electricity: Electricity = 0.30,
    residual: Annotated[
        float,
        typer.Option(
            "--residual", help="Share of its price that a card is sold for in the end.", min=0, max=1
        ),
    ] = 0.5,
    host_watts: Annotated[
        float, typer.Option("--host-watts", help="What the machine around the cards takes.", min=0)
    ] = 120.0,
    ram: Annotated[
        float | None, typer.Option("--ram", help="GiB of the machine's own memory; 64 by default.", min=1)
    ] = None,
    place: Places = None,
    waiting: Waiting = 0.0,
    today: Today = None,
    catalog: Catalog = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Keep, buy or rent: what becomes possible, how much faster, cost a run over the years, payback.

    Exit code 1: nothing of it can do the run.

    Example:  graft plan buy --have "RTX 5060 Ti 16GB" --option "2x RTX 5060 Ti 16GB=700" --model olmo-7b
    """
    from datetime import date

    from graftwork.cli.output import print_json, stdout
    from graftwork.plan.cost.types import Terms
    from graftwork.plan.purchase.decide import Use, weigh_purchase
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
        ),
        terms=Terms(
            today=today.date() if today else date.today(),
            runs_a_month=runs_a_week * WEEKS_A_MONTH,
            waiting_usd_per_hour=waiting,
            electricity_usd_kwh=electricity,
        ),
        ram_gib=ram,
        overlay=catalog,
        places=tuple(place or ()),
    )
    if json:
        print_json(found)
    else:
        from graftwork.cli.show.costs import show_purchase

        show_purchase(stdout, found)
    raise typer.Exit(0 if found.best else EXIT_ANSWER_IS_NO)
