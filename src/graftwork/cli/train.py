"""`graft train`: an adapter, whatever happens to the worker. What belongs to it hangs below it."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.command import Folder, Model, run_and_show
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO


def run_all(*, project: Path | None, as_json: bool) -> None:
    """Train what is not up to date, then one table; exit code 1 where a model failed."""
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show import show
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.train_all import train_all
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with stoppable(), RichReporter(tables=False) as reporter, use_project(opened, reporter) as work:
        trained = train_all(work)
    if as_json:
        print_json(trained)
    else:
        show(stdout, trained)
    if trained.failed:
        raise typer.Exit(EXIT_ANSWER_IS_NO)


class AdapterFormat(StrEnum):
    merged = "merged"
    gguf = "gguf"
    adapter = "adapter"


To = Annotated[Path, typer.Option("--to", help="Folder that is made; it must not exist yet.")]
Run = Annotated[str | None, typer.Argument(help="A run, as `graft status` names it; the model's last one.")]
As = Annotated[
    AdapterFormat,
    typer.Option(
        "--format",
        help="merged: base and adapter in one transformers folder, proven to say the same; gguf: that for "
        "llama.cpp, by its own converter; adapter: the PEFT folder.",
    ),
]


def export(
    to: To,
    run: Run = None,
    format: As = AdapterFormat.merged,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write a trained adapter merged into its base, as GGUF, or as it is; checked before and after.

    Example:  graft train export --to merged/
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show import show
    from graftwork.pipeline.export import export_run
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    opened = open_project(project)
    with RichReporter(tables=False) as reporter, use_project(opened, reporter, model=model) as work:
        exported = export_run(work, run=run, to=to.absolute(), format=format.value)
    if json:
        print_json(exported)
    else:
        show(stdout, exported)


Nodes = Annotated[
    int | None, typer.Option("--nodes", min=2, help="Machines that train together; see --node-rank.")
]
NodeRank = Annotated[
    int | None,
    typer.Option("--node-rank", min=0, help="Run this machine's part; without it, print what to run where."),
]
MainAddress = Annotated[
    str | None, typer.Option("--main-address", help="HOST:PORT of machine 0, as the others reach it.")
]


def run_on_machines(
    nodes: int,
    *,
    rank: int | None,
    main_address: str | None,
    project: Path | None,
    model: str | None,
    as_json: bool,
) -> None:
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.cli.progress import RichReporter
    from graftwork.cli.show import show
    from graftwork.pipeline.multi_node import answer_calls, machine_commands, with_machines
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import run_pipeline
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    opened = replace(opened, settings=with_machines(opened.settings, nodes=nodes, main_address=main_address))
    if rank is None:
        told = machine_commands(opened, model=model)
        if as_json:
            print_json(told)
            return
        for note in told.notes:
            stderr.print(note, highlight=False, soft_wrap=True)
        for command in told.commands:
            stdout.print(command, highlight=False, soft_wrap=True)
        return
    with stoppable(), RichReporter(tables=False) as reporter:
        if rank:
            settings = opened.settings.of_model(model or opened.settings.main_model)
            answer_calls(opened, settings.train, rank=rank, reporter=reporter)
            return
        with use_project(opened, reporter, model=model) as work:
            outcome = run_pipeline(work, upto="train").outputs["train"]
    if as_json:
        print_json(outcome)
    else:
        show(stdout, outcome)


Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Plan here, then train in the background; it outlives the terminal."),
]

Everything = Annotated[
    bool, typer.Option("--all", help="Every model of graft.yaml, the main one first; each base loaded once.")
]

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.command("export")(export)


@app.callback()
def train(
    context: typer.Context,
    project: Folder = None,
    model: Model = None,
    everything: Everything = False,
    detach: Detach = False,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    main_address: MainAddress = None,
    json: Json = False,
) -> None:
    """Train the adapter; interrupted, killed or out of power, it goes on from its last checkpoint.

    Example:  graft train --detach
    """
    if context.invoked_subcommand is not None:
        return
    if everything and (model is not None or detach):
        raise typer.BadParameter("--all goes with neither --model nor --detach")
    if nodes is None and (node_rank is not None or main_address is not None):
        raise typer.BadParameter("--node-rank and --main-address go with --nodes")
    if nodes is not None:
        if everything or detach:
            raise typer.BadParameter("--nodes goes with neither --all nor --detach")
        run_on_machines(
            nodes,
            rank=node_rank,
            main_address=main_address,
            project=project,
            model=model,
            as_json=json,
        )
        return
    if everything:
        run_all(project=project, as_json=json)
        return
    if detach:
        from graftwork.cli.command import start_detached

        start_detached("train", project=project, model=model, as_json=json)
        return
    run_and_show("train", project=project, model=model, as_json=json)
