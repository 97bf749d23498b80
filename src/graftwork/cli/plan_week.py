"""`graft plan week`: who trains when and where, over quotas, windows and a budget."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from graftwork.cli.command import Folder
from graftwork.cli.output import Json


def week(
    project: Folder = None,
    scenario: Annotated[
        Literal["auto", "sequential", "parallel", "iterative"] | None,
        typer.Option(
            "--scenario",
            help="Main model first, all at once, or specialists that move to the main model's adapter later. "
            "auto compares them. Default: that of --keep, otherwise the one in graft.yaml.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, help="How long to search for a better plan.")
    ] = 30.0,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Threads of the solver.")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out what would change the plan most.")
    ] = False,
    start: Annotated[
        datetime | None,
        typer.Option(
            "--start", formats=["%Y-%m-%d"], help="A day of the week to plan. Default: the next week."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Plan with this place only. Repeatable.")
    ] = None,
    now: Annotated[
        datetime | None,
        typer.Option(
            "--now",
            formats=["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M%z", "%Y-%m-%dT%H:%M:%S%z"],
            help="Plan from this time on; without an offset, in the zone of the week.",
        ),
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="An earlier plan: what has begun in it is kept.")
    ] = None,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", help="What happened, as JSON, or @FILE with one event per line. Repeatable."),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            "--compare", help="Sessions planned by hand (JSON): what they are worth, and what they break."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the plan as JSON, for --keep.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the plan as a page.")] = None,
    ical: Annotated[
        Path | None, typer.Option("--ical", help="Write sessions that are started by hand as a calendar.")
    ] = None,
    json: Json = False,
) -> None:
    """Plan a week of training over the quotas, windows, sessions and prices of all places.

    Exit code 1: no week keeps every rule; the smallest set of rules that conflict is named.

    Example:  graft plan week --scenario sequential --ical manual.ics --json | jq .value,.gap
    """
    from graftwork.cli.output import print_json, stderr, stdout
    from graftwork.pipeline.week import WeekRequest, plan_project_week, read_events, read_schedule
    from graftwork.pipeline.week_files import compare_proposal, write_files
    from graftwork.plan.week.problem import Effort
    from graftwork.project.load import open_project

    found = open_project(project)
    earlier = read_schedule(keep) if keep else None
    usual = earlier.scenario if earlier is not None else found.settings.plan.week.scenario
    asked = WeekRequest(
        effort=Effort(
            seconds=seconds,
            workers=workers,
            scenario=scenario or usual,
            what_if=not quick,
        ),
        start=start.date() if start else None,
        only=tuple(only or ()),
        now=now,
        earlier=earlier,
        events=read_events(event or ()),
    )
    with stderr.status(f"planning the week: about {seconds * (1 if quick else 1.7):.0f} s"):
        schedule = plan_project_week(found, asked)
        proposal = compare_proposal(found, asked, schedule, compare) if compare else None
    write_files(schedule, out=out, html=html, ical=ical)
    if json:
        body = schedule.model_dump(mode="json")
        print_json({**body, "proposal": proposal.model_dump(mode="json")} if proposal else body)
        return
    from graftwork.cli.show.week import show_week

    show_week(stdout, schedule, proposal)
