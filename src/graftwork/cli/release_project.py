"""What the verbs of `graft release` share: how a release is named, and the project opened, quietly or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from graftwork.pipeline.workplace import Workplace

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
def opened(project: "Path | None", model: str | None = None) -> "Iterator[Workplace]":
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.workplace import open_workplace
    from graftwork.project.folder import open_project

    with open_workplace(open_project(project), NullReporter(), model=model) as work:
        yield work


@contextmanager
def opened_aloud(project: "Path | None", model: str | None = None) -> "Iterator[Workplace]":
    """For what takes a while: how far it is, on standard error."""
    from graftwork.cli.narrate import RichNarrator
    from graftwork.pipeline.workplace import open_workplace
    from graftwork.project.folder import open_project

    with (
        RichNarrator(tables=False) as narrator,
        open_workplace(open_project(project), narrator, model=model) as work,
    ):
        yield work
