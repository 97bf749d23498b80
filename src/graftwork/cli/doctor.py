"""`graft doctor`: is everything there?"""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder
from graftwork.records.errors import EXIT_ENVIRONMENT

MARKS = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[dim]·[/]"}


def doctor(
    project: Folder = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also try a connection to each host that the settings need.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also train ten steps on made-up rows and read the checkpoint back; needs a project.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check software, memory, disk, cards, accounts, model, database, port. Exit 3: something is missing.

    Nothing is sent anywhere, and no secret is shown. Outside a project (a folder with graft.yaml) only the
    machine is checked.

    Example:  graft doctor --dry-run
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import quote, table
    from graftwork.pipeline.doctor.examine import examine
    from graftwork.process.worker import stoppable
    from graftwork.project.load import find_project, open_project
    from graftwork.records.errors import UserMistake

    has_project = project is not None or find_project() is not None
    if dry_run and not has_project:
        raise UserMistake(
            "a dry run needs a project",
            why="its base model and its training settings are what is tried",
            fix="go to a folder with a graft.yaml, or `graft init`",
            where="--dry-run",
        )
    opened = open_project(project) if has_project else None
    with stoppable(), RichNarrator(tables=False) as narrator:
        checks = list(examine(opened, network=network, dry_run=narrator if dry_run else None))
    if json:
        print_json([check.model_dump(mode="json") for check in checks])
    else:
        rows = table("", "check", "found", "fix")
        for check in checks:
            rows.add_row(MARKS[check.result], quote(check.name), quote(check.found), quote(check.fix))
        stdout.print(rows)
    raise typer.Exit(EXIT_ENVIRONMENT if any(check.result == "missing" for check in checks) else 0)
