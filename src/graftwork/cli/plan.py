"""`graft plan …`: estimate the run of a project; lint, probe, past residuals and the catalog."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli import plan_cost, plan_fit, plan_week
from graftwork.cli.command import Folder, Model, opened, reporting
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

if TYPE_CHECKING:
    from rich.console import Console

    from graftwork.pipeline.lint import Linted
    from graftwork.project.load import ProjectFolder
    from graftwork.records.fit import ProbeFacts, ProbeJob

MARKS = {"error": "[red]✗[/]", "warning": "[yellow]![/]", "note": "[dim]·[/]"}


def lint(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="A graft.yaml, or YAML or JSON for TrainingArguments, axolotl, LLaMA-Factory or DeepSpeed. "
            "Default: the graft.yaml of the project."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Rows per epoch.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="The GPU that the run is for, or `cpu`.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")] = None,
    ram: Annotated[float | None, typer.Option("--ram", min=0, help="Host memory in GiB.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="The base model: a name in the catalog, or a config.json.")
    ] = None,
    data_model: Annotated[
        str | None, typer.Option("--data-model", help="The model that generated the rows.")
    ] = None,
    deployed_model: Annotated[
        str | None, typer.Option("--deployed-model", help="The model that is served.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens per row: a number, or a file of numbers.")
    ] = None,
    catalog: Annotated[
        Path | None, typer.Option("--catalog", help="Folder with your own catalog. Default: $GRAFT_CATALOG.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a training configuration for settings that look right and are not.

    Exit code 1: at least one error was found.

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
        _show_lint(stdout, done)
    raise typer.Exit(EXIT_ANSWER_IS_NO if done.errors else 0)


def _show_lint(console: "Console", done: "Linted") -> None:
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.text.wording import plural

    for finding in done.findings:
        key = f" [dim]({quote(finding.key)})[/]" if finding.key else ""
        print_line(console, f"{MARKS[finding.severity]} [bold]{quote(finding.what)}[/]", soft_wrap=True)
        print_line(console, f"  [dim]where[/] {quote(finding.where)}{key}", soft_wrap=True)
        print_line(console, f"  [dim]why[/]   {quote(finding.why)}", soft_wrap=True)
        print_line(console, f"  [dim]fix[/]   {quote(finding.fix)}", soft_wrap=True)
        source = f", {quote(finding.source)}" if finding.source else ""
        print_line(console, f"  [dim]rule  {finding.rule}{source}[/]", soft_wrap=True)
    for gap in done.unknown:
        print_line(console, f"[dim]? not checked: {quote(gap)}[/]", soft_wrap=True)
    counts = {kind: sum(finding.severity == kind for finding in done.findings) for kind in MARKS}
    summary = ", ".join(plural(count, kind) for kind, count in counts.items() if count)
    print_line(console, f"{quote(done.file)} ({done.kind}): {summary or 'no problems found'}", soft_wrap=True)


Shape = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="A model in graft.yaml or the catalog, or a folder with config.json. Needed outside a project.",
    ),
]


def probe(
    project: Folder = None,
    model: Shape = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens per row in the measured steps.")] = 2048,
    rank: Annotated[int, typer.Option(min=1, help="Adapter rank in the measured steps.")] = 16,
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit; measurements not started by then are skipped.")
    ] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    json: Json = False,
) -> None:
    """Measure the GPU or CPU of this machine at the sizes of a model, and use the result in later plans.

    Measures matrix products, memory, transfers, disk, and real training steps of two and four layers with
    random weights, in a separate process. `graft plan` and `graft plan fit` then report "probed" instead of
    "computed". Outside a project, --model is required.

    Example:  graft plan probe --model deepseek-coder-6.7b --json | jq .figures.tokens_per_second
    """
    from graftwork.cli.output import stderr
    from graftwork.pipeline.probe import keep_probe, shape_to_probe, takes_long_to_find
    from graftwork.records.fit import ProbeJob

    found = _open_if_any(project)
    if takes_long_to_find(found, model):
        stderr.print("preparing the base model: once per machine, about half a minute")
    shape = shape_to_probe(found, model)
    folder = found.root if found is not None else Path()
    job = ProbeJob(
        shape=shape,
        folder=str(folder.absolute()),
        length=length,
        rank=rank,
        seconds=seconds,
        threads=threads,
    )
    facts = _run_probe(job)
    files = keep_probe(facts, found)
    _show_probe(facts, files, as_json=json)


def _open_if_any(project: Path | None) -> "ProjectFolder | None":
    """The project, if there is one."""
    from graftwork.project.load import find_project, open_project

    return open_project(project) if project is not None or find_project() is not None else None


def _run_probe(job: "ProbeJob") -> "ProbeFacts":
    from graftwork.cli.output import stderr
    from graftwork.pipeline.probe import run_probe

    with stderr.status("starting") as status:

        def show_part(part: str, left: float) -> None:
            status.update(f"probing: {part}; about {left:.0f} s left")

        return run_probe(job, on_part=show_part)


def _show_probe(facts: "ProbeFacts", files: tuple[Path, ...], *, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.costmodel.probed_rates import probe_figures

    figures = probe_figures(facts)
    if as_json:
        print_json(
            {
                "certainty": "probed",
                "device": facts.device.model_dump(mode="json"),
                "figures": {name: figure.model_dump(mode="json") for name, figure in figures.items()},
                "left_out": list(facts.left_out),
                "facts": facts.model_dump(mode="json"),
                "kept": [str(file) for file in files],
            }
        )
        return
    from graftwork.cli.show.plan import show_probe

    show_probe(stdout, facts, figures, files)


def _show_past(project: Path | None, runs: int, *, as_json: bool) -> None:
    from graftwork.pipeline.past_residuals import past_residuals

    with opened(project) as work:
        found = past_residuals(work, runs=runs)
    if as_json:
        from graftwork.cli.output import print_json
        from graftwork.records.base import Figure

        body = found.model_dump(mode="json")
        for run, kept in zip(body["runs"], found.runs, strict=True):
            for entry, residual in zip(run["residuals"], kept.residuals, strict=True):
                entry["actual"] = Figure.exact(residual.actual, residual.planned.unit).model_dump(mode="json")
                entry["off"] = Figure.exact(residual.off).model_dump(mode="json")
                entry["inside"] = residual.inside
        print_json(body)
        return
    from graftwork.cli.output import stdout
    from graftwork.cli.show.plan import show_past

    show_past(stdout, found)


Catalog = Annotated[
    Path | None,
    typer.Option("--catalog", help="Folder with your own models.csv, gpus.csv, … Default: $GRAFT_CATALOG."),
]


def catalog(
    kind: Annotated[
        str | None,
        typer.Argument(help="models, gpus, cpus, prices, quoted, places or api_prices. Default: all."),
    ] = None,
    catalog: Catalog = None,
    json: Json = False,
) -> None:
    """List the models, GPUs, CPUs, prices and places that plans use, with source, date and age.

    Rows in your own files of the same names replace the built-in rows or add to them. Old prices are marked.

    Example:  graft plan catalog prices --json | jq '.prices[] | select(.stale)'
    """
    from datetime import date

    from graftwork.api.plans import list_catalog
    from graftwork.cli.output import print_json

    listed = list_catalog(kind, overlay=catalog, today=date.today())
    if json:
        print_json(listed)
        return
    from graftwork.cli.output import stdout
    from graftwork.cli.show.costs import show_catalog

    show_catalog(stdout, listed)


app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def plan(
    context: typer.Context,
    past: Annotated[
        int | None,
        typer.Option(
            "--past",
            min=1,
            metavar="RUNS",
            help="Compare this many past runs, latest first, with their plans, and show the bias of each "
            "figure: the median of the relative errors.",
        ),
    ] = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Estimate memory, tokens, steps and time of the run before it starts, each with a range.

    Example:  graft plan --json | jq .minutes,.run.minutes
    Example:  graft plan --past 20 --json | jq '.biases[] | select(.figure == "minutes").off'
    """
    if context.invoked_subcommand is not None:
        return
    if past is not None:
        _show_past(project, past, as_json=json)
        return
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show

    with reporting(project, model) as found:
        planned, whole = found.plan(), found.plan_run()
    if json:
        print_json({**planned.model_dump(mode="json"), "run": whole.model_dump(mode="json")})
        return
    show(stdout, planned)
    show(stdout, whole)


app.command("catalog")(catalog)
app.command("lint")(lint)
app.command("serve")(plan_fit.serve)
app.command("probe")(probe)
app.command("fit")(plan_fit.fit)
app.command("compare")(plan_cost.compare)
app.command("buy")(plan_cost.buy)
app.command("week")(plan_week.week)
