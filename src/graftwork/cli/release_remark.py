"""`graft release tag`, `note`, `version`: what people say of a release."""

from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import Name, opened
from graftwork.cli.steps import Folder


def tag(
    name: Name,
    tags: Annotated[list[str], typer.Argument(help="The tags; `keep` saves a release from gc.")],
    remove: Annotated[bool, typer.Option("--remove", help="Take them off.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Tag a release, or take tags off.

    Example:  graft release tag champion keep audited-2026-03
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.registry.promote import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        now = work.releases.tag(release.id, tags, remove=remove)
    if json:
        print_json({"id": release.id, "tags": list(now)})
    else:
        stdout.print(f"{release.id[:12]}: {', '.join(now) or 'no tags'}", highlight=False)


def note(
    name: Name,
    text: Annotated[str, typer.Argument(help="What there is to say.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Add a note to a release. Notes are searched by `list --search` and never changed.

    Example:  graft release note champion "answers in French since the March logs"
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.open_project import current_user, timestamp
    from graftwork.registry.promote import find_release

    if not text.strip():
        raise typer.BadParameter("a note cannot be taken back: say something in it")
    with opened(project) as work:
        release = find_release(work.releases, name)
        work.releases.note(release.id, text, who=current_user(), when=timestamp())
        notes = work.releases.notes(release.id)
    if json:
        print_json({"id": release.id, "notes": [one.model_dump(mode="json") for one in notes]})
    else:
        stdout.print(f"{release.id[:12]}: noted", highlight=False)


def version(
    name: Name,
    number: Annotated[str, typer.Argument(help="The version, like 2.0.0.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Give a release another version than the one that it got by rule.

    Example:  graft release version champion 2.0.0
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.registry.promote import find_release

    with opened(project) as work:
        release = find_release(work.releases, name)
        work.releases.set_version(release.id, number)
    if json:
        print_json({"id": release.id, "model": release.model, "version": number})
    else:
        stdout.print(f"{release.id[:12]} is version {number} of {release.model}", highlight=False)
