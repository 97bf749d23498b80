"""`graft plan`: what this project's run will take."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_and_show


def plan(project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Say before the run what it takes: memory, tokens, steps, minutes, each with a range.

    Example:  graft plan --json | jq .minutes
    """
    run_and_show("plan", project=project, model=model, as_json=json)
