"""What commands share: options, opening the project with progress on the terminal, detached runs."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import print_json, stdout
from graftwork.records.errors import WorkerFailed

if TYPE_CHECKING:
    from graftwork.api.project import Project
    from graftwork.project.load import ProjectFolder
    from graftwork.project.open_project import OpenProject
    from graftwork.records.base import Record

Folder = Annotated[
    Path | None, typer.Option("--project", "-C", help="Project folder. Default: the working directory.")
]
Model = Annotated[str | None, typer.Option("--model", help="A model in graft.yaml. Default: the main model.")]
Name = Annotated[
    str, typer.Argument(help="An alias, a version (1.4.0 or tagger@1.4.0), or an id or its first characters.")
]
Alias = Annotated[
    str | None,
    typer.Option(
        "--alias",
        help="The alias. Default: the one in graft.yaml (champion). tagger/champion also names the model.",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="The reason, recorded in the log.")]
Detach = Annotated[
    bool,
    typer.Option("--detach", "-d", help="Plan here, then run in the background, without the terminal."),
]
RunId = Annotated[str | None, typer.Option("--run", help="Id of the run, or its first characters.")]
POLL_SECONDS = 0.2


class EngineName(StrEnum):
    local = "local"
    ray = "ray"
    slurm = "slurm"


Engine = Annotated[
    EngineName | None,
    typer.Option("--engine", help="Where pieces of work run. Default: `engine` in graft.yaml."),
]


def has_subcommand(context: typer.Context) -> bool:
    """Whether a command of the group follows. Options of the group before it would be ignored: refused."""
    if context.invoked_subcommand is None:
        return False
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(
                f"{parameter.opts[0]} stands before the command: give it after `{context.invoked_subcommand}`"
            )
    return True


@contextmanager
def reporting(
    project: Path | None, model: str | None = None, *, tables: bool = False, engine: EngineName | None = None
) -> "Iterator[Project]":
    """Open the project with progress on standard error. SIGTERM stops the work at a safe point."""
    from graftwork.api.project import open_project
    from graftwork.cli.progress import RichReporter
    from graftwork.process.worker import stoppable

    with stoppable(), RichReporter(tables=tables) as reporter:
        found = open_project(project, model=model, reporter=reporter)
        if engine is not None:
            settings = found.folder.settings.model_copy(update={"engine": engine.value})
            found = replace(found, folder=replace(found.folder, settings=settings))
        yield found


@contextmanager
def opened(project: Path | None, model: str | None = None) -> "Iterator[OpenProject]":
    """The stores of a project, without progress."""
    from graftwork.api.project import open_project

    with open_project(project, model=model).open() as work:
        yield work


@contextmanager
def opened_with_progress(project: Path | None, model: str | None = None) -> "Iterator[OpenProject]":
    from graftwork.api.project import open_project
    from graftwork.cli.progress import RichReporter

    with (
        RichReporter(tables=False) as reporter,
        open_project(project, model=model, reporter=reporter).open() as work,
    ):
        yield work


def print_record(record: "Record", *, as_json: bool) -> None:
    """The record on standard output: as JSON, or as tables."""
    from graftwork.views.terminal import show

    if as_json:
        print_json(record)
    else:
        show(stdout, record)


def start_detached(command: str, *, project: Path | None, model: str | None, as_json: bool) -> None:
    """Start `graft COMMAND` in the background, and print which run it is and how to follow it."""
    from graftwork.api.project import open_project
    from graftwork.pipeline.steps.plan import run_id_of
    from graftwork.process import worker

    folder = open_project(project).folder
    holder = worker.lock_holder(folder.state / "pipeline")
    if holder is not None:
        _print_detached(as_json, state="already running", run=_current_run(folder), pid=holder, log=None)
        return
    with reporting(folder.root, model) as found:
        run_id = run_id_of(found.plan())
    log = folder.state / "logs" / f"{run_id}.log"
    arguments = [sys.executable, "-m", "graftwork.cli.main", command, "-C", str(folder.root)]
    arguments += ["--model", model] if model else []
    child = worker.start_detached(arguments, log=log, folder=folder.root)
    if _took_lock(child, folder) or child.returncode == 0:
        state = "started" if child.returncode is None else "nothing left to do"
        _print_detached(as_json, state=state, run=run_id, pid=child.pid, log=log)
        return
    raise _failed_at_start(child.returncode, log)


def _took_lock(child: "subprocess.Popen[bytes]", project: "ProjectFolder") -> bool:
    """Wait until the child holds the project's lock (True) or has ended."""
    from graftwork.process import worker

    pause = threading.Event()
    while child.poll() is None:
        if worker.lock_holder(project.state / "pipeline") == child.pid:
            return True
        pause.wait(POLL_SECONDS)
    return False


def _failed_at_start(code: int, log: Path) -> Exception:

    last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return WorkerFailed(
        f"the background process ended at once, with exit code {code}",
        why=last or "it left no output",
        fix="fix the error above, then run the same command again",
        where=str(log),
    )


def _current_run(project: "ProjectFolder") -> str | None:
    from graftwork.train.runs import find_run

    with opened(project.root) as work:
        run = find_run(work)
    return run.id if run is not None and run.state == "running" else None


def _print_detached(as_json: bool, *, state: str, run: str | None, pid: int, log: Path | None) -> None:

    if as_json:
        print_json({"state": state, "run": run, "pid": pid, "log": str(log) if log else None})
        return
    what = f"run [bold]{run}[/]" if run else "the project"
    if state == "nothing left to do":
        stdout.print(f"{what} is up to date: nothing to do", highlight=False)
        return
    stdout.print(f"{what} {state} in the background (process {pid})", highlight=False)
    asked = f" --run {run}" if run else ""
    stdout.print(f"  follow:  graft logs -f{asked}", highlight=False)
    stdout.print("  health:  graft status", highlight=False)
    stdout.print("  stop:    graft stop", highlight=False)
    if log is not None:
        stdout.print(f"  output:  {log}", highlight=False, soft_wrap=True)
