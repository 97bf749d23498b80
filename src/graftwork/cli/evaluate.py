"""`graft eval`: base and adapter on the same held-out cases."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_and_show


def evaluate(project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Let base and adapter answer the held-out cases; rates with exact intervals, compared in pairs.

    Example:  graft eval
    """
    run_and_show("evaluate", project=project, model=model, as_json=json)
