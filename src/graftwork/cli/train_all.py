"""`graft train --all`: every model of the project in one go."""

from pathlib import Path

import typer

from graftwork.records.errors import EXIT_ANSWER_IS_NO


def run_all(*, project: Path | None, as_json: bool) -> None:
    """Train what is not up to date, then one table; exit code 1 where a model failed."""
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.train_all import train_all
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with stoppable(), RichNarrator(tables=False) as narrator, use_project(opened, narrator) as work:
        trained = train_all(work)
    if as_json:
        print_json(trained)
    else:
        show(stdout, trained)
    if trained.failed:
        raise typer.Exit(EXIT_ANSWER_IS_NO)
