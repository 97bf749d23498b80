"""`graft doctor`: is everything there?"""

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder
from graftwork.records.errors import EXIT_ENVIRONMENT

MARKS = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[dim]·[/]"}


def doctor(project: Folder = None, json: Json = False) -> None:
    """Check packages, memory, disk, model, database, port. Exit 3: something is missing.

    Example:  graft doctor
    """
    from rich.markup import escape

    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import table
    from graftwork.coordinate.doctor import examine
    from graftwork.project.folder import find_project, open_project

    has_project = project is not None or find_project() is not None
    checks = examine(open_project(project) if has_project else None)
    if json:
        print_json([check.model_dump(mode="json") for check in checks])
    else:
        rows = table("", "check", "found", "fix")
        for check in checks:
            rows.add_row(MARKS[check.result], escape(check.name), escape(check.found), escape(check.fix))
        stdout.print(rows)
    raise typer.Exit(EXIT_ENVIRONMENT if any(check.result == "missing" for check in checks) else 0)
