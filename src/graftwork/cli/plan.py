"""`graft plan`: what this project's run will take. The other questions asked beforehand hang below it."""

import typer

from graftwork.cli import (
    plan_buy,
    plan_catalog,
    plan_compare,
    plan_fit,
    plan_lint,
    plan_probe,
    plan_residuals,
    plan_serve,
)
from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_upto, whole_run

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def plan(context: typer.Context, project: Folder = None, model: Model = None, json: Json = False) -> None:
    """Say before the run what it takes: memory, tokens, steps, minutes of training, and the time of every
    stage of `graft run`, each with a range.

    Example:  graft plan --json | jq .minutes,.run.minutes
    """
    if context.invoked_subcommand is not None:
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show

    output = run_upto("plan", project=project, model=model).outputs["plan"]
    whole = whole_run(project, model)
    if json:
        print_json({**output.model_dump(mode="json"), "run": whole.model_dump(mode="json")})
        return
    show(stdout, output)
    show(stdout, whole)


app.command("catalog")(plan_catalog.catalog)
app.command("lint")(plan_lint.lint)
app.command("serve")(plan_serve.serve)
app.command("probe")(plan_probe.probe)
app.command("residuals")(plan_residuals.residuals)
app.command("fit")(plan_fit.fit)
app.command("compare")(plan_compare.compare)
app.command("buy")(plan_buy.buy)
