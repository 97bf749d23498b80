"""`graft eval import`: what another tool measured, shown and compared as our own."""

from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model

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
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.evaluation import show_imported
    from graftwork.pipeline.eval_exchange import import_evaluation
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        RichNarrator(tables=False) as narrator,
        use_project(opened, narrator, model=model) as work,
    ):
        imported = import_evaluation(work, [path.absolute() for path in files])
    if json:
        print_json(imported)
    else:
        show_imported(stdout, imported)
