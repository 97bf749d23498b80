"""`graft logs`: what a run did, as it happens."""

import json as json_text
import sys
import threading
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from graftwork.pipeline.open_project import OpenProject
    from graftwork.pipeline.runs import Event
    from graftwork.store.runs import RunEntry

Run = Annotated[str | None, typer.Option("--run", help="Id of the run, or its beginning.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends; exit with its code.")]
Vitals = Annotated[
    bool, typer.Option("--vitals", help="Show the machine's figures too (always with --json).")
]
POLL_SECONDS = 0.3


def logs(
    project: Folder = None,
    run: Run = None,
    follow: Follow = False,
    vitals: Vitals = False,
    json: Json = False,
) -> None:
    """Steps, words, checkpoints, looks, alerts and the worker's output, in the order of time.

    With --json one object a line: `at`, `kind` and what belongs to it.

    Example:  graft logs -f
    """
    from pathlib import Path

    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.runs import Events, find_run
    from graftwork.project.load import open_project
    from graftwork.records.errors import UserMistake

    with use_project(open_project(project), NullReporter()) as work:
        meant = find_run(work, run)
        if meant is None:
            raise UserMistake("there is no run yet", fix="`graft train` begins one")
        events, pause = Events(Path(meant.folder)), threading.Event()
        while True:
            # Asked first, read then: what was written before the end is read.
            over = not follow or _has_ended(work, meant)
            for event in events.new():
                _print(event, as_json=json, vitals=vitals)
            sys.stdout.flush()
            if over:
                break
            pause.wait(POLL_SECONDS)
        if follow:
            _say_end(work.runs.get(meant.id) or meant, as_json=json)


def _has_ended(work: "OpenProject", run: "RunEntry") -> bool:
    from graftwork.pipeline.runs import at_work

    # In this order: a run that ends says so before it lets go of its lock.
    busy = at_work(work, run)
    now = work.runs.get(run.id) or run
    return now.state == "done" or not busy


def _say_end(run: "RunEntry", *, as_json: bool) -> None:
    """How it ended; the exit code is the run's."""
    from graftwork.cli.output import stderr
    from graftwork.cli.show.tables import print_line, quote
    from graftwork.records.errors import EXIT_ENVIRONMENT, EXIT_RESUME_ME

    said = run.error or {}
    code = {"done": 0, "stopped": EXIT_RESUME_ME}.get(run.state, int(said.get("exit_code", EXIT_ENVIRONMENT)))
    ends = {"running": "nobody works on it any more; the same command goes on from its last checkpoint"}
    words = ends.get(run.state, str(said.get("what", "")))
    if not as_json:
        print_line(stderr, f"run [bold]{run.id}[/] is {run.state}" + (f": {quote(words)}" if words else ""))
    raise typer.Exit(code)


def _print(event: "Event", *, as_json: bool, vitals: bool) -> None:
    if as_json:
        sys.stdout.write(json_text.dumps(event.as_json(), ensure_ascii=False) + "\n")
        return
    if event.kind == "vital" and not vitals:
        return
    from graftwork.cli.output import stdout
    from graftwork.cli.show.events import to_markup
    from graftwork.cli.show.tables import print_line

    print_line(stdout, to_markup(event), soft_wrap=True)
