"""`graft plan buy`: keep the card, buy another, or rent."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.plan_compare import (
    Batch,
    Catalog,
    Electricity,
    Engine,
    Epochs,
    Method,
    ModelName,
    Places,
    Rank,
    Rows,
    Seq,
    Today,
    Waiting,
    run_asked,
)
from graftwork.cli.steps import Folder
from graftwork.records.errors import EXIT_ANSWER_IS_NO

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
        from graftwork.cli.show.buying import show_purchase

        show_purchase(stdout, found)
    raise typer.Exit(0 if found.best else EXIT_ANSWER_IS_NO)
