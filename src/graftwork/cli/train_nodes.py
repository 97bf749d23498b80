"""`graft train --nodes`: one run on several machines. Prints what to run where, or runs one part of it."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

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
    from graftwork.cli.narrate import RichNarrator
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.cli.show import show
    from graftwork.pipeline.multi_node import answer_calls, asked_of, tell_machines
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import run_pipeline
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    opened = replace(opened, settings=asked_of(opened.settings, nodes=nodes, main_address=main_address))
    if rank is None:
        told = tell_machines(opened, model=model)
        if as_json:
            print_json(told)
            return
        for note in told.notes:
            stderr.print(note, highlight=False, soft_wrap=True)
        for command in told.commands:
            stdout.print(command, highlight=False, soft_wrap=True)
        return
    with stoppable(), RichNarrator(tables=False) as narrator:
        if rank:
            settings = opened.settings.of_model(model or opened.settings.main_model)
            answer_calls(opened, settings.train, rank=rank, reporter=narrator)
            return
        with use_project(opened, narrator, model=model) as work:
            outcome = run_pipeline(work, upto="train").outputs["train"]
    if as_json:
        print_json(outcome)
    else:
        show(stdout, outcome)
