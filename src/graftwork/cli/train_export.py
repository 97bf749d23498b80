"""`graft train export`: what was learned, to take away."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model


class Format(StrEnum):
    merged = "merged"
    gguf = "gguf"
    adapter = "adapter"


To = Annotated[Path, typer.Option("--to", help="Folder that is made; it must not exist yet.")]
Run = Annotated[str | None, typer.Argument(help="A run, as `graft status` names it; the model's last one.")]
As = Annotated[
    Format,
    typer.Option(
        "--format",
        help="merged: base and adapter in one transformers folder, proven to say the same; gguf: that for "
        "llama.cpp, by its own converter; adapter: the PEFT folder.",
    ),
]


def export(
    to: To,
    run: Run = None,
    format: As = Format.merged,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write a trained adapter merged into its base, as GGUF, or as it is; checked before and after.

    Example:  graft train export --to merged/
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.pipeline.export_run import export_run
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with RichNarrator(tables=False) as narrator, use_project(opened, narrator, model=model) as work:
        exported = export_run(work, run=run, to=to.absolute(), format=format.value)
    if json:
        print_json(exported)
    else:
        show(stdout, exported)
