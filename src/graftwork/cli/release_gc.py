"""`graft release gc`: take away what nobody needs."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder


def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=0, help="Keep this many newest of each model.")
    ] = None,
    keep_days: Annotated[int | None, typer.Option("--keep-days", min=0, help="Keep what is younger.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Take away the files of releases that nobody needs.

    What an alias points at or can be rolled back to, what a server holds, what is tagged `keep`, what is new
    and what is being written stays. The index remembers what was taken.

    Example:  graft release gc --dry-run
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_garbage
    from graftwork.cli.show.tables import print_line
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.release_gc import collect_garbage
    from graftwork.project.load import open_project

    with RichNarrator(tables=False) as narrator, use_project(open_project(project), narrator) as work:
        found = collect_garbage(work, dry_run=dry_run, keep_last=keep_last, keep_days=keep_days)
    if json:
        print_json(found)
        return
    show_garbage(stdout, found)
    if found.readers_unseen:
        print_line(
            stdout,
            f"[yellow]readers cannot be seen here[/]: {len(found.readers_unseen)} releases stay, for this "
            "file system does not say whether a server that cannot write the store holds them; collect as "
            "the owner of the files",
        )
