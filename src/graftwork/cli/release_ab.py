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
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="The gate's primary metric by default; feedback: what users said."),
]
Experiment = Annotated[
    str | None,
    typer.Option("--experiment", help="Its id or a part of it; by default the latest one of these two."),
]
Watch = Annotated[bool, typer.Option("--watch", help="Look again and again until it is decided.")]
Every = Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")]


def ab(
    a: First,
    b: Second,
    traffic: Traffic = "captures",
    cases: Cases = None,
    metric: Metric = None,
    experiment: Experiment = None,
    watch: Watch = False,
    every: Every = 5.0,
    model: Model = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare two releases, and stop when it is decided, not before. Look as often as you like.

    Exit codes: 0 decided, 12 not enough evidence yet.

    On live traffic, the exchanges count that `graft serve --challenger` dealt by lot, once a session.

    Example:  graft release ab champion challenger --metric feedback --watch
    Example:  graft release ab champion challenger --cases replay.jsonl --metric json_valid
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.ab import show_ab
    from graftwork.pipeline.ab import compare_replayed
    from graftwork.pipeline.ab_live import compare_live, watch_live
    from graftwork.pipeline.open_project import use_project
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project
    from graftwork.records.errors import UserMistake

    if traffic != "captures":
        raise UserMistake(
            f"{traffic!r} is no traffic", fix="give --traffic captures, or --cases FILE", where="--traffic"
        )
    if cases is not None and (watch or experiment is not None):
        raise UserMistake(
            "cases are asked, not watched",
            why="--watch and --experiment are for live traffic",
            fix="leave out --cases, or the other two",
            where="--cases",
        )
    with (
        stoppable(),
        RichNarrator(tables=False) as narrator,
        use_project(open_project(project), narrator, model=model) as work,
    ):
        if cases is not None:
            found = compare_replayed(work, a, b, cases_file=cases.absolute(), metric=metric)
        elif watch:
            found = watch_live(work, a, b, metric=metric, experiment=experiment, every_seconds=every)
        else:
            found = compare_live(work, a, b, metric=metric, experiment=experiment)
    if json:
        print_json(found)
    else:
        show_ab(stdout, found)
    raise typer.Exit(found.exit_code)
