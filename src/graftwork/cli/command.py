"""What the verbs that run a step have in common: open the project, run up to the step, show."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from graftwork.pipeline.step import StepOutputs
    from graftwork.records.plan import RunPlan

if TYPE_CHECKING:
    from graftwork.project.load import ProjectFolder

if TYPE_CHECKING:
    from pathlib import Path

    from graftwork.pipeline.open_project import OpenProject

Folder = Annotated[
    Path | None, typer.Option("--project", "-C", help="Folder of the project; the working folder by default.")
]
Model = Annotated[
    str | None, typer.Option("--model", help="One of the models in graft.yaml; the main one by default.")
]


def run_upto(
    step: str | None, *, project: Path | None, model: str | None = None, tables: bool = False
) -> "StepOutputs":
    """Bring the project up to date as far as `step`, telling on standard error how it goes."""
    from graftwork.cli.progress import RichReporter
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import run_pipeline
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with (
        stoppable(),
        RichReporter(tables=tables) as reporter,
        use_project(opened, reporter, model=model) as work,
    ):
        return run_pipeline(work, upto=step)


def run_and_show(step: str, *, project: Path | None, as_json: bool, model: str | None = None) -> None:
    """Run up to the step; then its result, in full, even where nothing had to be done."""
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show import show

    output = run_upto(step, project=project, model=model).outputs[step]
    if as_json:
        print_json(output)
    else:
        show(stdout, output)


def whole_run(project: Path | None, model: str | None = None) -> "RunPlan":
    """How long the whole run is expected to take. Nothing is done."""
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.table import plan_whole_run
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter(), model=model) as work:
        return plan_whole_run(work)


POLL_SECONDS = 0.2


def start_detached(verb: str, *, project: Path | None, model: str | None, as_json: bool) -> None:
    """Start `graft VERB` in the background; say which run it is and how to follow it."""
    from graftwork.pipeline.run_identity import run_id_of
    from graftwork.process.worker import lock_holder, start_detached
    from graftwork.project.load import open_project
    from graftwork.records.plan import Plan

    opened = open_project(project)
    holder = lock_holder(opened.state / "pipeline")
    if holder is not None:
        _say(as_json, state="already running", run=_current_run(opened), pid=holder, log=None)
        return
    run_id = run_id_of(run_upto("plan", project=opened.root, model=model).get("plan", Plan))
    log = opened.state / "logs" / f"{run_id}.log"
    words = [sys.executable, "-m", "graftwork.cli.main", verb, "-C", str(opened.root)]
    words += ["--model", model] if model else []
    child = start_detached(words, log=log, folder=opened.root)
    if _took_hold(child, opened) or child.returncode == 0:
        state = "started" if child.returncode is None else "nothing left to do"
        _say(as_json, state=state, run=run_id, pid=child.pid, log=log)
        return
    raise _failed_at_once(child.returncode, log)


def _took_hold(child: "subprocess.Popen[bytes]", project: "ProjectFolder") -> bool:
    """Wait until it works, or has ended."""
    from graftwork.process.worker import lock_holder

    pause = threading.Event()
    while child.poll() is None:
        if lock_holder(project.state / "pipeline") == child.pid:
            return True
        pause.wait(POLL_SECONDS)
    return False


def _failed_at_once(code: int, log: Path) -> Exception:
    from graftwork.records.errors import WorkerFailed

    last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return WorkerFailed(
        f"it ended at once, with exit code {code}",
        why=last or "it left no output",
        fix="mend what it says, then run the same command again",
        where=str(log),
    )


def _current_run(project: "ProjectFolder") -> str | None:
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.runs import find_run

    with use_project(project, NullReporter()) as work:
        run = find_run(work)
    return run.id if run is not None and run.state == "running" else None


def _say(as_json: bool, *, state: str, run: str | None, pid: int, log: Path | None) -> None:
    from graftwork.cli.output import print_json, stdout

    if as_json:
        print_json({"state": state, "run": run, "pid": pid, "log": str(log) if log else None})
        return
    what = f"run [bold]{run}[/]" if run else "the work"
    if state == "nothing left to do":
        stdout.print(f"{what} is done already: nothing is left to do", highlight=False)
        return
    stdout.print(f"{what} {state} in the background (process {pid})", highlight=False)
    asked = f" --run {run}" if run else ""
    stdout.print(f"  follow it:  graft logs -f{asked}", highlight=False)
    stdout.print("  how is it:  graft status", highlight=False)
    stdout.print("  stop it:    graft stop", highlight=False)
    if log is not None:
        stdout.print(f"  its words:  {log}", highlight=False, soft_wrap=True)


Name = Annotated[
    str, typer.Argument(help="An alias, a version (1.4.0, tagger@1.4.0), an id, or the beginning of one.")
]
Alias = Annotated[
    str | None,
    typer.Option(
        "--alias",
        help="The alias; that of graft.yaml (champion) by default. tagger/champion names the model, too.",
    ),
]
Reason = Annotated[str, typer.Option("--reason", help="Why; it goes into the log.")]


@contextmanager
def opened(project: "Path | None", model: str | None = None) -> "Iterator[OpenProject]":
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter(), model=model) as work:
        yield work


@contextmanager
def opened_aloud(project: "Path | None", model: str | None = None) -> "Iterator[OpenProject]":
    """For what takes a while: how far it is, on standard error."""
    from graftwork.cli.progress import RichReporter
    from graftwork.pipeline.open_project import use_project
    from graftwork.project.load import open_project

    with (
        RichReporter(tables=False) as reporter,
        use_project(open_project(project), reporter, model=model) as work,
    ):
        yield work
