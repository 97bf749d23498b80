"""`graft eval`: who answers the held-out cases better. What belongs to it hangs below it."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli import eval_export, eval_import
from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model

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
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.pipeline.evaluate_asked import Asked, evaluate_asked
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
        RichNarrator(tables=False) as narrator,
        use_project(opened, narrator, model=model) as work,
    ):
        evaluated = evaluate_asked(work, asked)
    if json:
        print_json(evaluated)
    else:
        show(stdout, evaluated)


app.command("import")(eval_import.import_results)
app.command("export")(eval_export.export_results)
