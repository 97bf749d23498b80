"""Shared parts of commands: options, opening the project with progress on the terminal, detached runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import print_json, stdout

if TYPE_CHECKING:
    from graftwork.api.project import Project
    from graftwork.project.open_project import OpenProject
    from graftwork.records.base import Record

Folder = Annotated[
    Path | None, typer.Option("--project", "-C", help="Project folder. Default: the working directory.")
]
Model = Annotated[str | None, typer.Option("--model", help="A model in graft.yaml. Default: the main model.")]
Name = Annotated[
    str, typer.Argument(help="An alias, a version (1.4.0 or tagger@1.4.0), or an id or its first characters.")
]
Alias = Annotated[
    str | None,
    typer.Option(
        "--alias",
        help="The alias. Default: the one in graft.yaml (champion). tagger/champion also names the model.",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="The reason, recorded in the log.")]
Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Plan here, then run in the background, without the terminal."),
]
RunId = Annotated[str | None, typer.Option("--run", help="Id of the run, or its first characters.")]
POLL_SECONDS = 0.2


class EngineName(StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


Engine = Annotated[
    EngineName | None,
    typer.Option("--engine", help="Where pieces of work run. Default: `engine` in graft.yaml."),
]


def has_subcommand(context: typer.Context) -> bool:
    """Return whether a command of the group follows. Options of the group before it would be ignored, so they
    are refused.
    """
    if context.invoked_subcommand is None:
        return False
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{parameter.opts[0]} comes before the command: put it after `{context.invoked_subcommand}`"
            )
    return True


@contextmanager
def reporting(
    project: Path | None, model: str | None = None, *, tables: bool = False, engine: EngineName | None = None
) -> "Iterator[Project]":
    """Open the project with progress on standard error. SIGTERM stops the work at a safe point."""
    from graftwork.api.project import open_project
    from graftwork.cli.progress import RichReporter
    from graftwork.process.worker import stoppable

    with stoppable(), RichReporter(tables=tables) as reporter:
        found = open_project(project, model=model, reporter=reporter)
        if engine is not None:
            settings = found.folder.settings.model_copy(update={"engine": engine.value})
            found = replace(found, folder=replace(found.folder, settings=settings))
        yield found


@contextmanager
def opened(project: Path | None, model: str | None = None) -> "Iterator[OpenProject]":
    """The stores of a project, without progress."""
    from graftwork.api.project import open_project

    with open_project(project, model=model).open() as work:
        yield work


@contextmanager
def opened_with_progress(project: Path | None, model: str | None = None) -> "Iterator[OpenProject]":
    from graftwork.api.project import open_project
    from graftwork.cli.progress import RichReporter

    with (
        RichReporter(tables=False) as reporter,
        open_project(project, model=model, reporter=reporter).open() as work,
    ):
        yield work


def print_record(record: "Record", *, as_json: bool, **more: bool) -> None:
    """The record on standard output: as JSON, with `more` in it, or as tables."""
    from graftwork.views.terminal import show

    if as_json:
        print_json({**record.model_dump(mode="json"), **more})
    else:
        show(stdout, record)


def start_detached(command: str, *, project: Path | None, model: str | None, as_json: bool) -> None:
    """Start `graft COMMAND` in the background, and print the id of the run and how to follow it."""
    from graftwork.api.runs import start_in_background

    with reporting(project, model) as found:
        started = start_in_background(found, command, plan=True)
    print_record(started, as_json=as_json)
