"""`graft release promote` and `rollback`: which release is live."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import Alias, Name, Reason, opened
from graftwork.cli.steps import Folder, Model


def promote(
    name: Name,
    alias: Alias = None,
    reason: Reason = "",
    force: Annotated[bool, typer.Option("--force", help="Against the verdict; needs a reason.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Point an alias at a release. Refused without a deploy verdict, unless forced with a reason.

    Every byte is checked first. The alias is that of the release's own model.

    Example:  graft release promote 3f2a --alias champion
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.pipeline.releases import promote_release

    with opened(project) as work:
        done = promote_release(work, name, alias=alias, reason=reason, force=force)
    if done.move is not None:
        print_json(done.move) if json else show_move(stdout, done.move)
    elif json:
        print_json({"alias": done.alias, "release_id": done.release.id, "moved": False})
    else:
        stdout.print(f"{done.alias} points at {done.release.id[:12]} already", highlight=False)


def rollback(
    alias: Alias = None, reason: Reason = "", model: Model = None, project: Folder = None, json: Json = False
) -> None:
    """Point an alias at the release before the present one.

    Example:  graft release rollback --reason "answers nonsense since 3 a.m."
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.releases import show_move
    from graftwork.pipeline.releases import rollback_alias

    with opened(project, model) as work:
        move = rollback_alias(work, alias=alias, reason=reason)
    print_json(move) if json else show_move(stdout, move)
