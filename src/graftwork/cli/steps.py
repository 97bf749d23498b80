"""What the verbs that run a step have in common: open the project, run up to the step, show."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graftwork.pipeline.step import StepOutputs
    from graftwork.records.plan import RunPlan

Folder = Annotated[
    Path | None, typer.Option("--project", "-C", help="Folder of the project; the working folder by default.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="One of the models in graft.yaml; the main one by default.")
]


def run_upto(
    step: str | None, *, project: Path | None, model: str | None = None, tables: bool = False
) -> "StepOutputs":
    """Bring the project up to date as far as `step`, telling on standard error how it goes."""
    from graftwork.cli.narrate import RichNarrator
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import run_pipeline
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        stoppable(),
        RichNarrator(tables=tables) as narrator,
        use_project(opened, narrator, model=model) as work,
    ):
        return run_pipeline(work, upto=step)


def run_and_show(step: str, *, project: Path | None, as_json: bool, model: str | None = None) -> None:
    """Run up to the step; then its result, in full, even where nothing had to be done."""
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show

    output = run_upto(step, project=project, model=model).outputs[step]
    if as_json:
        print_json(output)
    else:
        show(stdout, output)


def whole_run(project: Path | None, model: str | None = None) -> "RunPlan":
    """How long the whole run is expected to take. Nothing is done."""
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.table import plan_whole_run
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter(), model=model) as work:
        return plan_whole_run(work)
