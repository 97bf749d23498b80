"""`graft train` and its commands, and `graft reward`: whether the rewards to train on can be trusted."""

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import (
    Detach,
    Engine,
    EngineName,
    Folder,
    Model,
    has_subcommand,
    opened,
    print_record,
    reporting,
    start_detached,
)
from graftwork.cli.fleet import Yes
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT

if TYPE_CHECKING:
    pass


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
        "--node-rank",
        min=0,
        help="Run this machine's part. Without it, print the command for each machine; with `engine: ray` or "
        "`slurm`, get the machines there.",
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
    router: Annotated[
        float | None,
        typer.Option(
            "--router",
            min=0.5,
            max=1.0,
            metavar="ACCURACY",
            help="Train the router of a family instead: a small classifier that chooses the model for a "
            "prompt. It must be this accurate where it is confident; other prompts go to the main model.",
        ),
    ] = None,
    engine: Engine = None,
    json: Json = False,
) -> None:
    """Train the adapter. A run that was interrupted or killed resumes from its last checkpoint.

    Example:  graft train --detach
    Example:  graft train --router 0.95 -C examples/seven_models
    """
    if has_subcommand(context):
        return
    if everything and (model is not None or detach):
        raise typer.BadParameter("--all cannot be combined with --model or --detach")
    if nodes is None and (node_rank is not None or main_address is not None):
        raise typer.BadParameter("--node-rank and --main-address require --nodes")
    if nodes is not None and (everything or detach):
        raise typer.BadParameter("--nodes cannot be combined with --all or --detach")
    if engine is not None and not everything and nodes is None:
        raise typer.BadParameter("--engine requires --all or --nodes")
    if router is not None:
        if everything or nodes is not None or detach or model is not None:
            raise typer.BadParameter("--router cannot be combined with --all, --detach, --model or --nodes")
        with reporting(project) as found:
            trained = found.train_router(target=router)
        print_record(trained, as_json=json)
    elif nodes is not None:
        _train_on_machines(
            project, model, engine, nodes=nodes, rank=node_rank, address=main_address, as_json=json
        )
    elif everything:
        with reporting(project, engine=engine) as found:
            all_trained = found.train_all()
        print_record(all_trained, as_json=json)
        if all_trained.failed:
            raise typer.Exit(EXIT_NEGATIVE_RESULT)
    elif detach:
        start_detached("train", project=project, model=model, as_json=json)
    else:
        with reporting(project, model) as found:
            outcome = found.train()
        print_record(outcome, as_json=json)


def _train_on_machines(
    project: Path | None,
    model: str | None,
    engine: EngineName | None,
    *,
    nodes: int,
    rank: int | None,
    address: str | None,
    as_json: bool,
) -> None:
    from graftwork.train.distributed.multi_node import machine_commands, with_machines

    with reporting(project, model, engine=engine) as found:
        if rank is not None or found.settings.engine != "local":
            outcome = found.train_on_machines(nodes, rank=rank, main_address=address)
            if outcome is not None:
                print_record(outcome, as_json=as_json)
            return
        settings = with_machines(found.settings, nodes=nodes, main_address=address)
    commands, notes = machine_commands(replace(found.folder, settings=settings), model=model)
    if as_json:
        print_json({"commands": commands, "notes": notes})
        return
    for note in notes:
        stderr.print(note, highlight=False, soft_wrap=True)
    for command in commands:
        stdout.print(command, highlight=False, soft_wrap=True)


class MergeMethodName(StrEnum):
    average = "average"
    linear = "linear"
    ties = "ties"
    dare = "dare"
    dare_ties = "dare_ties"


@app.command("merge")
def merge(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Two or more adapters: run:ID, release:ID, model:NAME, adapter or adapter:FOLDER."
        ),
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder to create; it must not exist yet.")],
    method: Annotated[
        MergeMethodName,
        typer.Option(
            "--method",
            help="average: the mean change, approximated at --rank. "
            "linear, ties, dare, dare_ties: of the factors, as in PEFT.",
        ),
    ] = MergeMethodName.average,
    weights: Annotated[
        str,
        typer.Option("--weights", help="equal, data (by trained tokens), or numbers such as 0.5,0.3,0.2."),
    ] = "equal",
    rank: Annotated[
        int | None, typer.Option("--rank", min=1, help="Rank of an average. Default: that of the first.")
    ] = None,
    density: Annotated[
        float, typer.Option("--density", help="Share of the values that TIES and DARE keep.")
    ] = 0.5,
    seed: Annotated[int, typer.Option("--seed", help="Seed for the values that DARE drops.")] = 0,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Merge adapters of one base into one: a candidate that is evaluated like any other.

    Example:  graft train merge run:1a2b run:3c4d --method ties --to merged/
    """
    from graftwork.registry.export import MergeRequest, merge_adapters

    request = MergeRequest(
        tuple(names), to.absolute(), method.value, weights=weights, rank=rank, density=density, seed=seed
    )
    with reporting(project, model) as found, found.open() as work:
        merged = merge_adapters(work, request)
    print_record(merged, as_json=json)


def _numbers(text: str | None, option: str) -> tuple[float, ...]:
    """Values separated by commas, each above 0."""
    try:
        values = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        values = (0.0,)
    if any(not 0 < value < float("inf") for value in values):
        raise typer.BadParameter(f"{option} takes positive numbers separated by commas, not {text!r}")
    return tuple(dict.fromkeys(values))


def _counts(text: str | None, option: str) -> tuple[int, ...]:
    values = _numbers(text, option)
    if any(value != int(value) for value in values):
        raise typer.BadParameter(f"{option} takes whole numbers separated by commas, not {text!r}")
    return tuple(int(value) for value in values)


@app.command("sweep")
def sweep(
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0.01, help="Time for all trials together.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=1, help="Steps for all trials together, at the current batch size."),
    ] = None,
    learning_rate: Annotated[
        str | None,
        typer.Option(
            "--learning-rate", help="Values to try, such as 1e-4,5e-4. Default: around the one in graft.yaml."
        ),
    ] = None,
    rank: Annotated[str | None, typer.Option("--rank", help="Ranks to try, such as 4,8,16.")] = None,
    batch: Annotated[str | None, typer.Option("--batch", help="Batch sizes to try, such as 4,8.")] = None,
    trials: Annotated[int, typer.Option("--trials", min=2, help="Maximum number of trials.")] = 9,
    place: Annotated[
        str, typer.Option("--place", help="Where trials are trained: here, or a place of the fleet.")
    ] = "here",
    yes: Yes = False,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write the best settings to graft.yaml; comments and order are kept."),
    ] = False,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Search learning rate, rank and batch by successive halving on validation loss.

    A trial is skipped if the planner does not expect it to finish within --minutes. A killed sweep resumes
    where it stopped. The test split is not read.

    Example:  graft train sweep --minutes 30 --write
    """
    from graftwork.train.sweep import SweepRequest

    if (minutes is None) == (steps is None):
        raise typer.BadParameter("give --minutes or --steps")
    request = SweepRequest(
        minutes,
        steps,
        learning_rates=_numbers(learning_rate, "--learning-rate"),
        ranks=_counts(rank, "--rank"),
        batch_size=_counts(batch, "--batch"),
        trials=trials,
        place=place,
        confirmed=yes,
    )
    with reporting(project, model) as found:
        result = found.sweep(request, write=write)
    print_record(result, as_json=json)
    if result.best is None:
        raise typer.Exit(EXIT_NEGATIVE_RESULT)


@app.command("federated")
def federated(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the schedule and what would be sent. Start nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Start again from round 1, for places whose data has changed.")
    ] = False,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Train in rounds at places whose data stays there, and average their adapters after each round.

    The places are under `federated:` in graft.yaml. After a kill, the same command resumes.

    Example:  graft train federated --dry-run
    """
    with reporting(project, model) as found:
        if dry_run:
            from graftwork.train.federated import plan_federation

            with found.open() as work:
                planned = plan_federation(work)
            print_record(planned, as_json=json)
            return
        done = found.train_federated(again=again)
    print_record(done, as_json=json)


reward_app = typer.Typer(help="Check the rewards of reinforcement learning.", no_args_is_help=True)

Cases = Annotated[int, typer.Option("--cases", min=1, help="Prompts to try every answer on.")]


@reward_app.command("check")
def check(project: Folder = None, model: Model = None, cases: Cases = 4, json: Json = False) -> None:
    """Try the reference, an empty answer and a catalog of hacks against the rewards of graft.yaml.

    Exit code 0 if every reference is rewarded and no hack is, 1 if not. Needs a prepared dataset, or a file
    of cases under `train.rollouts.source`.

    Example:  graft reward check --cases 8
    """
    from graftwork.pipeline.preflight import check_rewards

    with opened(project, model) as work, stderr.status("trying the reference and the catalog of hacks"):
        found = check_rewards(work, cases=cases)
    print_record(found, as_json=json, sound=found.sound)
    raise typer.Exit(0 if found.sound else 1)


Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the package. It must not exist.")]
PackageName = Annotated[
    str | None, typer.Option("--name", help="Name of the task set. Default: the project.")
]
CaseFile = Annotated[
    Path | None, typer.Option("--cases", help="JSONL file of cases. Default: the prompts of rollouts.")
]


@reward_app.command("export")
def export(
    out: Out,
    name: PackageName = None,
    cases: CaseFile = None,
    project: Folder = None,
    model: Model = None,
    json: Json = False,
) -> None:
    """Export prompts and rewards as a task set of verifiers v1, a package for `vf-eval` and its trainers.

    The package grades with graftwork, which its environment needs too, without torch.

    Example:  graft reward export --out tasks/small_functions
    """
    from graftwork.train.taskset_export import export_taskset

    with opened(project, model) as work:
        made = export_taskset(work, out, name=name, cases=cases)
    print_record(made, as_json=json)
