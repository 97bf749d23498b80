"""`graft init`, `doctor` and `schema`: start a project, check the machine, describe graft.yaml."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, reporting
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import EXIT_ENVIRONMENT, UserError
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line, table

if TYPE_CHECKING:
    from graftwork.project.init import Started
    from graftwork.project.propose import Proposal


def init(
    logs: Annotated[
        list[str] | None,
        typer.Argument(help="Log files, folders or globs. Default: logs/*.jsonl in the project folder."),
    ] = None,
    project: Annotated[
        Path | None,
        typer.Option("--project", "-C", help="Folder of the new project. Default: the working directory."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            help="The base model: a name from `graft plan catalog bases` or of the Hugging Face Hub, or a "
            "folder. Default: the best of the catalog for this task and machine."
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU that will train it, if not this machine's: 'RTX 4090'.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1, help="Propose a base whose planned training takes at most this long.")
    ] = 60,
    license: Annotated[
        str | None,
        typer.Option(help="Propose a base under this license only. Default: any without terms of its own."),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            help="Start in front of a large model, without a log: its API, the model, and the variable that "
            "holds the key.",
            metavar="URL#MODEL,key=VARIABLE",
        ),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan/--no-plan", help="Then prepare the data and estimate the run.")
    ] = True,
    json: Json = False,
) -> None:
    """Create a graft.yaml that fits your logs. An existing file is never overwritten.

    Detects the format, the kind of task and its fields. Proposes a base by task, machine and license,
    metrics, a primary metric for correctness, gate rules that an untrained model cannot pass, a test split
    large enough to show a gain, and training settings for this machine, each with its reason.

    With --upstream, `graft serve` then answers under the names that your clients use already, and captures.

    Example:  graft init logs/tickets.jsonl
    Example:  graft init --upstream https://api.openai.com/v1#gpt-4o,key=OPENAI_API_KEY
    """
    from graftwork.project.init import BaseChoice, start_project

    folder, named = _find_logs(logs or [], project)
    if upstream is not None:
        if named:
            raise typer.BadParameter("--upstream starts without a log: leave the log out")
        if base or gpu or license:
            raise typer.BadParameter("--upstream plans no training: leave --base, --gpu and --license out")
        _init_upstream(folder, upstream, as_json=json)
        return
    with stderr.status("reading the logs and choosing metrics, gate rules and settings"):
        choice = BaseChoice(base=base, gpu=gpu, minutes=minutes, license=license)
        started = start_project(folder, named, choice=choice)
    if json and (started.proposal is None or not plan):
        print_json(started)
        return
    if not json:
        print_line(stdout, f"wrote {quote(str(started.file))}", soft_wrap=True)
    if started.proposal is None:
        if not json:
            print_line(
                stdout,
                "There is no log yet, so this file has no metrics that fit one. Next: put your logs into "
                "logs/*.jsonl and run `graft init` again: it replaces this file while it is unchanged.",
            )
        return
    if not json:
        _show(started.proposal, started)
        _show_fields(started)
        _show_bases(started)
    if plan:
        _show_preflight(folder, started, as_json=json)


def _init_upstream(folder: Path, upstream: str, *, as_json: bool) -> None:
    from graftwork.evaluate.subjects import parse_endpoint
    from graftwork.project.upstream import start_with_upstream

    endpoint = parse_endpoint(upstream, where="--upstream").endpoint
    assert endpoint is not None
    started = start_with_upstream(
        folder, url=endpoint.url, model=endpoint.model, api_key_env=endpoint.api_key_env
    )
    if as_json:
        print_json(started)
        return
    print_line(stdout, f"wrote {quote(started.file)}", soft_wrap=True)
    key = f"export {endpoint.api_key_env}=… and " if endpoint.api_key_env else ""
    print_line(stdout, f"Next: {key}`graft serve`: it prints a request to try.")


def _find_logs(logs: list[str], project: Path | None) -> tuple[Path, list[str]]:
    """The project folder and its logs. A single argument that is not a log is the folder to create."""
    if project is None and len(logs) == 1:
        path = Path(logs[0])
        new = not path.exists() and not path.suffix and not set(logs[0]) & set("*?[")
        holds_logs = path.is_dir() and any(
            file.is_file() and file.name != "graft.yaml" for file in path.iterdir()
        )
        if new or (path.is_dir() and not holds_logs):
            return path, []
    return project or Path(), logs


def _show(proposal: "Proposal", started: "Started") -> None:
    from graftwork.project.propose import KINDS

    print_line(stdout, f"[bold]{KINDS[proposal.kind]}[/]: {quote(proposal.kind_why)}")
    rows = table("gate rule", "why")
    rows.add_row(quote(f"{proposal.primary} better than the base"), quote(proposal.primary_why))
    for rule in proposal.rules:
        rows.add_row(quote(f"{rule.metric} over {100 * rule.over:g} %"), quote(rule.why))
    stdout.print(rows)
    for reason in proposal.left_out:
        print_line(stdout, f"[yellow]![/] no rule on {quote(reason)}")
    print_line(stdout, describe_counts(proposal, started))
    print_line(
        stdout,
        f"about {proposal.test_cases:,} of them will be held out: {quote(proposal.test_why)}; rows that ask "
        "alike stay together, so it can be a few more or less",
    )


def describe_counts(proposal: "Proposal", started: "Started") -> str:
    """Describe how many rows each step keeps, and which command shows more about the others."""
    read, usable, kept = started.rows_read, started.rows_usable, proposal.rows
    text = f"{read:,} rows read, {usable:,} usable"
    if usable < read:
        faults = "faulty, rated low" if started.drops_rated else "faulty"
        are, repeat = ("is", "repeats another") if read - usable == 1 else ("are", "repeat others")
        text += f" ({read - usable:,} {are} {faults} or {repeat}: `graft data audit`)"
    if kept < usable:
        text += f", {kept:,} after the split ({usable - kept:,} set aside: `graft data prepare`)"
    if started.estimated:
        text = f"about {text} (an estimate: {quote(started.estimated)})"
    return text


MOST_FIELDS = 20


def _show_fields(started: "Started") -> None:
    """The extra fields of the rows and how they are interpreted."""

    if not started.fields:
        return
    rows = table("field", "taken for", "rows", "values", "", right=("rows",))
    for field in started.fields[:MOST_FIELDS]:
        note = "data.mapping" if field.mapped else field.note
        taken_for = "" if field.taken_for == "nothing" else field.taken_for
        rows.add_row(
            quote(field.name), taken_for, f"{field.rows:,}", quote(", ".join(field.values)), quote(note)
        )
    stdout.print(rows)
    more = len(started.fields) - MOST_FIELDS
    rest = f"{more:,} more fields; " if more > 0 else ""
    print_line(stdout, f"{rest}data.mapping, data.keep and data.split_by may name any of them")


def _show_bases(started: "Started") -> None:
    """The bases of the catalog on this machine, the chosen one, and what it can and cannot do."""
    from graftwork.views.plan import view_bases

    if started.bases is not None:
        print_document(stdout, view_bases(started.bases, base=started.base))


def _show_preflight(folder: Path, started: "Started", *, as_json: bool) -> None:
    """What `graft run` will do, and its estimated time."""
    from graftwork.views.terminal import show

    with reporting(folder) as project:
        found = project.dry_run()
    if as_json:
        print_json({**started.model_dump(mode="json"), "preflight": found.model_dump(mode="json")})
    else:
        show(stdout, found)


MARKS = {"ok": "[green]✓[/]", "missing": "[red]✗[/]", "note": "[dim]·[/]"}


def doctor(
    project: Folder = None,
    network: Annotated[
        bool, typer.Option("--network", help="Also test the connection to each host that the settings use.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also train ten steps on synthetic rows and read the checkpoint back; requires a project.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check software, memory, disk, GPUs, accounts, model, database, port. Exit code 3: something is missing.

    Nothing is sent anywhere, and no secret is shown. Outside a project, only the machine is checked.

    Example:  graft doctor --dry-run
    """
    from graftwork.cli.progress import RichReporter
    from graftwork.pipeline.dry_run import check_dry_run
    from graftwork.process.worker import stoppable
    from graftwork.project.doctor import examine
    from graftwork.project.folder import find_project, open_project

    has_project = project is not None or find_project() is not None
    if dry_run and not has_project:
        raise UserError(
            "a dry run needs a project",
            why="it uses the project's base model and training settings",
            fix="run it in a folder with a graft.yaml, or run `graft init` first",
            where="--dry-run",
        )
    opened = open_project(project) if has_project else None
    with stoppable(), RichReporter(tables=False) as reporter:
        trial = check_dry_run(opened, reporter) if dry_run and opened else None
        checks = list(examine(opened, network=network, dry_run=trial))
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
    from graftwork.project.settings import ProjectSettings

    print_json(ProjectSettings.model_json_schema())
