"""`graft data …`: look at logs, make datasets of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli import data_folder
from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, run_and_show
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from graftwork.data.rules.note import Sight
    from graftwork.project.folder import Project
    from graftwork.records.audit import Audit

app = typer.Typer(help="Look at logs, and make datasets of them.", no_args_is_help=True)


@app.command("audit")
def audit(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or globs, - for standard input; else those of graft.yaml. "
            "In a project its data settings hold for named files too."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", help="Write a page to look at; in a project it is audit.html beside graft.yaml."
        ),
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Find what would spoil training: placeholders, cut-off answers, repeats, leaks, secrets.

    Exit code 1: it must not be trained on as it is.

    Example:  graft data audit logs/interactions.jsonl --html audit.html
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.whole import write_whole
    from graftwork.report.audit_page import make_audit_page

    if files:
        found, page = _audit_files(tuple(files), project), html
    else:
        found, page = _audit_project(project)
        page = html or page
    if page:
        write_whole(page, make_audit_page(found), durable=False)
    if json:
        print_json(found)
    else:
        show(stdout, found)
        if page:
            print_line(stdout, f"to look at: {quote(page)}", soft_wrap=True)
    raise typer.Exit(0 if found.fit_to_train else EXIT_ANSWER_IS_NO)


def _audit_files(files: tuple[str, ...], project: Path | None) -> "Audit":
    """Files that are named are read as the project says, where there is one."""
    import tempfile

    from graftwork.cli.narrate import RichNarrator
    from graftwork.coordinate.pace import tell_pace
    from graftwork.data.audit import audit as audit_logs

    sight = _see_files(files, project)
    with RichNarrator() as narrator, tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(sight, folder=Path(folder), on_progress=tell_pace(narrator))


def _see_files(files: tuple[str, ...], project: Path | None) -> "Sight":
    from dataclasses import replace

    from graftwork.cli.output import stderr
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.coordinate.sight import see_what_is_there
    from graftwork.data.rules.note import Sight
    from graftwork.data.settings import DataSettings
    from graftwork.project.folder import find_project, open_project

    root = project or find_project()
    if root is None:
        return Sight(settings=DataSettings(logs=files))
    opened = open_project(root)
    print_line(stderr, f"[dim]with the data settings of {quote(opened.file)}[/]", soft_wrap=True)
    sight = see_what_is_there(opened)
    return replace(sight, settings=sight.settings.model_copy(update={"logs": files}))


@contextmanager
def _sifting_folder(project: "Project") -> "Iterator[Path]":
    """The project's own, whose blocks need not be sifted again; beside a run that holds it, a passing one."""
    import tempfile

    from graftwork.process import lock
    from graftwork.records.errors import Busy

    with ExitStack() as stack:
        try:
            stack.enter_context(lock.hold(project.state / "pipeline"))
            folder = project.sifted
        except Busy:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-audit-")))
        yield folder


def _audit_project(project: Path | None) -> "tuple[Audit, Path]":
    from graftwork.cli.narrate import RichNarrator
    from graftwork.coordinate.pace import tell_pace
    from graftwork.coordinate.sight import see_what_is_there
    from graftwork.data.audit import audit as audit_logs
    from graftwork.project.folder import open_project

    opened = open_project(project)
    with RichNarrator() as narrator, _sifting_folder(opened) as folder:
        found = audit_logs(
            see_what_is_there(opened),
            folder=folder,
            root=opened.root,
            on_progress=tell_pace(narrator),
        )
    return found, opened.audit_page


@app.command("prepare")
def prepare(project: Folder = None, json: Json = False) -> None:
    """Filter, redact, de-duplicate, split by groups, render and prove: a dataset.

    Example:  graft data prepare
    """
    run_and_show("prepare", project=project, as_json=json)


@app.command("captures")
def captures(
    out: Annotated[Path, typer.Option("--out", help="The JSONL file to write.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write what the endpoint captured as a log file, which closes the loop. Only you can read it.

    Example:  graft data captures --out logs/captured.jsonl
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.files.whole import write_whole
    from graftwork.project.folder import open_project

    with open_workplace(open_project(project), Silent()) as work:
        lines = [capture.model_dump_json() + "\n" for capture in work.captures.export()]
    write_whole(out, "".join(lines), private=True)
    if json:
        print_json({"file": str(out), "captures": len(lines)})
    else:
        print_line(stdout, f"{len(lines)} captures written to {quote(out)}", soft_wrap=True)


data_folder.add_to(app)
