"""`graft plan lint`: is the configuration what it looks like?"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from rich.console import Console

    from graftwork.pipeline.lint import Linted

MARKS = {"error": "[red]✗[/]", "warning": "[yellow]![/]", "note": "[dim]·[/]"}


def lint(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A graft.yaml, a YAML or JSON of TrainingArguments, axolotl, LLaMA-Factory or DeepSpeed; "
            "the project's graft.yaml by default."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Rows of an epoch.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The card it is meant for, or `cpu`.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="How many cards.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", min=0, help="Host memory in GiB.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The base model: a name of the catalog or a config.json.")
    ] = None,
    data_model: Annotated[
        str | None, typer.Option("--data-model", help="The model that wrote the rows.")
    ] = None,
    deployed_model: Annotated[
        str | None, typer.Option("--deployed-model", help="The model that is served.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens of the rows: a number, or a file of them.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Folder of your own catalog; else $GRAFT_CATALOG.")
    ] = None,
    json: Json = False,
) -> None:
    """Find what looks right in a training configuration and is not, before the run.

    Exit code 1: something in it is wrong.

    Example:  graft plan lint training.yaml --rows 238 --gpu "RTX 4090" --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.lint import Given, lint_file
    from graftwork.project.load import PROJECT_FILE, find_project

    path = file or (find_project() or Path()) / PROJECT_FILE
    done = lint_file(
        path,
        Given(
            rows=rows,
            gpu=gpu,
            gpus=gpus,
            ram_gib=ram,
            model=model,
            data_model=data_model,
            deployed_model=deployed_model,
            lengths=lengths,
            catalog=catalog,
        ),
    )
    if json:
        print_json(done)
    else:
        _show(stdout, done)
    raise typer.Exit(EXIT_ANSWER_IS_NO if done.errors else 0)


def _show(console: "Console", done: "Linted") -> None:
    from graftwork.cli.show.tables import print_line, quote

    for finding in done.findings:
        key = f" [dim]({quote(finding.key)})[/]" if finding.key else ""
        print_line(console, f"{MARKS[finding.severity]} [bold]{quote(finding.what)}[/]", soft_wrap=True)
        print_line(console, f"  [dim]where[/] {quote(finding.where)}{key}", soft_wrap=True)
        print_line(console, f"  [dim]why[/]   {quote(finding.why)}", soft_wrap=True)
        print_line(console, f"  [dim]fix[/]   {quote(finding.fix)}", soft_wrap=True)
        source = f", {quote(finding.source)}" if finding.source else ""
        print_line(console, f"  [dim]rule  {finding.rule}{source}[/]", soft_wrap=True)
    for gap in done.unknown:
        print_line(console, f"[dim]? not looked at: {quote(gap)}[/]", soft_wrap=True)
    counts = {kind: sum(one.severity == kind for one in done.findings) for kind in MARKS}
    told = ", ".join(f"{count} {kind}{'s' * (count != 1)}" for kind, count in counts.items() if count)
    print_line(console, f"{quote(done.file)} ({done.kind}): {told or 'nothing found'}", soft_wrap=True)
