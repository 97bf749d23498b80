"""`graft gate`: deploy, iterate or abort."""

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model


def gate(project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Decide by the rules in graft.yaml. Exit codes: 0 deploy, 10 iterate, 11 abort, 12 not enough evidence.

    Example:  graft gate && echo "ship it"
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show
    from graftwork.cli.steps import run_upto
    from graftwork.records.verdict import Verdict

    verdict = run_upto("gate", project=project, model=model).get("gate", Verdict)
    if json:
        print_json(verdict)
    else:
        show(stdout, verdict)
    raise typer.Exit(verdict.exit_code)
