"""`graft release …`: what was released, what is live, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from pathlib import Path

    from graftwork.coordinate.workplace import Workplace

app = typer.Typer(help="What was released, what is live, and the way back.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="An alias, a release id, or the beginning of one.")]
Alias = Annotated[str, typer.Option("--alias", help="The alias to move.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; it goes into the log.")]


@contextmanager
def _opened(project: "Path | None") -> "Iterator[Workplace]":
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.project.folder import open_project

    with open_workplace(open_project(project), Silent()) as work:
        yield work


@app.command("list")
def list_(project: Folder = None, json: Json = False) -> None:
    """All releases, the newest first, with the aliases that point at them.

    Example:  graft release list
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_releases

    with _opened(project) as work:
        releases, aliases = work.releases.list(), work.releases.aliases()
    if json:
        print_json({"releases": [one.model_dump(mode="json") for one in releases], "aliases": aliases})
    else:
        show_releases(stdout, releases, aliases)


@app.command("show")
def show_(name: Name = "champion", project: Folder = None, json: Json = False) -> None:
    """One release with its lineage.

    Example:  graft release show champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.registry.promote import find_release

    with _opened(project) as work:
        release = find_release(work.releases, name)
    if json:
        print_json(release)
    else:
        show(stdout, release)


@app.command("promote")
def promote(
    name: Name,
    alias: Alias = "champion",
    reason: Reason = "",
    force: Annotated[bool, typer.Option("--force", help="Against the verdict; needs a reason.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Point an alias at a release. Refused without a deploy verdict, unless forced with a reason.

    Example:  graft release promote 3f2a --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.coordinate.workplace import now, who
    from graftwork.registry import promote as registry
    from graftwork.registry.folder import release_folder, verify_release

    with _opened(project) as work:
        release = registry.find_release(work.releases, name)
        verify_release(release_folder(work.project.releases, release.id))
        move = registry.promote(
            work.releases,
            release,
            alias=alias,
            who=who(),
            when=now(),
            why=reason,
            force=force,
            require_verdict=work.settings.release.require_verdict,
        )
    if json:
        print_json(move if move is not None else {"alias": alias, "release_id": release.id, "moved": False})
    elif move is None:
        stdout.print(f"{alias} points at {release.id[:12]} already", highlight=False)
    else:
        show_move(stdout, move)


@app.command("rollback")
def rollback(
    alias: Alias = "champion", reason: Reason = "", project: Folder = None, json: Json = False
) -> None:
    """Point an alias at the release before the present one.

    Example:  graft release rollback --reason "answers nonsense since 3 a.m."
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.coordinate.workplace import now, who
    from graftwork.registry import promote as registry
    from graftwork.registry.folder import release_folder, verify_release

    with _opened(project) as work:
        target = registry.rollback_target(work.releases, alias=alias)
        verify_release(release_folder(work.project.releases, target))
        move = registry.rollback(work.releases, alias=alias, who=who(), when=now(), why=reason)
    if json:
        print_json(move)
    else:
        show_move(stdout, move)
