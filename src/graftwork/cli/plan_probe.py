"""`graft plan probe`: half a minute on the real device, so that plans need not guess."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from graftwork.project.folder import Project
    from graftwork.records.probe import ProbeFacts, ProbeJob

Shape = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="One of graft.yaml's or the catalog's models, or a folder with config.json. Needed outside a "
        "project.",
    ),
]


def probe(
    project: Folder = None,
    model: Shape = None,
    length: Annotated[int, typer.Option(min=16, help="Tokens of a row in the real steps.")] = 2048,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters in the real steps.")] = 16,
    seconds: Annotated[float, typer.Option(min=1, help="What is not begun by then is left out.")] = 30.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of a processor.")] = None,
    json: Json = False,
) -> None:
    """Measure this machine's card, or its processor, at a model's sizes, and keep it for later plans.

    Products, memory, transfers, disk, and a real step of two and four layers with random weights, in a
    process of its own. `graft plan` and `graft plan fit` then say "probed" in place of "computed". Outside
    a project (a folder with graft.yaml), --model has to name the model.

    Example:  graft plan probe --model deepseek-coder-6.7b --json | jq .figures.tokens_per_second
    """
    from graftwork.cli.output import stderr
    from graftwork.pipeline.probe import keep_probe, shape_to_probe, takes_long_to_find
    from graftwork.records.probe import ProbeJob

    opened = _open(project)
    if takes_long_to_find(opened, model):
        stderr.print("making the base model ready: once a machine, about half a minute")
    shape = shape_to_probe(opened, model)
    folder = opened.root if opened is not None else Path()
    job = ProbeJob(
        shape=shape,
        folder=str(folder.absolute()),
        length=length,
        rank=rank,
        seconds=seconds,
        threads=threads,
    )
    facts = _run(job)
    files = keep_probe(facts, opened)
    _show(facts, files, as_json=json)


def _open(project: Path | None) -> "Project | None":
    """The project where there is one: a machine can be probed before there is any."""
    from graftwork.project.folder import find_project, open_project

    return open_project(project) if project is not None or find_project() is not None else None


def _run(job: "ProbeJob") -> "ProbeFacts":
    from graftwork.cli.output import stderr
    from graftwork.pipeline.probe import run_probe

    with stderr.status("starting") as status:

        def hear(part: str, left: float) -> None:
            status.update(f"probing: {part}; about {left:.0f} s left")

        return run_probe(job, on_part=hear)


def _show(facts: "ProbeFacts", files: tuple[Path, ...], *, as_json: bool) -> None:
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
    from graftwork.cli.show.probe import show_probe

    show_probe(stdout, facts, figures, files)
