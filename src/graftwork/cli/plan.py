"""`graft plan`: what this project's run will take. The other questions that are asked beforehand hang below it."""

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_and_show

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def plan(context: typer.Context, project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Say before the run what it takes: memory, tokens, steps, minutes, each with a range.

    Example:  graft plan --json | jq .minutes
    """
    if context.invoked_subcommand is not None:
        return
    run_and_show("plan", project=project, model=model, as_json=json)
