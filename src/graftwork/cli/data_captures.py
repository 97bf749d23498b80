"""`graft data captures`: export what the endpoint captured, and delete it by session or user."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, opened
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.data.settings import CaptureSettings
    from graftwork.pipeline.forget import Forgotten

app = typer.Typer(invoke_without_command=True)


def add_to(group: typer.Typer) -> None:
    group.add_typer(app, name="captures")


@app.callback()
def export(
    context: typer.Context,
    out: Annotated[Path | None, typer.Option("--out", help="JSONL file to write.")] = None,
    feedback: Annotated[
        str | None,
        typer.Option(
            help="not_negative, positive, negative or all. `prepare` never trains on negative answers."
        ),
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(help="Only answers of this release: its id or its first characters.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Only from this date or time (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Only before this date or time (UTC).")] = None,
    session: Annotated[list[str] | None, typer.Option(help="Only this session.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Export what the endpoint captured as a log file that only you can read.

    Options that are not given come from `data.captures` in graft.yaml. Exchanges with negative feedback and
    prompts of the test split are excluded.

    Example:  graft data captures --out logs/captured.jsonl --since 2026-11-01 --feedback positive
    """
    if context.invoked_subcommand is not None:
        return
    if out is None:
        raise typer.BadParameter("name the file to write", param_hint="--out")
    from typing import cast, get_args

    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.disk import write_atomic
    from graftwork.pipeline.serving import CaptureExport, FeedbackFilter

    if feedback is not None and feedback not in get_args(FeedbackFilter):
        raise typer.BadParameter(
            f"must be one of: {', '.join(get_args(FeedbackFilter))}", param_hint="--feedback"
        )
    with opened(project) as work:
        defaults = work.project.settings.data.captures
        chosen = cast(FeedbackFilter, feedback or defaults.feedback)
        settings = _revise_captures(
            defaults,
            feedback=chosen if chosen == "positive" else "not_negative",
            releases=release,
            since=since,
            until=until,
            sessions=session,
        )
        export = CaptureExport(work, settings, feedback=chosen)
        write_atomic(out, "".join(capture.to_line() + "\n" for capture in export), private=True)
    if json:
        print_json({"file": str(out), "captures": export.written, "left_out": dict(export.left_out)})
        return
    print_line(stdout, f"{export.written} captures written to {quote(out)}", soft_wrap=True)
    for reason, count in export.left_out.most_common():
        print_line(stdout, f"  {count} left out: {quote(reason)}", soft_wrap=True)


def _revise_captures(settings: "CaptureSettings", **options: object) -> "CaptureSettings":
    from pydantic import ValidationError

    from graftwork.records.errors import UserMistake
    from graftwork.text.validation import explain_error

    given = {name: value for name, value in options.items() if value}
    try:
        return type(settings).model_validate({**settings.model_dump(), **given})
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_input=False)[0]
        option = f"--{first['loc'][0]}" if first["loc"] else "--since"
        raise UserMistake(
            f"{option} has an invalid value",
            why=explain_error(first),
            fix="`graft data captures --help` lists the accepted values",
            where=option,
        ) from refused


@app.command("forget")
def forget(
    session: Annotated[str | None, typer.Option(help="Delete the captures of this session.")] = None,
    user: Annotated[
        str | None, typer.Option(help="Delete the captures and the feedback of this user.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it, only count.")] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Delete the captures of a session or a user, with feedback and reviews; count them first.

    Without --yes nothing is deleted. Log files and datasets that hold copies are listed and not changed.

    Example:  graft data captures forget --session chat-17
    Example:  graft data captures forget --user ada@example.org --yes
    """
    from graftwork.cli.output import print_json
    from graftwork.pipeline.forget import forget_captures

    if bool(session) == bool(user):
        raise typer.BadParameter("name one of --session and --user", param_hint="--session")
    with opened(project) as work:
        found = forget_captures(work, session=session or None, user=user or None, dry_run=not yes)
    if json:
        print_json(found)
    else:
        _show_forgotten(found)


def _show_forgotten(found: "Forgotten") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.text.wording import plural

    counted = f"{plural(found.captures, 'capture')}, {plural(found.feedback, 'item')} of feedback"
    print_line(
        stdout, f"deleted: {counted}" if found.deleted else f"to delete: {counted}; add --yes to do it"
    )
    for file in found.files:
        print_line(stdout, f"  {quote(file.file)} holds {plural(file.lines, 'line')} of them", soft_wrap=True)
    for dataset in found.datasets:
        trained = ", ".join(release[:12] for release in dataset.releases) or "no release"
        text = (
            f"  {quote(dataset.folder)} holds {plural(dataset.rows, 'row')} of them; trained on it: {trained}"
        )
        print_line(stdout, text, soft_wrap=True)
    if found.files or found.datasets:
        print_line(
            stdout, "copies are not changed: remove the lines, then `graft run` makes data without them"
        )
