"""`graft init`: a graft.yaml to start from."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json


def init(
    folder: Annotated[Path, typer.Argument(help="The folder of the new project.")] = Path(),
    logs: Annotated[str, typer.Option(help="Your log files, relative to the folder.")] = "logs/*.jsonl",
    json: Json = False,
) -> None:
    """Write a graft.yaml to start from. An existing one is never overwritten.

    Example:  graft init my-agent --logs "logs/*.jsonl"
    """
    import re

    from graftwork.cli.output import print_json, stdout
    from graftwork.files.whole import write_whole
    from graftwork.project.load import PROJECT_FILE, load_settings
    from graftwork.project.starter import write_starter
    from graftwork.records.errors import UserMistake

    path = folder / PROJECT_FILE
    if path.exists():
        raise UserMistake(
            f"there is a {PROJECT_FILE} already",
            why="it is yours, and is not overwritten",
            fix="edit it, or name another folder",
            where=str(path),
        )
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.absolute().name.lower()).strip("-._") or "project"
    write_whole(path, write_starter(name=name, logs=logs))
    load_settings(path)
    if json:
        print_json({"file": str(path)})
    else:
        stdout.print(
            f"wrote {path}. Next: `graft data audit` looks at your logs, `graft run` does the rest.",
            highlight=False,
        )
