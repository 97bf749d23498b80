"""Base models of the Hugging Face Hub on this machine: fetch, list and remove them.

In: a name such as `Qwen/Qwen3-0.6B@REVISION`. Out: the records of `graft model`. The folder of a project
keeps the commit that it uses.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.project.reporter import NullReporter, Reporter

if TYPE_CHECKING:
    from graftwork.model.base import LocalModels, PulledModel, RemovedModels


def pull_model(
    name: str,
    *,
    project: str | Path = ".",
    update: bool = False,
    weights: bool = True,
    reporter: Reporter | None = None,
) -> "PulledModel":
    """Fetch a model at the commit that the project uses, or with `update` at the newest of its revision."""
    from graftwork.model import base as models
    from graftwork.project.open_project import report_downloads

    store = report_downloads(reporter or NullReporter())
    return models.pull_model(name, project_folder=Path(project), store=store, update=update, weights=weights)


def list_models(*, project: str | Path = ".") -> "LocalModels":
    """List the base models on this machine, with their commits and sizes; those of a project are marked."""
    from graftwork.model import base as models
    from graftwork.project.load import PROJECT_FILE, open_project

    root = Path(project)
    bases: tuple[str, ...] = ()
    if (root / PROJECT_FILE).is_file():
        settings = open_project(root).settings
        bases = tuple(settings.of_model(model).base for model in settings.all_models)
    return models.list_models(project_folder=root, bases=bases)


def remove_model(name: str) -> "RemovedModels":
    """Remove a model from this machine: one commit if it is named, else all of them."""
    from graftwork.model import base as models

    return models.remove_model(name)
