"""What the verbs of `graft release` share: how a release is named, and the project opened, quietly or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from graftwork.pipeline.open_project import OpenProject

Name = Annotated[
    str, typer.Argument(help="An alias, a version (1.4.0, tagger@1.4.0), an id, or the beginning of one.")
]
Alias = Annotated[
    str | None,
    typer.Option(
        "--alias",
        help="The alias; that of graft.yaml (champion) by default. tagger/champion names the model, too.",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Why; it goes into the log.")]


@contextmanager
def opened(project: "Path | None", model: str | None = None) -> "Iterator[OpenProject]":
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter(), model=model) as work:
        yield work


@contextmanager
def opened_aloud(project: "Path | None", model: str | None = None) -> "Iterator[OpenProject]":
    """For what takes a while: how far it is, on standard error."""
    from graftwork.cli.narrate import RichNarrator
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    with (
        RichNarrator(tables=False) as narrator,
        use_project(open_project(project), narrator, model=model) as work,
    ):
        yield work
