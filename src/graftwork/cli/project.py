"""`graft init`: a graft.yaml that fits the log."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ENVIRONMENT

if TYPE_CHECKING:
    from graftwork.project.init import Started
    from graftwork.project.propose import Proposal


def init(
    logs: Annotated[
        list[str] | None,
        typer.Argument(help="Log files, folders or globs; logs/*.jsonl of the project's folder without one."),
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option("--project", "-C", help="Folder of the new project; the working folder by default."),
    ] = None,
    base: Annotated[
        str, typer.Option(help="The base model: the embedded one, or a folder.")
    ] = "smollm2-135m-instruct",
    plan: Annotated[
        bool, typer.Option("--plan/--no-plan", help="Then prepare the data and say how long the run takes.")
    ] = True,
    json: Json = False,
) -> None:
    """Read a log and write a graft.yaml that fits it. An existing one is never overwritten.

    It finds the format, the kind of task and its fields, and proposes metrics, a primary metric that means
    correctness, rules that a model which learned nothing cannot keep, a test split that can show a gain, and
    training settings for this machine, each with its reason.

    Example:  graft init logs/tickets.jsonl
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.project.init import start_project

    folder, named = _which(logs or [], project)
    started = start_project(folder, named, base=base)
    if json and (started.proposal is None or not plan):
        print_json(started)
        return
    if not json:
        print_line(stdout, f"wrote {quote(str(started.file))}", soft_wrap=True)
    if started.proposal is None:
        if not json:
            print_line(stdout, "Next: `graft data audit` looks at your logs, `graft run` does the rest.")
        return
    if not json:
        _show(started.proposal)
    if plan:
        _look_ahead(folder, started, as_json=json)


def _which(logs: list[str], project: Path | None) -> tuple[Path, list[str]]:
    """The folder of the project, and its logs. One name that is no log is a folder to be made."""
    if project is None and len(logs) == 1:
        path = Path(logs[0])
        new = not path.exists() and not path.suffix and not set(logs[0]) & set("*?[")
        holds_logs = path.is_dir() and any(
            one.is_file() and one.name != "graft.yaml" for one in path.iterdir()
        )
        if new or (path.is_dir() and not holds_logs):
            return path, []
    return project or Path(), logs


def _show(proposal: "Proposal") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote, table
    from graftwork.project.propose import KINDS

    print_line(stdout, f"[bold]{KINDS[proposal.kind]}[/]: {quote(proposal.kind_why)}")
    rows = table("rule of the gate", "why")
    rows.add_row(quote(f"{proposal.primary} better than the base"), quote(proposal.primary_why))
    for rule in proposal.rules:
        rows.add_row(quote(f"{rule.metric} over {100 * rule.over:g} %"), quote(rule.why))
    stdout.print(rows)
    for told in proposal.left_out:
        print_line(stdout, f"[yellow]![/] no rule on {quote(told)}")
    held_out = f"about {proposal.test_cases} of {proposal.rows} rows are held out"
    print_line(stdout, f"{held_out}: {quote(proposal.test_why)} in four runs of five")


def _look_ahead(folder: Path, started: "Started", *, as_json: bool) -> None:
    """What `graft run` will do, and how long it takes."""
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.run import look_ahead
    from graftwork.cli.show.plan import show_preflight

    found = look_ahead(folder)
    if as_json:
        print_json({**started.model_dump(mode="json"), "preflight": found.model_dump(mode="json")})
    else:
        show_preflight(stdout, found)


MARKS = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[dim]·[/]"}


def doctor(
    project: Folder = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also try a connection to each host that the settings need.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also train ten steps on made-up rows and read the checkpoint back; needs a project.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check software, memory, disk, cards, accounts, model, database, port. Exit 3: something is missing.

    Nothing is sent anywhere, and no secret is shown. Outside a project (a folder with graft.yaml) only the
    machine is checked.

    Example:  graft doctor --dry-run
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.tables import quote, table
    from graftwork.pipeline.doctor.examine import examine
    from graftwork.process.worker import stoppable
    from graftwork.project.load import find_project, open_project
    from graftwork.records.errors import UserMistake

    has_project = project is not None or find_project() is not None
    if dry_run and not has_project:
        raise UserMistake(
            "a dry run needs a project",
            why="its base model and its training settings are what is tried",
            fix="go to a folder with a graft.yaml, or `graft init`",
            where="--dry-run",
        )
    opened = open_project(project) if has_project else None
    with stoppable(), RichReporter(tables=False) as reporter:
        checks = list(examine(opened, network=network, dry_run=reporter if dry_run else None))
    if json:
        print_json([check.model_dump(mode="json") for check in checks])
    else:
        rows = table("", "check", "found", "fix")
        for check in checks:
            rows.add_row(MARKS[check.result], quote(check.name), quote(check.found), quote(check.fix))
        stdout.print(rows)
    raise typer.Exit(EXIT_ENVIRONMENT if any(check.result == "missing" for check in checks) else 0)


def schema() -> None:
    """Print the JSON Schema of graft.yaml.

    Example:  graft schema > graft.schema.json
    """
    from graftwork.cli.output import print_json
    from graftwork.project.settings import ProjectSettings

    print_json(ProjectSettings.model_json_schema())
