"""`graft train`: an adapter, whatever happens to the worker."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_and_show


def train(project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Train the adapter; interrupted, killed or out of power, it goes on from its last checkpoint.

    Example:  graft train
    """
    run_and_show("train", project=project, model=model, as_json=json)
