"""`graft train`, `train router` and `train export`: train adapters and routers, and export adapters."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from graftwork.cli.command import Detach, Folder, Model, print_record, reporting, start_detached
from graftwork.cli.output import Json
from graftwork.records.errors import EXIT_ANSWER_IS_NO

AllModels = Annotated[
    bool,
    typer.Option(
        "--all", help="Train every model in graft.yaml, the main one first. Each base is loaded once."
    ),
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=2, help="Number of machines that train together; see --node-rank."),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        "--node-rank", min=0, help="Run the part of this machine. Without it, print the command for each."
    ),
]
MainAddress = Annotated[
    str | None, typer.Option("--main-address", help="HOST:PORT of machine 0, as the others reach it.")
]

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def train(
    context: typer.Context,
    project: Folder = None,
    model: Model = None,
    everything: AllModels = False,
    detach: Detach = False,
    nodes: Nodes = None,
    node_rank: NodeRank = None,
    main_address: MainAddress = None,
    json: Json = False,
) -> None:
    """Train the adapter. A run that was interrupted or killed resumes from its last checkpoint.

    Example:  graft train --detach
    """
    if context.invoked_subcommand is not None:
        return
    if everything and (model is not None or detach):
        raise typer.BadParameter("--all cannot be combined with --model or --detach")
    if nodes is None and (node_rank is not None or main_address is not None):
        raise typer.BadParameter("--node-rank and --main-address require --nodes")
    if nodes is not None and (everything or detach):
        raise typer.BadParameter("--nodes cannot be combined with --all or --detach")
    if nodes is not None:
        _train_on_machines(
            nodes, rank=node_rank, main_address=main_address, project=project, model=model, as_json=json
        )
    elif everything:
        _train_all(project, as_json=json)
    elif detach:
        start_detached("train", project=project, model=model, as_json=json)
    else:
        with reporting(project, model) as found:
            outcome = found.train()
        print_record(outcome, as_json=json)


def _train_all(project: Path | None, *, as_json: bool) -> None:
    with reporting(project) as found:
        trained = found.train_all()
    print_record(trained, as_json=as_json)
    if trained.failed:
        raise typer.Exit(EXIT_ANSWER_IS_NO)


def _train_on_machines(
    nodes: int,
    *,
    rank: int | None,
    main_address: str | None,
    project: Path | None,
    model: str | None,
    as_json: bool,
) -> None:
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.pipeline.multi_node import answer_calls, machine_commands, with_machines

    with reporting(project, model) as opened:
        settings = with_machines(opened.settings, nodes=nodes, main_address=main_address)
        found = replace(opened, folder=replace(opened.folder, settings=settings))
        if rank:
            chosen = settings.of_model(model or settings.main_model)
            answer_calls(found.folder, chosen.train, rank=rank, reporter=found.reporter)
            return
        outcome = found.train() if rank is not None else None
    if outcome is not None:
        print_record(outcome, as_json=as_json)
        return
    instructions = machine_commands(found.folder, model=model)
    if as_json:
        print_json(instructions)
        return
    for note in instructions.notes:
        stderr.print(note, highlight=False, soft_wrap=True)
    for command in instructions.commands:
        stdout.print(command, highlight=False, soft_wrap=True)


@app.command("router")
def router(
    target: Annotated[
        float,
        typer.Option(
            "--target",
            min=0.5,
            max=1.0,
            help="How often it must be right where it is sure. Other questions go to the main model.",
        ),
    ] = 0.95,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Train the router of a family: a small classifier that chooses the model for a prompt.

    Example:  graft train router -C examples/seven_models
    """
    with reporting(project) as found:
        trained = found.train_router(target=target)
    print_record(trained, as_json=json)


class AdapterFormat(StrEnum):
    merged = "merged"
    gguf = "gguf"
    adapter = "adapter"


@app.command("export")
def export(
    to: Annotated[Path, typer.Option("--to", help="Folder to create; it must not exist yet.")],
    run: Annotated[
        str | None,
        typer.Argument(help="A run id from `graft status`. Default: the last run of the model."),
    ] = None,
    format: Annotated[
        AdapterFormat,
        typer.Option(
            "--format",
            help="merged: base and adapter as one transformers folder, checked to give the same output. "
            "gguf: the merged model, converted by llama.cpp. adapter: the PEFT folder.",
        ),
    ] = AdapterFormat.merged,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Export a trained adapter: merged into its base, as GGUF, or as a PEFT folder.

    Example:  graft train export --to merged/
    """
    from graftwork.pipeline.export import export_run

    with reporting(project, model) as found, found.open() as work:
        exported = export_run(work, run=run, to=to.absolute(), format=format.value)
    print_record(exported, as_json=json)
