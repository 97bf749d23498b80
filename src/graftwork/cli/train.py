"""`graft train`: an adapter, whatever happens to the worker. What belongs to it hangs below it."""

from typing import Annotated

import typer

from graftwork.cli import train_export
from graftwork.cli.output import Json
from graftwork.cli.steps import Folder, Model, run_and_show
from graftwork.cli.train_nodes import MainAddress, NodeRank, Nodes, run_on_machines

Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Plan here, then train in the background; it outlives the terminal."),
]

Everything = Annotated[
    bool, typer.Option("--all", help="Every model of graft.yaml, the main one first; each base loaded once.")
]

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.command("export")(train_export.export)


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
        from graftwork.cli.train_all import run_all

        run_all(project=project, as_json=json)
        return
    if detach:
        from graftwork.cli.detached import start_detached

        start_detached("train", project=project, model=model, as_json=json)
        return
    run_and_show("train", project=project, model=model, as_json=json)
