"""`graft model`: fetch, list and remove base models of the Hugging Face Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, print_record
from graftwork.cli.output import Json
from graftwork.records.errors import UserError

if TYPE_CHECKING:
    from graftwork.project.folder import ProjectFolder

ModelName = Annotated[str, typer.Argument(help="A name on the Hub: Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@REV.")]

app = typer.Typer(no_args_is_help=True, help="Fetch, list and remove base models from the Hugging Face Hub.")


@app.command("pull")
def pull(
    name: Annotated[
        str | None,
        typer.Argument(help="A name on the Hub, optionally with @REVISION. Default: the project's base."),
    ] = None,
    update: Annotated[
        bool, typer.Option("--update", help="Pin the project to the current commit of the revision.")
    ] = False,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Fetch the config and the tokenizer, not the weights.")
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Fetch a base model: its config, tokenizer and weights, at a pinned commit.

    An interrupted download continues where it stopped. HF_TOKEN is used for gated models, HF_ENDPOINT names
    a mirror.

    Example:  graft model pull Qwen/Qwen3-0.6B
    """
    from graftwork.cli.progress import RichReporter
    from graftwork.model.base import pull_model
    from graftwork.project.open_project import report_downloads

    found = _find_project(project)
    if name is None:
        if found is None:
            raise UserError("no model was specified", fix="graft model pull Qwen/Qwen3-0.6B", where="NAME")
        name = found.settings.base
    root = found.root if found is not None else (project or Path())
    with RichReporter(tables=False) as reporter:
        store = report_downloads(reporter)
        pulled = pull_model(name, project_folder=root, store=store, update=update, weights=not config_only)
    print_record(pulled, as_json=json)


@app.command("list")
def list_(project: Folder = None, json: Json = False) -> None:
    """List the base models on this machine, with their commits and sizes.

    Example:  graft model list
    """
    from graftwork.model.base import list_models

    found = _find_project(project)
    bases: tuple[str, ...] = ()
    if found is not None:
        settings = found.settings
        bases = tuple(settings.of_model(model).base for model in settings.all_models)
    root = found.root if found is not None else Path()
    print_record(list_models(project_folder=root, bases=bases), as_json=json)


@app.command("remove")
def remove(name: ModelName, json: Json = False) -> None:
    """Remove a base model from this machine. A project that uses it fetches it again.

    Example:  graft model remove Qwen/Qwen3-0.6B
    """
    from graftwork.model.base import remove_model

    print_record(remove_model(name), as_json=json)


def _find_project(folder: Path | None) -> "ProjectFolder | None":
    """The project here, if there is one."""
    from graftwork.project.folder import find_project, open_project

    if folder is None and find_project() is None:
        return None
    return open_project(folder)
