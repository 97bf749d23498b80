"""`graft data …`: look at logs, make datasets of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, run_and_show
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from graftwork.data.export.run import FormatName
    from graftwork.data.show_tokens import Decoder
    from graftwork.records.dataset import Split

if TYPE_CHECKING:
    from graftwork.data.rules.note import Sight
    from graftwork.data.settings import CaptureSettings
    from graftwork.project.load import ProjectFolder
    from graftwork.records.audit import Audit

NAMES_OF_SPLITS = ("train", "validation", "test", "rl")
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", "-d", help="A dataset's folder or the beginning of its hash; the latest by default."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Hang the verbs on `graft data`."""
    verbs: dict[str, Callable[..., None]] = {"trace": trace, "show": show, "diff": diff, "export": export}
    for name, verb in verbs.items():
        app.command(name)(verb)


def trace(
    what: Annotated[
        str,
        typer.Argument(
            help="FILE:LINE of a log, the id of a row or its beginning, or SPLIT:ROW[:TOKEN] counted from 0."
        ),
    ],
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Where a row or a token came from, and what became of a line of the log.

    Example:  graft data trace logs/interactions.jsonl:17   ·   graft data trace train:17:203
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_trace
    from graftwork.data.trace import names_token
    from graftwork.data.trace import trace as trace_in

    folder, root = _find_dataset(dataset, project)
    decoder = _open_decoder_if_there(folder, root) if names_token(what) else None
    found = trace_in(folder, what, root=root, decoder=decoder)
    if json:
        print_json(found)
    else:
        show_trace(stdout, found)


def show(
    split: Annotated[str, typer.Option("--split", help="train, validation, test or rl.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="How many rows from the first on.")] = 3,
    row: Annotated[str | None, typer.Option("--row", help="The id of a row, or its beginning.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Mark where tokens end.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colours: what is trained on stands between ⟦ and ⟧.")
    ] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Rows as the model sees them; what it is trained on is coloured.

    Example:  graft data show --split test --rows 5
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_rows as print_rows
    from graftwork.data.show_tokens import show_rows
    from graftwork.files.dataset import read_manifest

    chosen = _to_split(split)
    folder, root = _find_dataset(dataset, project)
    decoder = _open_decoder(folder, root)
    shown = show_rows(folder, decoder=decoder, split=chosen, rows=rows, row_id=row, by_token=tokens)
    if json:
        content_hash = read_manifest(folder).content_hash
        print_json({"dataset": content_hash, "rows": [one.model_dump(mode="json") for one in shown]})
    else:
        print_rows(stdout, shown, by_token=tokens, plain=plain)


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A dataset's folder or its hash.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The one to compare with.")],
    project: Folder = None,
    json: Json = False,
) -> None:
    """What differs between two datasets: settings, logs, rows, splits, drops, tokens.

    Example:  graft data diff 3f2a 91bc
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_diff
    from graftwork.data.diff import diff_datasets

    found = diff_datasets(_find_dataset(before, project)[0], _find_dataset(after, project)[0])
    if json:
        print_json(found)
    else:
        show_diff(stdout, found)


def export(
    format_name: Annotated[
        str,
        typer.Argument(
            metavar="FORMAT", help="openai, huggingface, kaggle, sagemaker, axolotl or llamafactory."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to make.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; may be given again.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", help="What the other side calls it: OWNER/slug, s3://bucket/prefix, a word."),
    ] = None,
    title: Annotated[str | None, typer.Option("--title", help="A title for people.")] = None,
    license_name: Annotated[str | None, typer.Option("--license", help="The license, by its name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Write among other files.")] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Write a dataset in another's format.

    Example:  graft data export openai --out exports/openai
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_export
    from graftwork.data.export.record import ExportOptions
    from graftwork.data.export.run import export_dataset
    from graftwork.records.dataset import SPLITS

    form, splits = _to_format(format_name), [_to_split(one) for one in split or SPLITS]
    options = ExportOptions(name=name, title=title, license=license_name)
    folder, _ = _find_dataset(dataset, project)
    made = export_dataset(folder, out, format_name=form, splits=splits, options=options, force=force)
    if json:
        print_json({"folder": str(out), **made.model_dump(mode="json")})
    else:
        show_export(stdout, made, folder=out)


def _find_dataset(name: str | None, project: Path | None) -> tuple[Path, Path]:
    """The folder of a dataset, and the folder that the names of its logs are relative to."""
    from graftwork.files.dataset import MANIFEST
    from graftwork.project.load import PROJECT_FILE, find_project, open_project

    root = (project or find_project() or Path()).absolute()
    if name is not None and (Path(name) / MANIFEST).is_file():
        return Path(name).absolute(), root
    if name is not None and not (root / PROJECT_FILE).is_file():
        raise _no_such_dataset(name, where=root)
    opened = open_project(project)
    folder = _find_latest(project) if name is None else _find_by_hash(opened.datasets, name)
    return folder, opened.root


def _find_latest(project: Path | None) -> Path:
    """The one that the step `prepare` last made."""
    from graftwork.files.dataset import MANIFEST
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.project.load import open_project
    from graftwork.records.errors import UserMistake

    with use_project(open_project(project), NullReporter()) as work:
        entry = work.ledger.get("prepare")
    # The folder alone is wanted: to read the whole output would load all that preparing needs.
    folder = Path(entry.output["folder"]) if entry is not None else None
    if folder is None or not (folder / MANIFEST).is_file():
        raise UserMistake(
            "this project has no dataset yet" if folder is None else "the project's dataset is gone",
            fix="graft data prepare",
            where=str(folder or ""),
        )
    return folder


def _find_by_hash(datasets: Path, name: str) -> Path:
    from graftwork.files.dataset import MANIFEST
    from graftwork.records.errors import UserMistake

    named = [one for one in sorted(datasets.glob("*")) if one.name.startswith(name)] if name else []
    found = [one for one in named if (one / MANIFEST).is_file()]
    if not found:
        raise _no_such_dataset(name, where=datasets)
    if len(found) > 1:
        raise UserMistake(
            f"several datasets begin with {name!r}",
            why=f"among them {', '.join(one.name[:12] for one in found[:3])}",
            fix="give more of the hash",
            where=str(datasets),
        )
    return found[0]


def _no_such_dataset(name: str, *, where: Path) -> Exception:
    from graftwork.records.errors import UserMistake

    return UserMistake(
        f"there is no dataset {name!r}",
        why="it is neither a folder with a manifest.json nor the beginning of a dataset's hash here",
        fix="leave it out for the latest dataset of the project, or make one: graft data prepare",
        where=str(where),
    )


def _open_decoder(folder: Path, root: Path) -> "Decoder":
    """The tokenizer of the base that the dataset was rendered for."""
    from graftwork.data.show_tokens import TokenizerDecoder
    from graftwork.files.dataset import read_manifest
    from graftwork.model.base import find_base
    from graftwork.records.errors import EnvironmentLacks

    dataset = read_manifest(folder)
    base = find_base(dataset.base, project_folder=root)
    if base.revision != dataset.base_fingerprint:
        raise EnvironmentLacks(
            f"the base model {dataset.base} is another than the dataset was rendered for",
            why="its tokens would read as another text",
            fix="restore the base model, or run `graft data prepare` again",
            where=base.folder,
        )
    decoder = TokenizerDecoder(Path(base.folder) / "tokenizer.json")
    decoder.load()
    return decoder


def _open_decoder_if_there(folder: Path, root: Path) -> "Decoder | None":
    """A trace is of use without the text of the token too."""
    from graftwork.records.errors import GraftError

    try:
        return _open_decoder(folder, root)
    except GraftError:
        return None


def _to_split(name: str) -> "Split":
    from typing import cast

    from graftwork.records.errors import UserMistake

    if name not in NAMES_OF_SPLITS:
        raise UserMistake(f"there is no split {name!r}", fix=f"name one of {', '.join(NAMES_OF_SPLITS)}")
    return cast("Split", name)


def _to_format(name: str) -> "FormatName":
    from graftwork.data.export.run import FORMATS
    from graftwork.records.errors import UserMistake

    for known in FORMATS:
        if known == name:
            return known
    raise UserMistake(f"there is no format {name!r}", fix=f"name one of {', '.join(FORMATS)}")


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
    from graftwork.files.disk import write_atomic
    from graftwork.report.audit_page import make_audit_page

    if files:
        found, page = _audit_files(tuple(files), project), html
    else:
        found, page = _audit_project(project)
        page = html or page
    if page:
        write_atomic(page, make_audit_page(found), durable=False)
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

    from graftwork.cli.progress import RichReporter
    from graftwork.data.audit import audit as audit_logs
    from graftwork.pipeline.reporter import progress_listener

    sight = _see_files(files, project)
    with RichReporter() as reporter, tempfile.TemporaryDirectory(prefix="graft-audit-") as folder:
        return audit_logs(sight, folder=Path(folder), on_progress=progress_listener(reporter))


def _see_files(files: tuple[str, ...], project: Path | None) -> "Sight":
    from dataclasses import replace

    from graftwork.cli.output import stderr
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.data.rules.note import Sight
    from graftwork.data.settings import DataSettings
    from graftwork.pipeline.steps.data import audit_context_here
    from graftwork.project.load import find_project, open_project

    root = project or find_project()
    if root is None:
        return Sight(settings=DataSettings(logs=files))
    opened = open_project(root)
    print_line(stderr, f"[dim]with the data settings of {quote(opened.file)}[/]", soft_wrap=True)
    sight = audit_context_here(opened)
    return replace(sight, settings=sight.settings.model_copy(update={"logs": files}))


@contextmanager
def _sifting_folder(project: "ProjectFolder") -> "Iterator[Path]":
    """The project's own, whose blocks need not be sifted again; beside a run that holds it, a passing one."""
    import tempfile

    from graftwork.process.worker import hold_lock
    from graftwork.records.errors import Busy

    with ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(project.state / "pipeline"))
            folder = project.sifted
        except Busy:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-audit-")))
        yield folder


def _audit_project(project: Path | None) -> "tuple[Audit, Path]":
    from graftwork.cli.progress import RichReporter
    from graftwork.data.audit import audit as audit_logs
    from graftwork.pipeline.reporter import progress_listener
    from graftwork.pipeline.steps.data import audit_context_here
    from graftwork.project.load import open_project

    opened = open_project(project)
    with RichReporter() as reporter, _sifting_folder(opened) as folder:
        found = audit_logs(
            audit_context_here(opened),
            folder=folder,
            root=opened.root,
            on_progress=progress_listener(reporter),
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
    from graftwork.files.disk import write_atomic
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.serving import CaptureExport, FeedbackFilter
    from graftwork.project.load import open_project

    opened = open_project(project)
    if feedback is not None and feedback not in get_args(FeedbackFilter):
        raise typer.BadParameter(
            f"must be one of: {', '.join(get_args(FeedbackFilter))}", param_hint="--feedback"
        )
    chosen = cast(FeedbackFilter, feedback or opened.settings.data.captures.feedback)
    settings = _revise_captures(
        opened.settings.data.captures,
        feedback=chosen if chosen == "positive" else "not_negative",
        releases=release,
        since=since,
        until=until,
        sessions=session,
    )
    with use_project(opened, NullReporter()) as work:
        export = CaptureExport(work, settings, feedback=chosen)
        write_atomic(out, "".join(capture.model_dump_json() + "\n" for capture in export), private=True)
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


add_to(app)
