"""`graft release ab`: which of two releases is better, on live traffic or on cases."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model

First = Annotated[str, typer.Argument(help="The release to beat: an alias, a version or an id.")]
Second = Annotated[str, typer.Argument(help="The release that may be better.")]
Traffic = Annotated[str, typer.Option("--traffic", help="captures: what the endpoint kept of both.")]
Cases = Annotated[Path | None, typer.Option("--cases", help="A JSONL file of cases that both are asked.")]
Metric = Annotated[str | None, typer.Option("--metric", help="The gate's primary metric by default.")]


def ab(
    a: First,
    b: Second,
    traffic: Traffic = "captures",
    cases: Cases = None,
    metric: Metric = None,
    model: Model = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare two releases, and stop when it is decided, not before. Look as often as you like.

    Exit codes: 0 decided, 12 not enough evidence yet.

    Example:  graft release ab champion challenger --cases replay.jsonl --metric json_valid
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.coordinate.ab import compare_live, compare_replayed
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.process.stopping import stoppable
    from graftwork.project.folder import open_project
    from graftwork.records.errors import UserMistake

    if traffic != "captures":
        raise UserMistake(
            f"{traffic!r} is no traffic", fix="give --traffic captures, or --cases FILE", where="--traffic"
        )
    with (
        stoppable(),
        RichNarrator(tables=False) as narrator,
        open_workplace(open_project(project), narrator, model=model) as work,
    ):
        if cases is not None:
            found = compare_replayed(work, a, b, cases_file=cases.absolute(), metric=metric)
        else:
            found = compare_live(work, a, b, metric=metric)
    if json:
        print_json(found)
    else:
        counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in found.counts.items())
        lines = (
            found.sentence,
            f"{counts}; ungraded {found.ungraded}; cases asked {found.asked}",
            f"B less A: {found.low:+.1%} to {found.high:+.1%} ({found.confidence:.0%}, at all times); "
            f"p {found.p_value:.3g}, evidence {found.e_value:.3g} to 1",
            *found.remarks,
        )
        stdout.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)
