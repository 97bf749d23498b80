"""`graft run`: the whole way."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder
from graftwork.cli.train import Detach

if TYPE_CHECKING:
    from graftwork.pipeline.preflight import Preflight


def run(
    project: Folder = None,
    detach: Detach = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Stop before training: try every metric and rule, estimate every stage. Exit 2: an error.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """From logs to a served, gated adapter. What has not changed is not done again.

    Before it trains, it tries every metric on the log's own replies and on spoiled ones, proves that each
    rule can pass and can fail, and estimates each stage: `--dry-run` stops there.

    Example:  graft run -C examples/cited_answers
    """
    if dry_run:
        _show_ahead(project, as_json=json)
        return
    if detach:
        from graftwork.cli.detached import start_detached

        start_detached("run", project=project, model=None, as_json=json)
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.steps import run_upto
    from graftwork.records.verdict import Verdict

    _tell_plan(project)
    made = run_upto(None, project=project, tables=not json)
    verdict = made.get("gate", Verdict)
    if json:
        print_json({name: output.model_dump(mode="json") for name, output in made.outputs.items()})
    else:
        stdout.print(f"[bold]{verdict.decision}[/]: {verdict.reason}", highlight=False)
        report = getattr(made.outputs.get("report"), "path", None)
        stdout.print(f"the whole story: {report}", highlight=False)
    raise typer.Exit(verdict.exit_code)


def _tell_plan(project: Folder) -> None:
    """How long it will take, on standard error. What is wrong with the project the run itself says."""
    from graftwork.cli.output import stderr
    from graftwork.cli.show import show
    from graftwork.cli.steps import whole_run
    from graftwork.records.errors import GraftError

    try:
        show(stderr, whole_run(project))
    except GraftError:
        return


def look_ahead(project: Path | None) -> "Preflight":
    """Audit, prepare and plan; then everything that can be checked before training."""
    from graftwork.cli.narrate import RichNarrator
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import dry_run
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with stoppable(), RichNarrator(tables=False) as narrator, use_project(opened, narrator) as work:
        return dry_run(work)


def _show_ahead(project: Path | None, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.preflight import show_preflight
    from graftwork.records.errors import EXIT_USER_MISTAKE

    found = look_ahead(project)
    if as_json:
        print_json(found)
    else:
        show_preflight(stdout, found)
    raise typer.Exit(EXIT_USER_MISTAKE if found.errors else 0)
