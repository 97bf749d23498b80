"""`graft release export`: a release as one file, for machines without a network."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.release_project import Name, opened_aloud
from graftwork.cli.steps import Folder

Target = Annotated[
    Path | None,
    typer.Option("--to", help="The tar file, or a folder for it; PROJECT-ID.tar in the project by default."),
]

BaseTarget = Annotated[
    Path | None,
    typer.Option("--base", help="Also write the exact base weights into this new folder, for transformers."),
]


def export(
    name: Name = "champion",
    to: Target = None,
    base: BaseTarget = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write a release as a tar file: the same bytes for the same release, every time.

    Every byte is checked first, and again where it is imported. `--base` writes the weights that the adapter
    was trained and evaluated on, which for the embedded base are not the official ones.

    Example:  graft release export champion --to champion.tar --base champion-base
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.release_transfer import export_base, export_release

    with opened_aloud(project) as work:
        done = export_release(work, name, target=to)
        size = None if base is None else export_base(work, name, target=base)
    if json:
        written = {"id": done.release.id, "file": str(done.path), "sha256": done.sha256, "bytes": done.bytes}
        print_json(written if size is None else {**written, "base": str(base), "base_bytes": size})
    else:
        stdout.print(
            f"{done.release.id[:12]} is in {done.path} ({done.bytes:,} bytes)\nsha256 {done.sha256}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        if size is not None:
            stdout.print(
                f"its base is in {base} ({size:,} bytes)", highlight=False, markup=False, soft_wrap=True
            )
