"""`graft plan residuals`: how far plans were off, over past runs."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder


def residuals(
    project: Folder = None,
    runs: Annotated[int, typer.Option(min=1, help="How many past runs, the latest first.")] = 20,
    json: Json = False,
) -> None:
    """List what past runs took beside what their plans had said, and the bias of each kind of figure.

    A bias is the median of how far a figure was off: +10 % says that runs take a tenth more than planned.

    Example:  graft plan residuals --json | jq '.biases[] | select(.figure == "minutes").off'
    """
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.past_residuals import past_residuals
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter()) as work:
        found = past_residuals(work, runs=runs)
    if json:
        from graftwork.cli.output import print_json
        from graftwork.records.base import Figure

        body = found.model_dump(mode="json")
        for run, kept in zip(body["runs"], found.runs, strict=True):
            for one, residual in zip(run["residuals"], kept.residuals, strict=True):
                one["actual"] = Figure.exact(residual.actual, residual.planned.unit).model_dump(mode="json")
                one["off"] = Figure.exact(residual.off).model_dump(mode="json")
                one["inside"] = residual.inside
        print_json(body)
        return
    from graftwork.cli.output import stdout
    from graftwork.cli.show.residuals import show_past

    show_past(stdout, found)
