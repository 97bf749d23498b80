"""`graft data …`: look at logs, make datasets of them."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, run_and_show
from graftwork.records.errors import EXIT_ANSWER_IS_NO

app = typer.Typer(help="Look at logs, and make datasets of them.", no_args_is_help=True)


@app.command("audit")
def audit(
    files: Annotated[
        list[str] | None, typer.Argument(help="Log files; without any, those that graft.yaml names.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Find what would spoil training: placeholders, cut-off answers, repeats, secrets.

    Exit code 1: it must not be trained on as it is.

    Example:  graft data audit logs/interactions.jsonl
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show

    if files:
        from graftwork.data.audit import audit as audit_files
        from graftwork.data.settings import DataSettings

        found = audit_files(tuple(files), settings=DataSettings(logs=tuple(files)))
    else:
        from graftwork.data.audit import audit as audit_files
        from graftwork.project.folder import open_project

        opened = open_project(project)
        found = audit_files(opened.settings.data.logs, settings=opened.settings.data, root=opened.root)
    if json:
        print_json(found)
    else:
        show(stdout, found)
    raise typer.Exit(0 if found.fit_to_train else EXIT_ANSWER_IS_NO)


@app.command("prepare")
def prepare(project: Folder = None, json: Json = False) -> None:
    """Filter, redact, de-duplicate, split by question, render and prove: a dataset.

    Example:  graft data prepare
    """
    run_and_show("prepare", project=project, as_json=json)


@app.command("captures")
def captures(
    out: Annotated[Path, typer.Option("--out", help="The JSONL file to write.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write what the endpoint captured as a log file, which closes the loop.

    Example:  graft data captures --out logs/captured.jsonl
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.files.whole import write_whole
    from graftwork.project.folder import open_project

    with open_workplace(open_project(project), Silent()) as work:
        lines = [capture.model_dump_json() + "\n" for capture in work.captures.export()]
    write_whole(out, "".join(lines))
    if json:
        print_json({"file": str(out), "captures": len(lines)})
    else:
        stdout.print(f"{len(lines)} captures written to {out}", highlight=False)
