"""`graft up`: the coordinator that trains again when it is due, and what people ask of it."""

from typing import TYPE_CHECKING, Annotated

import typer

from graftwork.cli.command import Folder, opened, print_record, reporting
from graftwork.cli.output import Json

if TYPE_CHECKING:
    from graftwork.pipeline.cycle.session import ControlAction

app = typer.Typer(invoke_without_command=True)

Why = Annotated[str, typer.Option("--reason", help="The reason, recorded with your name.")]
Who = Annotated[
    str | None, typer.Option("--as", help="Your name in the log. Default: the user of this machine.")
]


@app.callback()
def up(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="Run one cycle now, or finish the open one, and exit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is due and what a cycle would do. Starts nothing.")
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Run the training cycle: collect, data, plan, train, evaluate, gate, release, canary, promote, deliver.

    A cycle starts on `cycle.schedule`, when `cycle.when` holds, or with --once. It survives `kill -9`: the
    same command resumes at the step where it stopped. Two coordinators on one database run no step twice.

    Example:  graft up --once
    """
    if context.invoked_subcommand is not None:
        return
    if once and dry_run:
        raise typer.BadParameter("choose one of --once and --dry-run")
    if dry_run:
        from graftwork.pipeline.cycle.session import plan_cycle

        with opened(project) as work:
            print_record(plan_cycle(work), as_json=json)
    elif once:
        _run_once(project, as_json=json)
    else:
        from graftwork.pipeline.cycle.session import run_forever

        with reporting(project) as found, found.open() as work:
            run_forever(work)


def _run_once(project: Folder, *, as_json: bool) -> None:
    from graftwork.pipeline.cycle.session import run_once
    from graftwork.records.errors import EXIT_ANSWER_IS_NO

    with reporting(project, tables=not as_json) as found, found.open() as work:
        ended = run_once(work)
    print_record(ended, as_json=as_json)
    raise typer.Exit(0 if ended.outcome in ("promoted", "nothing_new") else EXIT_ANSWER_IS_NO)


@app.command("status")
def status(project: Folder = None, json: Json = False) -> None:
    """Show the open cycle, its steps, what comes next, and the last cycles.

    Example:  graft up status
    """
    from graftwork.pipeline.cycle.session import read_status

    with opened(project) as work:
        print_record(read_status(work), as_json=json)


@app.command("week")
def week(
    once: Annotated[bool, typer.Option("--once", help="Do what is due now, and exit.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be started now, and what comes next.")
    ] = False,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Follow the plan of the week: start each session at its place, judge what is trained, plan again.

    Reads `week.json`, which `graft plan week --out week.json` writes, and keeps it up to date. Sessions run
    at several places at once. A session that a place refuses, that is preempted or ends early is planned
    around. Killed and started again, it goes on; jobs run on meanwhile.

    Example:  graft up week --dry-run
    """
    from graftwork.pipeline.cycle.week_desk import follow_once, follow_week, week_status

    if once and dry_run:
        raise typer.BadParameter("choose one of --once and --dry-run")
    if dry_run:
        with opened(project) as work:
            print_record(week_status(work), as_json=json)
        return
    with reporting(project, tables=not json) as found, found.open() as work:
        done = follow_once(work) if once else follow_week(work)
    print_record(done, as_json=json)


@app.command("begin")
def begin(reason: Why = "", who: Who = None, project: Folder = None, json: Json = False) -> None:
    """Ask the running coordinator to start a cycle now, regardless of the schedule.

    Example:  graft up begin --reason "new teacher answers"
    """
    _decide("begin", reason, who, project, as_json=json)


@app.command("pause")
def pause(reason: Why = "", who: Who = None, project: Folder = None, json: Json = False) -> None:
    """Pause the coordinator: the running step finishes, and no other starts.

    Example:  graft up pause --reason "the card is needed"
    """
    _decide("pause", reason, who, project, as_json=json)


@app.command("resume")
def resume(reason: Why = "", who: Who = None, project: Folder = None, json: Json = False) -> None:
    """Resume a paused coordinator.

    Example:  graft up resume
    """
    _decide("resume", reason, who, project, as_json=json)


@app.command("cancel")
def cancel(reason: Why = "", who: Who = None, project: Folder = None, json: Json = False) -> None:
    """Cancel the open cycle. A running step stops at its next safe point; what it has saved is kept.

    Example:  graft up cancel --reason "wrong data"
    """
    _decide("cancel", reason, who, project, as_json=json)


@app.command("approve")
def approve(
    step: Annotated[
        str | None, typer.Argument(help="The step to allow. Default: the one that waits.")
    ] = None,
    reason: Why = "",
    who: Who = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Approve a step of the open cycle that waits for a person (`cycle.approve`).

    Example:  graft up approve promote --reason "looked at the report"
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.cycle.session import approve_step

    with opened(project) as work:
        state = approve_step(work, step, why=reason, who=who)
    given = state.log[-1]
    if json:
        print_json(given)
    else:
        stdout.print(f"{given.what} is approved by {given.who}", highlight=False, markup=False)


def _decide(action: "ControlAction", reason: str, who: str | None, project: Folder, *, as_json: bool) -> None:
    from graftwork.cli.output import print_json, stdout
    from graftwork.pipeline.cycle.session import decide

    with opened(project) as work:
        state = decide(work, action, why=reason, who=who)
    done = {"begin": "requested", "pause": "paused", "resume": "resumed", "cancel": "canceled"}[action]
    if as_json:
        print_json(state.log[-1])
    else:
        stdout.print(f"{done} by {state.log[-1].who}", highlight=False, markup=False)
