"""`graft eval export`: the last evaluation as files of another tool."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model


class Form(StrEnum):
    inspect = "inspect"
    lm_eval = "lm-eval"


Wanted = Annotated[Form, typer.Option("--format", help="The tool that shall read it.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write into.")]
Subjects = Annotated[
    list[str] | None, typer.Option("--subject", help="Only this subject; repeat it. All by default.")
]


def export_results(
    form: Wanted,
    out: Out = Path("exported"),
    subject: Subjects = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write the last evaluation as an inspect-ai log, or as lm-eval results, one for each subject.

    Example:  graft eval export --format inspect --out logs && inspect view --log-dir logs
    """
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.pipeline.eval_exchange import export_evaluation
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        RichNarrator(tables=False) as narrator,
        use_project(opened, narrator, model=model) as work,
    ):
        exported = export_evaluation(work, form=form.value, out=out.absolute(), subjects=subject or ())
    if json:
        print_json(exported)
        return
    for path in exported.files:
        print_line(stdout, quote(path), soft_wrap=True)
