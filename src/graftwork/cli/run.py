"""`graft run`: the whole way."""

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder
from graftwork.cli.train import Detach


def run(project: Folder = None, detach: Detach = False, json: Json = False) -> None:
    """From logs to a served, gated adapter. What has not changed is not done again.

    Example:  graft run -C examples/cited_answers
    """
    if detach:
        from graftwork.cli.detached import start_detached

        start_detached("run", project=project, model=None, as_json=json)
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.steps import run_upto
    from graftwork.records.verdict import Verdict

    _tell_plan(project)
    made = run_upto(None, project=project, tables=not json)
    verdict = made.get("gate", Verdict)
    if json:
        print_json({name: output.model_dump(mode="json") for name, output in made.outputs.items()})
    else:
        stdout.print(f"[bold]{verdict.decision}[/]: {verdict.reason}", highlight=False)
        report = getattr(made.outputs.get("report"), "path", None)
        stdout.print(f"the whole story: {report}", highlight=False)
    raise typer.Exit(verdict.exit_code)


def _tell_plan(project: Folder) -> None:
    """How long it will take, on standard error. What is wrong with the project the run itself says."""
    from graftwork.cli.output import stderr
    from graftwork.cli.show import show
    from graftwork.cli.steps import whole_run
    from graftwork.records.errors import GraftError

    try:
        show(stderr, whole_run(project))
    except GraftError:
        return
