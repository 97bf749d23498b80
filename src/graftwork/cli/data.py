"""`graft data …`: audit logs, prepare datasets, repair and review rows, inspect, compare and export."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, Protocol, cast, get_args

import typer

from graftwork.cli.command import Engine, Folder, has_subcommand, opened, print_record, reporting
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT, UserError
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line

if TYPE_CHECKING:
    from graftwork.data.review import ReviewQueue
    from graftwork.records.dataset import Audit, ReviewAction, ReviewItem

Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", "-d", help="A dataset folder, or the first characters of its hash. Default: the latest."
    ),
]

app = typer.Typer(help="Audit logs and prepare datasets.", no_args_is_help=True)


@app.command("audit")
def audit(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders or globs; - for standard input. Default: the logs in graft.yaml. "
            "Inside a project, its data settings also apply to these files."
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write an HTML page. Inside a project the default is audit.html."),
    ] = None,
    row_format: Annotated[
        str | None,
        typer.Option("--format", help="Force the format of FILES, such as otlp. Default: detected."),
    ] = None,
    scores: Annotated[
        bool,
        typer.Option(
            "--scores",
            help="Audit the logged quality scores instead, before they serve as rewards: scores that are "
            "constant, do not depend on the reply, or contradict the logged status.",
        ),
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Find rows that would spoil training: placeholders, truncated answers, duplicates, leaks, secrets.

    Exit code 1: do not train on these logs as they are. With --scores: there are no scores, or they cannot
    be used.

    Example:  graft data audit logs/interactions.jsonl --html audit.html
    """
    from graftwork.files.disk import write_atomic
    from graftwork.views.audit import make_audit_page

    if scores:
        if html is not None or row_format is not None:
            raise typer.BadParameter("--scores cannot be combined with --html or --format")
        _audit_scores(files or [], project, as_json=json)
    if row_format is not None and not files:
        raise typer.BadParameter("--format requires FILES; set data.format in graft.yaml for the logs")
    found, page = _audit(files or [], project, row_format)
    page = html or page
    if page:
        write_atomic(page, make_audit_page(found), durable=False)
    print_record(found, as_json=json)
    if page and not json:
        print_line(stdout, f"report: {quote(page)}", soft_wrap=True)
    raise typer.Exit(0 if found.fit_to_train else EXIT_NEGATIVE_RESULT)


def _audit(files: list[str], project: Path | None, row_format: str | None) -> "tuple[Audit, Path | None]":
    """The audit, and the project's page if its own logs are audited."""
    from graftwork.api.project import audit_files
    from graftwork.cli.progress import RichReporter
    from graftwork.project.folder import find_project

    root = project or find_project()
    if files and root is None:
        with RichReporter() as reporter:
            return audit_files(files, row_format=row_format, reporter=reporter), None
    with reporting(project if not files else root) as found:
        if files:
            print_line(
                stderr, f"[dim]using the data settings of {quote(found.folder.file)}[/]", soft_wrap=True
            )
            return found.audit(files, row_format=row_format), None
        return found.audit(), found.folder.audit_page


def _audit_scores(files: list[str], project: Path | None, *, as_json: bool) -> NoReturn:
    from graftwork.data.project import audit_logs

    if files:
        found = audit_logs(files)
    else:
        with opened(project) as work:
            settings = work.settings.data
            found = audit_logs(settings.logs, root=work.project.root, settings=settings)
    print_record(found, as_json=as_json, usable=found.usable)
    raise typer.Exit(0 if found.usable else EXIT_NEGATIVE_RESULT)


@app.command("prepare")
def prepare(project: Folder = None, engine: Engine = None, json: Json = False) -> None:
    """Prepare a dataset: filter, redact, deduplicate, split, render and check the loss mask.

    Example:  graft data prepare
    """
    with reporting(project, engine=engine) as found:
        prepared = found.prepare()
    print_record(prepared, as_json=json)


@app.command("trace")
def trace(
    what: Annotated[
        str,
        typer.Argument(
            help="FILE:LINE of a log, a row id or its first characters, or SPLIT:ROW[:TOKEN] counted from 0."
        ),
    ],
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Show where a row or token came from, or what became of a line of the log.

    Example:  graft data trace logs/interactions.jsonl:17   ·   graft data trace train:17:203
    """
    from graftwork.data.inspect import names_token
    from graftwork.data.inspect import trace as trace_in
    from graftwork.data.project import open_decoder_if_there

    folder, root = _find_dataset(dataset, project)
    decoder = open_decoder_if_there(folder, root) if names_token(what) else None
    found = trace_in(folder, what, root=root, decoder=decoder)
    print_record(found, as_json=json)


@app.command("show")
def show(
    split: Annotated[str, typer.Option("--split", help="train, validation, test or rl.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="Number of rows to show.")] = 3,
    row: Annotated[str | None, typer.Option("--row", help="A row id, or its first characters.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Mark token boundaries.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colors: trained tokens are enclosed in ⟦ and ⟧.")
    ] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Show rows as the model sees them, with the trained tokens in color.

    Example:  graft data show --split test --rows 5
    """
    from graftwork.api.datasets import to_split
    from graftwork.data.inspect import show_rows
    from graftwork.data.project import open_decoder
    from graftwork.files.dataset import read_manifest
    from graftwork.views.dataset import view_rows

    chosen = to_split(split)
    folder, root = _find_dataset(dataset, project)
    decoder = open_decoder(folder, root)
    shown = show_rows(folder, decoder=decoder, split=chosen, rows=rows, row_id=row, by_token=tokens)
    if json:
        content_hash = read_manifest(folder).content_hash
        print_json({"dataset": content_hash, "rows": [found.model_dump(mode="json") for found in shown]})
    else:
        print_document(stdout, view_rows(shown, by_token=tokens, plain=plain))


@app.command("diff")
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A dataset folder or hash.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The dataset to compare with.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """Compare two datasets: settings, logs, rows, splits, dropped rows, tokens.

    Example:  graft data diff 3f2a 91bc
    """
    from graftwork.data.inspect import diff_datasets

    found = diff_datasets(_find_dataset(before, project)[0], _find_dataset(after, project)[0])
    print_record(found, as_json=json)


@app.command("export")
def export(
    format_name: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="openai, huggingface, kaggle, sagemaker, axolotl or llamafactory."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to create.")],
    split: Annotated[list[str] | None, typer.Option("--split", help="Only this split. Repeatable.")] = None,
    name: Annotated[
        str | None,
        typer.Option(
            "--name", help="Name at the destination: OWNER/slug, s3://bucket/prefix, or a plain name."
        ),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="Title at the destination.")] = None,
    license_name: Annotated[str | None, typer.Option("--license", help="Name of the license.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Export a dataset in the format of another tool.

    Example:  graft data export openai --out exports/openai
    """
    from graftwork.api.datasets import to_split
    from graftwork.data.export.formats import export_dataset
    from graftwork.data.export.sink import ExportOptions
    from graftwork.records.dataset import SPLITS
    from graftwork.views.dataset import view_export

    splits = [to_split(chosen) for chosen in split or SPLITS]
    options = ExportOptions(name=name, title=title, license=license_name)
    folder, _ = _find_dataset(dataset, project)
    made = export_dataset(folder, out, format_name=format_name, splits=splits, options=options, force=force)
    if json:
        print_json({"folder": str(out), **made.model_dump(mode="json")})
    else:
        print_document(stdout, view_export(made, folder=out))


def _find_dataset(name: str | None, project: Path | None) -> tuple[Path, Path]:
    """The folder of a dataset, and the folder that its log names are relative to."""
    from graftwork.data.project import find_dataset_by_hash, find_latest_dataset, no_such_dataset
    from graftwork.files.dataset import MANIFEST
    from graftwork.project.folder import find_project, open_project
    from graftwork.project.load import PROJECT_FILE

    root = (project or find_project() or Path()).absolute()
    if name is not None and (Path(name) / MANIFEST).is_file():
        return Path(name).absolute(), root
    if name is not None and not (root / PROJECT_FILE).is_file():
        raise no_such_dataset(name, where=root)
    found = open_project(project)
    if name is not None:
        return find_dataset_by_hash(found.datasets, name), found.root
    with opened(project) as work:
        return find_latest_dataset(work), found.root


def repair(
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            help="URL#MODEL[,key=VARIABLE][,concurrency=N], or engine:embedded#BASE or engine:llamacpp#BASE. "
            "Default: data.repair.teacher.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List rows, tokens and cost; send no requests.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL file. Default: repaired.jsonl next to the first log.")
    ] = None,
    augment: Annotated[
        list[str] | None,
        typer.Option("--augment", help="role=NAME: add rows for a small role. Repeatable."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="Answers per prompt, which must agree.")
    ] = None,
    price_in: Annotated[
        float | None, typer.Option("--price-in", min=0, help="USD per million prompt tokens.")
    ] = None,
    price_out: Annotated[
        float | None, typer.Option("--price-out", min=0, help="USD per million completion tokens.")
    ] = None,
    max_cost: Annotated[
        float | None, typer.Option("--max-cost", help="Budget in USD, earlier runs included.")
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option("--max-total-tokens", help="Budget in tokens, earlier runs included.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=16, help="Maximum tokens per answer. Default: 1024.")
    ] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Maximum requests per minute.")] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Let a teacher answer the rows again that would be dropped as truncated, failed or placeholders.

    Accepted answers pass the project's checks and go to a log of their own, marked as the teacher's; they are
    never held out for tests. A killed run is resumed by the same command. Exit code 1: some rows are not
    decided yet.

    Example:  graft data repair --dry-run --price-in 0.5 --price-out 1.5
    """
    from graftwork.data.repair.project import revise_repair

    limits = {
        "price_in": price_in,
        "price_out": price_out,
        "max_cost": max_cost,
        "max_total_tokens": max_total_tokens,
        "max_tokens": max_tokens,
        "requests_per_minute": rate,
    }
    roles = [_role_of(text) for text in augment or []]
    with reporting(project) as found:
        settings = revise_repair(found.settings.data.repair, teacher, roles, samples, limits)
        if dry_run:
            print_record(found.plan_repair(settings, out=out), as_json=json)
            return
        outcome = found.repair(settings, out=out)
    print_record(outcome, as_json=json)
    raise typer.Exit(EXIT_NEGATIVE_RESULT if outcome.undecided else 0)


def _role_of(text: str) -> str:
    key, _, role = text.partition("=")
    if key != "role" or not role:
        raise typer.BadParameter("must be role=NAME", param_hint="--augment")
    return role


KEYS: "dict[str, ReviewAction]" = {"a": "accept", "r": "reject", "s": "skip", "e": "edit", "u": "undo"}
HELP = "[bold]a[/]ccept  [bold]r[/]eject  [bold]e[/]dit  [bold]s[/]kip  [bold]u[/]ndo  [bold]q[/]uit"
LONGEST_SHOWN = 4000


class ReviewTerminal(Protocol):
    """Where a reviewer looks and types. An empty key means end of input."""

    def show(self, item: "ReviewItem", *, waiting: int) -> None: ...
    def say(self, text: str) -> None: ...
    def read_key(self) -> str: ...
    def edit(self, text: str) -> str | None: ...


def review(
    who: Annotated[
        str | None,
        typer.Option("--reviewer", help="Your id, stored with each decision. Default: the user name."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, help="Stop after this many items.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Log of reviewed rows. Default: reviewed.jsonl next to the first log."),
    ] = None,
    corrections: Annotated[
        bool,
        typer.Option(
            "--corrections",
            help="List corrected answers with reviewer and time instead, and corrections in conflict.",
        ),
    ] = False,
    labels: Annotated[
        Path | None,
        typer.Option(
            "--labels", help="With --corrections: write labels for judges as JSONL: answers with scores."
        ),
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Review captures, failed cases and doubtful rows, one at a time, the most useful first.

    Keys: a accept, r reject, e edit in $EDITOR, s skip, u undo, q quit. No row is shown twice. Decisions are
    stored at once and applied at the end. With --json the queue is printed instead.

    Example:  graft data review --reviewer ada --limit 20
    Example:  graft data review --corrections --labels labels.jsonl
    """
    if labels is not None and not corrections:
        raise typer.BadParameter("--labels needs --corrections")
    if corrections:
        if who is not None or limit is not None or out is not None:
            raise typer.BadParameter("--corrections cannot be combined with --reviewer, --limit or --out")
        _list_corrections(project, labels, as_json=json)
        return
    from graftwork.data.repair.project import is_in_logs
    from graftwork.data.review import ReviewQueue, list_items
    from graftwork.project.open_project import current_user

    with opened(project) as work:
        if json:
            items = list_items(work)
            print_json({"waiting": len(items), "items": [item.model_dump(mode="json") for item in items]})
            return
        queue = ReviewQueue(work, who=who or current_user())
        try:
            decided = run_review(queue, _ConsoleTerminal(), limit=limit)
        finally:
            # Also after Ctrl-C: what was decided holds.
            feedback, rows, file = queue.apply(out=out)
        print_line(stdout, f"{decided} decided, {queue.waiting} waiting; {feedback} became feedback")
        if file is not None:
            print_line(stdout, f"{rows} rows corrected or rejected in {quote(file)}")
            if not is_in_logs(work, file):
                print_line(stdout, f"add {quote(file)} to data.logs in graft.yaml to use them")


def run_review(queue: "ReviewQueue", terminal: ReviewTerminal, *, limit: int | None = None) -> int:
    """Show item after item until the queue is empty, the limit is reached or the reviewer quits."""
    decided = 0
    while limit is None or decided < limit:
        item = queue.next()
        if item is None:
            terminal.say("nothing is waiting for a review")
            break
        terminal.show(item, waiting=queue.waiting)
        key = terminal.read_key()
        if key in ("", "q", "\x03", "\x04"):
            break
        action = KEYS.get(key.lower())
        if action is None:
            terminal.say(HELP)
        elif action == "undo":
            undone = queue.undo()
            decided -= undone is not None
            terminal.say("taken back" if undone is not None else "nothing to undo")
        else:
            decided += _decide(queue, terminal, item, action)
    return decided


def _decide(
    queue: "ReviewQueue", terminal: ReviewTerminal, item: "ReviewItem", action: "ReviewAction"
) -> bool:
    reply = terminal.edit(item.reply) if action == "edit" else ""
    if reply is None:
        return False
    try:
        is_stored = queue.decide(item, action, reply=reply or None)
    except UserError as error:
        terminal.say(f"{error.what}; press a to accept the reply as it is")
        return False
    if not is_stored:
        terminal.say("another reviewer has already decided on it")
    return is_stored


class _ConsoleTerminal:
    """The user's terminal, or lines of standard input if it is not a terminal."""

    def show(self, item: "ReviewItem", *, waiting: int) -> None:

        where = str(item.origin) if item.origin is not None else f"capture {item.capture}"
        role = f" · {item.group}" if item.group else ""
        stdout.rule()
        times = f", {len(item.alike) + 1} times" if item.alike else ""
        print_line(stdout, f"[bold]{quote(where)}[/]{quote(role)}{times} [dim]({waiting} waiting)[/]")
        for reason, sentence in item.reasons.items():
            print_line(stdout, f"[yellow]{reason}[/]: {quote(sentence)}")
        for turn in item.messages:
            print_line(stdout, f"[cyan]{turn.role}[/]: {quote(_shorten(turn.content))}")
        print_line(stdout, f"[green]reply[/]: {quote(_shorten(item.reply))}")
        if item.other:
            print_line(stdout, f"[magenta]compare[/]: {quote(_shorten(item.other))}")
        for answer in item.others:
            print_line(stdout, f"[magenta]other[/]: {quote(_shorten(answer.reply))}")
        print_line(stdout, HELP)

    def say(self, text: str) -> None:

        print_line(stdout, text)

    def read_key(self) -> str:
        return _read_terminal_key() if sys.stdin.isatty() else _read_plain_key(sys.stdin.read)

    def edit(self, text: str) -> str | None:
        """The text as the user left it in $VISUAL or $EDITOR; None if the editor failed."""

        with tempfile.TemporaryDirectory(prefix="graft-review-") as folder:
            path = Path(folder) / "reply.txt"
            path.write_text(text)
            editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
            try:
                done = subprocess.run([*shlex.split(editor), str(path)], check=False)
            except (OSError, ValueError) as error:
                self.say(f"could not start {quote(editor)} ({type(error).__name__}); set $EDITOR")
                return None
            return path.read_text().removesuffix("\n") if done.returncode == 0 else None


def _read_terminal_key() -> str:
    """Read one key without Enter. Keys pressed earlier are kept, unlike with `typer.getchar`."""
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal, termios.TCSADRAIN)
        return os.read(terminal, 1).decode(errors="replace")
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read_plain_key(read: Callable[[int], str]) -> str:
    while (key := read(1)).isspace():
        pass
    return key


def _shorten(text: str) -> str:
    bare = text.strip()
    if len(bare) <= LONGEST_SHOWN:
        return bare
    half = LONGEST_SHOWN // 2
    return f"{bare[:half]}\n[… {len(bare) - LONGEST_SHOWN:,} characters …]\n{bare[-half:]}"


def _list_corrections(project: Path | None, labels: Path | None, *, as_json: bool) -> None:
    from graftwork.data.review import list_corrections, list_judge_labels
    from graftwork.files.disk import write_atomic

    with opened(project) as work:
        found = list_corrections(work)
        if labels is not None:
            lines = [label.model_dump_json() + "\n" for label in list_judge_labels(work)]
            write_atomic(labels, "".join(lines), private=True)
    print_record(found, as_json=as_json)


captures = typer.Typer(invoke_without_command=True)


@captures.callback()
def write_captures(
    context: typer.Context,
    out: Annotated[
        Path | None, typer.Option("--out", help="JSONL file to write. Default: list the newest.")
    ] = None,
    output_format: Annotated[
        Literal["log", "cases"],
        typer.Option("--as", help="Write a log to train on, or cases for evaluate.cases."),
    ] = "log",
    text: Annotated[str, typer.Option(help="Only if a message or the reply contains this text.")] = "",
    model: Annotated[list[str] | None, typer.Option(help="Only requests for this model.")] = None,
    check: Annotated[
        list[str] | None, typer.Option(help="Only answers that failed this check of serve.escalate.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only with feedback of at least this score.")
    ] = None,
    max_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Only with feedback of at most this score.")
    ] = None,
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
    """List what the endpoint captured, or write it as a file that only you can read.

    Options that are not given come from `data.captures` in graft.yaml. Held-out prompts are not written to a
    log, nor is negative feedback without --feedback, and only corrected exchanges become cases. The list
    shows all that match, with the reason for those.

    Example:  graft data captures --text refund --max-score 0.4 --feedback all
    Example:  graft data captures --out logs/captured.jsonl --since 2026-11-01 --feedback positive
    Example:  graft data captures --as cases --out cases.jsonl --feedback all
    """
    if has_subcommand(context):
        return
    if out is None and output_format == "cases":
        raise typer.BadParameter("specify the file to write with --out", param_hint="--as")

    from graftwork.data.capture_export import CaptureQuery, FeedbackFilter, export_captures, list_captures
    from graftwork.text.options import apply_options

    if feedback is not None and feedback not in get_args(FeedbackFilter):
        raise typer.BadParameter(
            f"must be one of: {', '.join(get_args(FeedbackFilter))}", param_hint="--feedback"
        )
    query = CaptureQuery(
        text=text,
        models=tuple(model or ()),
        checks=tuple(check or ()),
        min_score=min_score,
        max_score=max_score,
    )
    limits = {"releases": release, "since": since, "until": until, "sessions": session}
    with opened(project) as work:
        settings = apply_options(
            work.project.settings.data.captures,
            {name: value for name, value in limits.items() if value},
            command="graft data captures",
            options={"releases": "release", "sessions": "session"},
        )
        kind = cast("FeedbackFilter", feedback or settings.feedback)
        if out is None:
            print_record(list_captures(work, settings, feedback=kind, query=query), as_json=json)
            return
        exported = export_captures(
            work, out, settings, feedback=kind, query=query, output_format=output_format
        )
    print_record(exported, as_json=json)


@captures.command("forget")
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
    from graftwork.serve.project import forget_captures

    if bool(session) == bool(user):
        raise typer.BadParameter("specify one of --session and --user", param_hint="--session")
    with opened(project) as work:
        found = forget_captures(work, session=session or None, user=user or None, dry_run=not yes)
    print_record(found, as_json=json)


app.command("repair")(repair)
app.command("review")(review)
app.add_typer(captures, name="captures")
