"""`graft stop`: ask the run to stop in good order, and wait until it has."""

import threading
from typing import Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

Run = Annotated[str | None, typer.Option("--run", help="Id of the run, or its beginning.")]
Now = Annotated[bool, typer.Option("--now", help="Kill it; what came after the last checkpoint is lost.")]
POLL_SECONDS = 0.2


def stop(project: Folder = None, run: Run = None, now: Now = False, json: Json = False) -> None:
    """Stop what works on this project: it writes a checkpoint first and can be gone on with.

    Example:  graft stop
    """
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.runs import ask_to_stop, at_work, end_at_once, find_run
    from graftwork.process.heartbeat import read_beat
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter()) as work:
        meant = find_run(work, run)
        busy = at_work(work, meant)
        idle = not busy or (run is not None and meant is not None and meant.state != "running")
        if not idle:
            if now:
                end_at_once(work, meant, busy)
            else:
                ask_to_stop(busy)
            waited = threading.Event()
            with stderr.status("waiting for the step to end and the checkpoint to be written"):
                while at_work(work, meant):
                    waited.wait(POLL_SECONDS)
            meant = find_run(work, meant.id) if meant is not None else None
    from pathlib import Path

    beat = read_beat(Path(meant.folder)) if meant is not None else None
    state = "not running" if idle else "killed" if now else "stopped"
    if json:
        print_json(
            {
                "state": state,
                "run": meant.id if meant else None,
                "run_state": meant.state if meant else None,
                "done": beat.done if beat else None,
                "total": beat.total if beat else None,
            }
        )
        return
    if idle:
        what = f"run {meant.id} is {meant.state}" if run is not None and meant is not None else "nothing runs"
        stdout.print(f"{what}: there is nothing to stop", highlight=False)
        return
    how_far = f" after step {beat.done:.0f} of {beat.total:.0f}" if beat and beat.total > 1 else ""
    stdout.print(f"{state}{how_far}; the same command goes on from the last checkpoint", highlight=False)
