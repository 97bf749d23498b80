"""`graft run`, `status`, `logs` and `stop`: run the pipeline and follow it; `worker`: a program does so."""

import json as json_text
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Detach, Folder, RunId, opened, print_record, reporting, start_detached
from graftwork.cli.output import Json, print_json, stderr, stdout
from graftwork.records.errors import (
    EXIT_ENVIRONMENT,
    EXIT_RESUME,
    EXIT_USER_ERROR,
    GraftError,
    UserError,
)
from graftwork.views.document import quote
from graftwork.views.terminal import print_document, print_line

if TYPE_CHECKING:
    from graftwork.api.project import Project
    from graftwork.project.open_project import OpenProject
    from graftwork.store.runs import RunEntry
    from graftwork.train.runs import Event


def run(
    project: Folder = None,
    detach: Detach = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Stop before training: try metrics and rules, and estimate every step. Exit code 2 "
            "means an error.",
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Train on a part of the rows and evaluate a part of the cases, in minutes. Never released.",
        ),
    ] = False,
    base: Annotated[
        list[str] | None,
        typer.Option(
            "--base",
            help="With --quick, two or three times: compare these bases on the same rows and cases.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run the whole pipeline, from logs to a gated, served adapter. Steps that are up to date are skipped.

    Before training, every metric is tried on replies from the log and on corrupted ones, each rule is shown
    to be able to pass and to fail, and every step is estimated. `--dry-run` stops there. `--quick` shows in
    minutes whether the base learns the task; gate, release and report are left out. With `--base`, bases are
    compared; graft.yaml stays as it is.

    Example:  graft run -C examples/cited_answers
    """
    if quick and dry_run:
        raise typer.BadParameter("--dry-run estimates the whole run: leave --quick out")
    if base and (dry_run or not quick):
        raise UserError(
            "--base is about a quick trial",
            why="a whole run has the base of graft.yaml",
            fix="add --quick and leave --dry-run out, or set `base` in graft.yaml",
            where="--base",
        )
    if dry_run:
        with reporting(project) as opened_project:
            checked = opened_project.dry_run()
        print_record(checked, as_json=json)
        raise typer.Exit(EXIT_USER_ERROR if checked.errors else 0)
    if quick and detach:
        raise typer.BadParameter("--quick takes minutes and runs here: leave --detach out")
    if detach:
        start_detached("run", project=project, model=None, as_json=json)
        return
    if base:
        with reporting(project, tables=not json) as opened_project:
            compared = opened_project.compare_bases(base)
        print_record(compared, as_json=json)
        return
    if quick:
        _run_quick(project, as_json=json)
        return
    from graftwork.data.project import PreparedData
    from graftwork.records.report import Verdict
    from graftwork.views.dataset import view_unread

    with reporting(project, tables=not json) as found:
        _show_estimate(found)
        made = found.run()
    verdict = made.get("gate", Verdict)
    prepared = made.get("prepare", PreparedData)
    if json:
        print_json({name: output.model_dump(mode="json") for name, output in made.outputs.items()})
    else:
        stdout.print(f"[bold]{verdict.decision}[/]: {verdict.reason}", highlight=False)
        report = getattr(made.outputs.get("report"), "path", None)
        stdout.print(f"report: {report}", highlight=False)
    print_document(stderr, view_unread(Path(prepared.folder), prepared.dataset))
    raise typer.Exit(verdict.exit_code)


def _run_quick(project: Path | None, *, as_json: bool) -> None:
    from graftwork.evaluate.project import Evaluated
    from graftwork.records.run import TrainOutcome

    with reporting(project, tables=not as_json) as found:
        done = found.run_quick()
    evaluated, outcome = done.get("evaluate", Evaluated), done.get("train", TrainOutcome)
    if as_json:
        print_json({name: output.model_dump(mode="json") for name, output in done.outputs.items()})
        return
    print_line(stdout, f"run [bold]{quote(outcome.run_id)}[/], {quote(evaluated.report.remarks[0])}")


def _show_estimate(project: "Project") -> None:
    """Print the estimated time to standard error if there is anything to do.

    The run itself reports errors.
    """
    from graftwork.views.terminal import show

    try:
        planned = project.plan_run()
    except GraftError:
        return
    if planned.minutes.value:
        show(stderr, planned)


def status(project: Folder = None, json: Json = False) -> None:
    """Show completed steps, the running job and its health, the endpoint and the live release.

    Each step is fresh, stale or missing; a stale step names what changed. Nothing is started.

    Example:  graft status --json
    """
    from graftwork.api.project import open_project

    print_record(open_project(project).status(), as_json=json)


Follow = Annotated[
    bool, typer.Option("--follow", "-f", help="Follow until the run ends, and exit with its code.")
]
Vitals = Annotated[
    bool, typer.Option("--vitals", help="Also show memory, CPU and GPU use (always with --json).")
]
POLL_SECONDS = 0.2


def logs(
    project: Folder = None,
    run: RunId = None,
    follow: Follow = False,
    vitals: Vitals = False,
    json: Json = False,
) -> None:
    """Show training steps, messages, checkpoints, evaluations, alerts and worker output in time order.

    With --json, each line is an object with `at`, `kind` and the fields of that kind.

    Example:  graft logs -f
    """

    from graftwork.train.runs import Events, find_run

    with opened(project) as work:
        if follow and run is None:
            _await_first_run(work)
        meant = find_run(work, run)
        if meant is None:
            raise UserError("there is no run yet", fix="`graft train` starts one")
        events, pause = Events(Path(meant.folder)), threading.Event()
        while True:
            # Checked before reading, so that everything written before the end is read.
            is_over = not follow or _has_ended(work, meant)
            for event in events.new():
                _print(event, as_json=json, vitals=vitals)
            sys.stdout.flush()
            if is_over:
                break
            pause.wait(POLL_SECONDS)
        if follow:
            _report_end(work.runs.get(meant.id) or meant, as_json=json)


def _await_first_run(work: "OpenProject") -> None:
    """Wait for a command that was just started in the background to register its run."""
    from graftwork.train.runs import find_processes

    pause = threading.Event()
    while find_processes(work, None) and not work.runs.list(limit=1):
        pause.wait(POLL_SECONDS)


def _has_ended(work: "OpenProject", run: "RunEntry") -> bool:
    from graftwork.train.runs import find_processes

    # In this order: a run records its end before it releases its lock.
    busy = find_processes(work, run)
    now = work.runs.get(run.id) or run
    return now.state == "done" or not busy


def _report_end(run: "RunEntry", *, as_json: bool) -> None:
    """Print how the run ended, and exit with its code."""

    error = run.error or {}
    code = {"done": 0, "stopped": EXIT_RESUME}.get(run.state, int(error.get("exit_code", EXIT_ENVIRONMENT)))
    ends = {"running": "its process is gone; run the same command again to resume from the last checkpoint"}
    reason = ends.get(run.state, str(error.get("what", "")))
    if not as_json:
        print_line(stderr, f"run [bold]{run.id}[/] is {run.state}" + (f": {quote(reason)}" if reason else ""))
    raise typer.Exit(code)


def _print(event: "Event", *, as_json: bool, vitals: bool) -> None:
    if as_json:
        sys.stdout.write(json_text.dumps(event.as_json(), ensure_ascii=False) + "\n")
        return
    if event.kind == "machine" and not vitals:
        return
    from graftwork.views.run import mark_up_event

    print_line(stdout, mark_up_event(event), soft_wrap=True)


Now = Annotated[bool, typer.Option("--now", help="Kill the run; work since the last checkpoint is lost.")]


def stop(project: Folder = None, run: RunId = None, now: Now = False, json: Json = False) -> None:
    """Stop the running work of this project. It writes a checkpoint first and can be resumed.

    Example:  graft stop
    """
    from graftwork.train.runs import stop_run

    with (
        opened(project) as work,
        stderr.status("waiting for the step to finish and the checkpoint to be written"),
    ):
        stopped = stop_run(work, run, now=now)
    print_record(stopped, as_json=json)


def worker(
    stdio: Annotated[
        bool, typer.Option("--stdio", help="Speak the protocol on standard input and output.")
    ] = False,
    packet: Annotated[
        int | None,
        typer.Option(
            "--packet",
            help="4: each message is preceded by its length in four bytes, like Erlang's {packet, 4}.",
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the protocol and exit.")
    ] = False,
) -> None:
    """Run one training job for another program, controlled by JSON messages.

    Without --packet, each message is a line. Closing standard input stops the run at its next checkpoint;
    the same start message resumes it there. `examples/elixir` has a client.

    Example:  echo '{"type":"start","v":1,"project":"."}' | graft worker --stdio
    """
    import json
    import sys

    if schema:
        from graftwork.api.stdio import protocol_schema

        sys.stdout.write(json.dumps(protocol_schema(), indent=2) + "\n")
        return
    if not stdio or packet not in (None, 4):
        raise typer.BadParameter(
            "use --stdio, with --packet 4 for binary framing; --schema prints the messages"
        )
    from graftwork.api.stdio import serve_stdio

    raise typer.Exit(serve_stdio("packet4" if packet == 4 else "lines"))
