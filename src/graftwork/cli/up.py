"""`graft up`: be the coordinator, follow the week, or ask the running coordinator for something."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, cast

import typer

from graftwork.cli.command import Folder, opened, print_record, reporting
from graftwork.cli.output import Json, print_json, stdout
from graftwork.records.errors import EXIT_NEGATIVE_RESULT

if TYPE_CHECKING:
    from graftwork.cycle.session import ControlAction


class Action(StrEnum):
    """Requests to the coordinator."""

    status = "status"
    week = "week"
    begin = "begin"
    pause = "pause"
    resume = "resume"
    cancel = "cancel"
    approve = "approve"


def up(
    action: Annotated[
        Action | None,
        typer.Argument(help="What to request from the coordinator. Default: be the coordinator."),
    ] = None,
    step: Annotated[
        str | None,
        typer.Argument(help="With approve: the step to approve. Default: the one that is waiting."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Run one cycle now, or finish the open one, and exit.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what is due and what would be started. Starts nothing.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="The reason, recorded with your name.")] = "",
    who: Annotated[
        str | None, typer.Option("--as", help="Your name in the log. Default: the user of this machine.")
    ] = None,
    project: Folder = None,
    json: Json = False,
) -> None:
    """Run the training cycle: collect, data, plan, train, evaluate, gate, release, canary, promote, deliver.

    A cycle starts on `cycle.schedule`, when `cycle.when` holds, or with --once. It survives `kill -9`: the
    same command resumes at the step where it stopped. Two coordinators on one database run no step twice.

    `status` shows the open cycle, its steps, what comes next, and the last cycles. `begin` asks the running
    coordinator for a cycle now. `pause` lets the running step finish and starts no other; `resume` ends the
    pause. `cancel` ends the open cycle at its next safe point and keeps what is saved. `approve` allows a
    step that waits for a person (`cycle.approve`).

    `week` follows the plan that `graft plan week --out week.json` writes: it starts each session at its
    place, judges what is trained, and plans again around a session that a place refuses or ends early. --once
    does what is due now; --dry-run shows it. Killed and started again, it continues; jobs run on meanwhile.

    Example:  graft up --once
    Example:  graft up approve promote --reason "looked at the report"
    """
    if once and dry_run:
        raise typer.BadParameter("choose one of --once and --dry-run")
    if action not in (None, Action.week) and (once or dry_run):
        raise typer.BadParameter(f"--once and --dry-run cannot be combined with {action}")
    if step is not None and action is not Action.approve:
        raise typer.BadParameter("only `approve` takes a step")
    if action in (None, Action.status, Action.week) and (reason or who is not None):
        raise typer.BadParameter("--reason and --as need begin, pause, resume, cancel or approve")
    if action is Action.status:
        _show_status(project, as_json=json)
    elif action is Action.week:
        _follow_week(project, once=once, dry_run=dry_run, as_json=json)
    elif action is not None:
        _decide(action, step, reason, who, project, as_json=json)
    elif dry_run:
        from graftwork.cycle.session import plan_cycle

        with opened(project) as work:
            print_record(plan_cycle(work), as_json=json)
    elif once:
        _run_once(project, as_json=json)
    else:
        from graftwork.cycle.session import run_forever

        with reporting(project) as found, found.open() as work:
            run_forever(work)


def _run_once(project: Folder, *, as_json: bool) -> None:
    from graftwork.cycle.session import run_once

    with reporting(project, tables=not as_json) as found, found.open() as work:
        ended = run_once(work)
    print_record(ended, as_json=as_json)
    raise typer.Exit(0 if ended.outcome in ("promoted", "nothing_new") else EXIT_NEGATIVE_RESULT)


def _show_status(project: Folder, *, as_json: bool) -> None:
    from graftwork.cycle.session import read_status

    with opened(project) as work:
        print_record(read_status(work), as_json=as_json)


def _follow_week(project: Folder, *, once: bool, dry_run: bool, as_json: bool) -> None:
    from graftwork.week.follow import follow_once, follow_week, week_status

    if dry_run:
        with opened(project) as work:
            print_record(week_status(work), as_json=as_json)
        return
    with reporting(project, tables=not as_json) as found, found.open() as work:
        done = follow_once(work) if once else follow_week(work)
    print_record(done, as_json=as_json)


def _decide(
    action: Action, step: str | None, reason: str, who: str | None, project: Folder, *, as_json: bool
) -> None:
    from graftwork.cycle import session

    with opened(project) as work:
        if action is Action.approve:
            state = session.approve_step(work, step, why=reason, who=who)
        else:
            state = session.decide(work, cast("ControlAction", action.value), why=reason, who=who)
    entry = state.log[-1]
    done = {"begin": "requested", "pause": "paused", "resume": "resumed", "cancel": "canceled"}
    if as_json:
        print_json(entry)
    else:
        what = done.get(action, f"{entry.what} is approved")
        stdout.print(f"{what} by {entry.who}", highlight=False, markup=False)
