"""`graft plan catalog`: the facts that plans are made of, with their sources and age."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json

Catalog = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder with your own models.csv, gpus.csv, …; else $GRAFT_CATALOG."),
]


def catalog(
    kind: Annotated[
        str | None,
        typer.Argument(help="models, gpus, cpus, prices, quoted or places; all of them where left out."),
    ] = None,
    catalog: Catalog = None,
    json: Json = False,
) -> None:
    """List the models, cards, processors, prices and places that plans know, with source, date and age.

    Rows of your own files of the same names replace ours or add to them. Old prices are marked.

    Example:  graft plan catalog prices --json | jq '.prices[] | select(.stale)'
    """
    from datetime import date

    from graftwork.cli.output import print_json
    from graftwork.pipeline.catalog import list_catalog

    listed = list_catalog(kind, overlay=catalog, today=date.today())
    if json:
        print_json(listed)
        return
    from graftwork.cli.output import stdout
    from graftwork.cli.show.catalog import show_catalog

    show_catalog(stdout, listed)
