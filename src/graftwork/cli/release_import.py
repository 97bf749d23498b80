"""`graft release import`: a release from a tar file, or any PEFT folder."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import opened_aloud
from graftwork.cli.steps import Folder, Model

Source = Annotated[
    Path, typer.Argument(help="A tar file that `graft release export` wrote, or a PEFT folder.")
]


def import_(source: Source, model: Model = None, project: Folder = None, json: Json = False) -> None:
    """Bring a release in. Every byte is checked; what is not a plain file of a release is refused.

    A PEFT folder (safetensors only) becomes a release that nobody has judged: not enough evidence.

    Example:  graft release import champion.tar
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import import_release

    with opened_aloud(project, model) as work:
        done = import_release(work, source)
    if json:
        body = {"id": done.release.id, "version": done.version, "new": done.new}
        print_json({**body, "decision": done.release.decision, "remarks": list(done.remarks)})
        return
    words = "is here now" if done.new else "was here already"
    lines = [
        f"{done.release.id[:12]} {words}: {done.release.model} {done.version or ''}, {done.release.decision}"
    ]
    stdout.print("\n".join((*lines, *done.remarks)), highlight=False, markup=False, soft_wrap=True)
