"""`graft train`: an adapter, whatever happens to the worker."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, run_and_show


def train(project: Folder = None, json: Json = False) -> None:
    """Train the adapter; interrupted, killed or out of power, it goes on from its last checkpoint.

    Example:  graft train
    """
    run_and_show("train", project=project, as_json=json)
