"""`graft plan`: what this project's run will take."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, run_and_show


def plan(project: Folder = None, json: Json = False) -> None:
    """Say before the run what it takes: memory, tokens, steps, minutes, each with a range.

    Example:  graft plan --json | jq .minutes
    """
    run_and_show("plan", project=project, as_json=json)
