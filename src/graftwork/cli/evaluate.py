"""`graft eval`: who answers the held-out cases better. What belongs to it hangs below it."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.command import Folder, Model
from graftwork.cli.output import Json


class EvaluationLogFormat(StrEnum):
    inspect = "inspect"
    lm_eval = "lm-eval"


Wanted = Annotated[EvaluationLogFormat, typer.Option("--format", help="The tool that shall read it.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write into.")]
ExportSubjects = Annotated[
    list[str] | None, typer.Option("--subject", help="Only this subject; repeat it. All by default.")
]


def export_results(
    form: Wanted,
    out: Out = Path("exported"),
    subject: ExportSubjects = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write the last evaluation as an inspect-ai log, or as lm-eval results, one for each subject.

    Example:  graft eval export --format inspect --out logs && inspect view --log-dir logs
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.pipeline.evaluation_commands import export_evaluation
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        RichReporter(tables=False) as reporter,
        use_project(opened, reporter, model=model) as work,
    ):
        exported = export_evaluation(work, form=form.value, out=out.absolute(), subjects=subject or ())
    if json:
        print_json(exported)
        return
    for path in exported.files:
        print_line(stdout, quote(path), soft_wrap=True)


Files = Annotated[
    list[Path],
    typer.Argument(
        help="inspect-ai logs (.eval, .json) or lm-eval results (results_*.json, samples_*.jsonl). "
        "The first is the baseline, the second the candidate.",
    ),
]


def import_results(files: Files, project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Read results of inspect-ai or lm-eval: exact intervals, paired tests, every case side by side.

    Example:  graft eval import logs/base.eval logs/adapter.eval
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show.evaluation import show_imported
    from graftwork.pipeline.evaluation_commands import import_evaluation
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        RichReporter(tables=False) as reporter,
        use_project(opened, reporter, model=model) as work,
    ):
        imported = import_evaluation(work, [path.absolute() for path in files])
    if json:
        print_json(imported)
    else:
        show_imported(stdout, imported)


Subjects = Annotated[
    list[str] | None,
    typer.Option(
        "--subject",
        help="Who is asked: base, adapter, adapter:FOLDER, run:ID, release:ID, champion, log, or an "
        "OpenAI-compatible endpoint as URL#model,key=VARIABLE. Repeat it: the first is the baseline, the "
        "second the candidate. By default base and adapter, with the champion and the log.",
    ),
]
Cases = Annotated[
    Path | None,
    typer.Option("--cases", help="A JSONL file of cases: prompt or messages, reference, checks, group …"),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, help="At most so many cases, drawn by hash.")]
Shards = Annotated[int, typer.Option("--shards", min=1, max=64, help="Processes that share the cases.")]
Again = Annotated[bool, typer.Option("--again", help="Ask everything anew; kept answers are forgotten.")]

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def evaluate(
    context: typer.Context,
    project: Folder = None,
    model: Model = None,
    subject: Subjects = None,
    cases: Cases = None,
    limit: Limit = None,
    shards: Shards = 1,
    again: Again = False,
    json: Json = False,
) -> None:
    """Let base and adapter answer the held-out cases; rates with exact intervals, compared in pairs.

    What a subject has answered once is kept: the same question to the same weights costs nothing again.

    Example:  graft eval --subject base --subject release:champion --subject log
    """
    if context.invoked_subcommand is not None:
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show import show
    from graftwork.pipeline.evaluation_commands import Asked, evaluate_asked
    from graftwork.pipeline.open_project import use_project
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    asked = Asked(
        subjects=tuple(subject or ()),
        cases=cases.absolute() if cases is not None else None,
        limit=limit,
        shards=shards,
        again=again,
    )
    opened = open_project(project)
    with (
        stoppable(),
        RichReporter(tables=False) as reporter,
        use_project(opened, reporter, model=model) as work,
    ):
        evaluated = evaluate_asked(work, asked)
    if json:
        print_json(evaluated)
    else:
        show(stdout, evaluated)


app.command("import")(import_results)
app.command("export")(export_results)
