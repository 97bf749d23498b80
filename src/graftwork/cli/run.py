"""`graft run`: the whole way."""

import json as json_text
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json
from graftwork.cli.train import Detach

if TYPE_CHECKING:
    from graftwork.pipeline.preflight import Preflight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graftwork.cli.show.tables import PlainTable
    from graftwork.pipeline.status import EndpointStatus, NextRun, ProjectStatus, RunStatus

if TYPE_CHECKING:
    from graftwork.pipeline.open_project import OpenProject
    from graftwork.pipeline.runs import Event
    from graftwork.store.runs import RunEntry


def run(
    project: Folder = None,
    detach: Detach = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Stop before training: try every metric and rule, estimate every stage. Exit 2: an error.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """From logs to a served, gated adapter. What has not changed is not done again.

    Before it trains, it tries every metric on the log's own replies and on spoiled ones, proves that each
    rule can pass and can fail, and estimates each stage: `--dry-run` stops there.

    Example:  graft run -C examples/cited_answers
    """
    if dry_run:
        _show_ahead(project, as_json=json)
        return
    if detach:
        from graftwork.cli.command import start_detached

        start_detached("run", project=project, model=None, as_json=json)
        return
    from graftwork.cli.command import run_upto
    from graftwork.cli.output import print_json, stdout
    from graftwork.records.verdict import Verdict

    _tell_plan(project)
    made = run_upto(None, project=project, tables=not json)
    verdict = made.get("gate", Verdict)
    if json:
        print_json({name: output.model_dump(mode="json") for name, output in made.outputs.items()})
    else:
        stdout.print(f"[bold]{verdict.decision}[/]: {verdict.reason}", highlight=False)
        report = getattr(made.outputs.get("report"), "path", None)
        stdout.print(f"the whole story: {report}", highlight=False)
    raise typer.Exit(verdict.exit_code)


def _tell_plan(project: Folder) -> None:
    """How long it will take, on standard error. What is wrong with the project the run itself says."""
    from graftwork.cli.command import whole_run
    from graftwork.cli.output import stderr
    from graftwork.cli.show import show
    from graftwork.records.errors import GraftError

    try:
        show(stderr, whole_run(project))
    except GraftError:
        return


def look_ahead(project: Path | None) -> "Preflight":
    """Audit, prepare and plan; then everything that can be checked before training."""
    from graftwork.cli.progress import RichReporter
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.table import dry_run
    from graftwork.process.worker import stoppable
    from graftwork.project.load import open_project

    opened = open_project(project)
    with stoppable(), RichReporter(tables=False) as reporter, use_project(opened, reporter) as work:
        return dry_run(work)


def _show_ahead(project: Path | None, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.plan import show_preflight
    from graftwork.records.errors import EXIT_USER_MISTAKE

    found = look_ahead(project)
    if as_json:
        print_json(found)
    else:
        show_preflight(stdout, found)
    raise typer.Exit(EXIT_USER_MISTAKE if found.errors else 0)


COLOURS = {"working": "green", "starting": "cyan", "slow": "yellow", "stuck": "red", "gone": "red"}


def status(project: Folder = None, json: Json = False) -> None:
    """Show each step (fresh, stale or missing), what `graft run` would do, runs, endpoint and live release.

    Nothing is started: a stale step names the change, and its time is the plan's or that of the last time.

    Example:  graft status --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import fit_words, print_line, quote
    from graftwork.grading.metrics import plural
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.status import project_status
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter()) as work:
        found = project_status(work)
    if json:
        print_json(found)
        return
    stdout.print(_table_of_steps(found))
    _print_next(found.next)
    if found.runs:
        stdout.print(fit_words(stdout, _table_of_runs(found.runs)))
        for run in found.runs:
            if run.health:
                reason = f"run {run.id} is [{COLOURS[run.health]}]{run.health}[/]: {quote(run.reason)}"
                print_line(stdout, reason)
    live = ", ".join(f"{alias} → {to[:12]}" for alias, to in found.aliases.items()) or "nothing"
    stdout.print(
        f"live: {live}; {plural(found.releases, 'release')}, {plural(found.captures, 'capture')}",
        highlight=False,
    )
    _print_endpoint(found.endpoint)
    if found.working:
        stdout.print("[cyan]somebody is working on this project now[/]", highlight=False)


STATES = {
    "fresh": "[green]fresh[/]",
    "stale": "[yellow]stale[/]",
    "missing": "[dim]missing[/]",
    "not_due": "[dim]not due[/]",
}


def _table_of_steps(found: "ProjectStatus") -> "PlainTable":
    from graftwork.cli.show.tables import quote, table
    from graftwork.cli.show.training import duration

    rows = table("step", "state", "because", "last done", "took", title=found.project, right=("took",))
    for state in found.steps:
        took = duration(state.seconds) if state.seconds is not None else ""
        done = (state.finished_at or "")[:19].replace("T", " ")
        rows.add_row(state.step, STATES[state.state], quote("; ".join(state.because)), done, took)
    return rows


def _print_next(coming: "NextRun") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line
    from graftwork.cli.show.training import duration

    if not coming.steps:
        print_line(stdout, f"next: everything is up to date; `{coming.command}` would do nothing")
        return
    said = f"next: `{coming.command}` would do {', '.join(coming.steps)}"
    if coming.seconds is not None:
        said += f", about {duration(coming.seconds)}"
    if coming.minutes is not None:
        low, high = coming.minutes
        said += f" ({duration(low * 60)} to {duration(high * 60)})"
    print_line(stdout, said)


def _print_endpoint(endpoint: "EndpointStatus") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote

    colour = {"ok": "green", "starting": "cyan", "down": "red", "other": "yellow"}.get(endpoint.state, "dim")
    said = f"endpoint: {quote(endpoint.url)} is [{colour}]{quote(endpoint.state)}[/]"
    print_line(stdout, said + (f": {quote(endpoint.reason)}" if endpoint.reason else ""), soft_wrap=True)


def _table_of_runs(runs: "Sequence[RunStatus]") -> "PlainTable":
    """The run, its state, its last change, and between them what at least one run can say."""
    from graftwork.cli.show.tables import table
    from graftwork.cli.show.training import duration

    columns = {
        "run": [run.id for run in runs],
        "state": [run.state for run in runs],
        "health": [f"[{COLOURS[run.health]}]{run.health}[/]" if run.health else "" for run in runs],
        "progress": [f"{run.done:.0f}/{run.total:.0f}" if run.total > 1 else "" for run in runs],
        "a step (plan)": [_step_times(run) for run in runs],
        "time left": [duration(run.seconds_left) if run.seconds_left is not None else "" for run in runs],
        "last change": [run.updated_at[:19].replace("T", " ") for run in runs],
    }
    told = {name: cells for name, cells in columns.items() if any(cells)}
    rows = table(*told)
    rows.columns[0].no_wrap = True
    for cells in zip(*told.values(), strict=True):
        rows.add_row(*cells)
    return rows


def _step_times(run: "RunStatus") -> str:
    """What a step takes, and what the plan expected of it."""
    from graftwork.cli.show.training import duration

    if run.expected_step_seconds is None:
        return ""
    took = duration(run.measured_step_seconds) if run.measured_step_seconds is not None else "?"
    return f"{took} ({duration(run.expected_step_seconds)})"


RunId = Annotated[str | None, typer.Option("--run", help="Id of the run, or its beginning.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends; exit with its code.")]
Vitals = Annotated[
    bool, typer.Option("--vitals", help="Show the machine's figures too (always with --json).")
]
POLL_SECONDS = 0.3


def logs(
    project: Folder = None,
    run: RunId = None,
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
    from graftwork.pipeline.runs import find_processes

    # In this order: a run that ends says so before it lets go of its lock.
    busy = find_processes(work, run)
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
    from graftwork.cli.show.tables import print_line
    from graftwork.cli.show.training import to_markup

    print_line(stdout, to_markup(event), soft_wrap=True)


RunToStop = Annotated[str | None, typer.Option("--run", help="Id of the run, or its beginning.")]
Now = Annotated[bool, typer.Option("--now", help="Kill it; what came after the last checkpoint is lost.")]
STOP_POLL_SECONDS = 0.2


def stop(project: Folder = None, run: RunToStop = None, now: Now = False, json: Json = False) -> None:
    """Stop what works on this project: it writes a checkpoint first and can be gone on with.

    Example:  graft stop
    """
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.runs import ask_to_stop, end_at_once, find_processes, find_run
    from graftwork.process.heartbeat import read_beat
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter()) as work:
        meant = find_run(work, run)
        busy = find_processes(work, meant)
        idle = not busy or (run is not None and meant is not None and meant.state != "running")
        if not idle:
            if now:
                end_at_once(work, meant, busy)
            else:
                ask_to_stop(busy)
            waited = threading.Event()
            with stderr.status("waiting for the step to end and the checkpoint to be written"):
                while find_processes(work, meant):
                    waited.wait(STOP_POLL_SECONDS)
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
