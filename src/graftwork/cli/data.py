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
    from graftwork.data.audit.row_checks import AuditContext
    from graftwork.data.settings import CaptureSettings
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
    from graftwork.data.prepare import audit_logs
    from graftwork.pipeline.pace import tell_pace

    context = _see_files(files, project)
    with RichNarrator() as narrator, tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(context, folder=Path(folder), on_progress=tell_pace(narrator))


def _see_files(files: tuple[str, ...], project: Path | None) -> "AuditContext":
    from dataclasses import replace

    from graftwork.cli.output import stderr
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.data.audit.row_checks import AuditContext
    from graftwork.data.settings import DataSettings
    from graftwork.pipeline.sight import see_what_is_there
    from graftwork.project.folder import find_project, open_project

    root = project or find_project()
    if root is None:
        return AuditContext(settings=DataSettings(logs=files))
    opened = open_project(root)
    print_line(stderr, f"[dim]with the data settings of {quote(opened.file)}[/]", soft_wrap=True)
    context = see_what_is_there(opened)
    return replace(context, settings=context.settings.model_copy(update={"logs": files}))


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
    from graftwork.data.prepare import audit_logs
    from graftwork.pipeline.pace import tell_pace
    from graftwork.pipeline.sight import see_what_is_there
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
    feedback: Annotated[
        str | None,
        typer.Option(
            help="not_negative, positive, negative or all; prepare never trains on negative ones as served."
        ),
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="Only what this release answered: its id or how it begins.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only from this date or time on (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Only before this date or time (UTC).")] = None,
    session: Annotated[list[str] | None, typer.Option(help="Only this session.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write what the endpoint captured as a log file, which closes the loop. Only you can read it.

    What is not given here goes by `data.captures` in graft.yaml. Exchanges with negative feedback, and
    questions that the project's test holds out, are left out.

    Example:  graft data captures --out logs/captured.jsonl --since 2026-11-01 --feedback positive
    """
    from typing import cast, get_args

    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.whole import write_whole
    from graftwork.pipeline.captures import CaptureExport, Feedback
    from graftwork.pipeline.narrator import Silent
    from graftwork.pipeline.workplace import open_workplace
    from graftwork.project.folder import open_project

    opened = open_project(project)
    if feedback is not None and feedback not in get_args(Feedback):
        raise typer.BadParameter(f"must be one of: {', '.join(get_args(Feedback))}", param_hint="--feedback")
    chosen = cast(Feedback, feedback or opened.settings.data.captures.feedback)
    settings = _revise_captures(
        opened.settings.data.captures,
        feedback=chosen if chosen == "positive" else "not_negative",
        releases=release,
        since=since,
        until=until,
        sessions=session,
    )
    with open_workplace(opened, Silent()) as work:
        export = CaptureExport(work, settings, feedback=chosen)
        write_whole(out, "".join(capture.model_dump_json() + "\n" for capture in export), private=True)
    if json:
        print_json({"file": str(out), "captures": export.written, "left_out": dict(export.left_out)})
        return
    print_line(stdout, f"{export.written} captures written to {quote(out)}", soft_wrap=True)
    for reason, count in export.left_out.most_common():
        print_line(stdout, f"  {count} left out: {quote(reason)}", soft_wrap=True)


def _revise_captures(settings: "CaptureSettings", **options: object) -> "CaptureSettings":
    from pydantic import ValidationError

    from graftwork.records.errors import UserMistake

    given = {name: value for name, value in options.items() if value}
    try:
        return type(settings).model_validate({**settings.model_dump(), **given})
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_input=False)[0]
        option = f"--{first['loc'][0]}" if first["loc"] else "--since"
        raise UserMistake(
            f"{option} cannot be that",
            why=str(first["msg"]).removeprefix("Value error, "),
            fix="`graft data captures --help` says what it takes",
            where=option,
        ) from refused


data_folder.add_to(app)
