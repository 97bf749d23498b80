"""`graft data …`: audit logs, prepare datasets, and inspect, compare and export them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from graftwork.cli import data_captures, data_repair, data_review
from graftwork.cli.command import Engine, Folder, opened, print_record, reporting
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from graftwork.grading.score_audit import ScoreAudit
    from graftwork.pipeline.score_audit import LogScoresAudit
    from graftwork.records.audit import Audit
    from graftwork.records.dataset import Split

NAMES_OF_SPLITS = ("train", "validation", "test", "rl")
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
        typer.Option("--format", help="Force the format of FILES, such as otlp. Default: recognized."),
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
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.files.disk import write_atomic
    from graftwork.report.audit_page import make_audit_page

    if scores:
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
    raise typer.Exit(0 if found.fit_to_train else EXIT_ANSWER_IS_NO)


def _audit(files: list[str], project: Path | None, row_format: str | None) -> "tuple[Audit, Path | None]":
    """The audit, and the page of the project where its own logs are audited."""
    from graftwork.api.audits import audit_files
    from graftwork.cli.output import stderr
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.project.load import find_project

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
    from graftwork.cli.output import print_json
    from graftwork.pipeline.score_audit import audit_logs

    if files:
        found = audit_logs(files)
    else:
        with opened(project) as work:
            settings = work.settings.data
            found = audit_logs(settings.logs, root=work.project.root, settings=settings)
    if as_json:
        print_json({**found.model_dump(mode="json"), "usable": found.usable})
    else:
        _show_scores(found)
    raise typer.Exit(0 if found.usable else EXIT_ANSWER_IS_NO)


def _show_scores(found: "LogScoresAudit") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote, table

    right = ("rows", "scores", "values")
    rows = table("log", "rows", "scores", "range", "values", "findings", right=right)
    for log in found.files:
        if log.audit is None:
            rows.add_row(quote(log.file), f"{log.rows:,}", "0", "", "", "no scores")
            continue
        rows.add_row(quote(log.file), f"{log.rows:,}", *_score_cells(log.audit))
    if found.whole is not None and len(found.files) > 1:
        total = sum(log.rows for log in found.files)
        rows.add_row("[bold]all[/]", f"{total:,}", *_score_cells(found.whole))
    stdout.print(rows)
    if found.whole is None:
        print_line(stdout, "[yellow]no row has a score: there is nothing to use as a reward[/]")
    else:
        usable = "[green]the scores can be used[/]"
        print_line(stdout, usable if found.usable else "[red]the scores cannot serve as rewards[/]")


def _score_cells(audit: "ScoreAudit") -> tuple[str, str, str, str]:
    from graftwork.cli.show.tables import quote

    says = "; ".join(f"{finding.kind}: {finding.says}" for finding in audit.findings)
    spread = f"{audit.least:g} … {audit.most:g}"
    return f"{audit.scores:,}", spread, f"{audit.distinct:,}", quote(says) or "[green]none[/]"


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
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_trace
    from graftwork.data.inspect.trace import names_token
    from graftwork.data.inspect.trace import trace as trace_in
    from graftwork.pipeline.dataset_folders import open_decoder_if_there

    folder, root = _find_dataset(dataset, project)
    decoder = open_decoder_if_there(folder, root) if names_token(what) else None
    found = trace_in(folder, what, root=root, decoder=decoder)
    if json:
        print_json(found)
    else:
        show_trace(stdout, found)


@app.command("show")
def show(
    split: Annotated[str, typer.Option("--split", help="train, validation, test or rl.")] = "train",
    rows: Annotated[int, typer.Option("--rows", "-n", min=1, help="Number of rows to show.")] = 3,
    row: Annotated[str | None, typer.Option("--row", help="A row id, or its first characters.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Mark token boundaries.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colours: trained tokens are enclosed in ⟦ and ⟧.")
    ] = False,
    dataset: Dataset = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Show rows as the model sees them, with the trained tokens in colour.

    Example:  graft data show --split test --rows 5
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_rows as print_rows
    from graftwork.data.inspect.rows import show_rows
    from graftwork.files.dataset import read_manifest
    from graftwork.pipeline.dataset_folders import open_decoder

    chosen = _to_split(split)
    folder, root = _find_dataset(dataset, project)
    decoder = open_decoder(folder, root)
    shown = show_rows(folder, decoder=decoder, split=chosen, rows=rows, row_id=row, by_token=tokens)
    if json:
        content_hash = read_manifest(folder).content_hash
        print_json({"dataset": content_hash, "rows": [found.model_dump(mode="json") for found in shown]})
    else:
        print_rows(stdout, shown, by_token=tokens, plain=plain)


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
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_diff
    from graftwork.data.inspect.diff import diff_datasets

    found = diff_datasets(_find_dataset(before, project)[0], _find_dataset(after, project)[0])
    if json:
        print_json(found)
    else:
        show_diff(stdout, found)


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
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.data import show_export
    from graftwork.data.export.run import export_dataset
    from graftwork.data.export.sink import ExportOptions
    from graftwork.records.dataset import SPLITS

    splits = [_to_split(chosen) for chosen in split or SPLITS]
    options = ExportOptions(name=name, title=title, license=license_name)
    folder, _ = _find_dataset(dataset, project)
    made = export_dataset(folder, out, format_name=format_name, splits=splits, options=options, force=force)
    if json:
        print_json({"folder": str(out), **made.model_dump(mode="json")})
    else:
        show_export(stdout, made, folder=out)


def _find_dataset(name: str | None, project: Path | None) -> tuple[Path, Path]:
    """The folder of a dataset, and the folder to which the names of its logs are relative."""
    from graftwork.files.dataset import MANIFEST
    from graftwork.pipeline.dataset_folders import (
        find_dataset_by_hash,
        find_latest_dataset,
        no_such_dataset,
    )
    from graftwork.project.load import PROJECT_FILE, find_project, open_project

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


def _to_split(name: str) -> "Split":
    from typing import cast

    from graftwork.records.errors import UserMistake

    if name not in NAMES_OF_SPLITS:
        raise UserMistake(f"there is no split {name!r}", fix=f"use one of {', '.join(NAMES_OF_SPLITS)}")
    return cast("Split", name)


for _group in (data_captures, data_repair, data_review):
    _group.add_to(app)
