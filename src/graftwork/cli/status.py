"""`graft status`: how the project stands, and whether a run is stuck."""

from typing import TYPE_CHECKING

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graftwork.cli.show.tables import PlainTable
    from graftwork.pipeline.status import EndpointStanding, Next, RunStanding, Standing

COLOURS = {"working": "green", "starting": "cyan", "slow": "yellow", "stuck": "red", "gone": "red"}


def status(project: Folder = None, json: Json = False) -> None:
    """Show each step (fresh, stale or missing), what `graft run` would do, runs, endpoint and live release.

    Nothing is started: a stale step names the change, and its time is the plan's or that of the last time.

    Example:  graft status --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import fit_words, print_line, quote
    from graftwork.evaluate.wording import plural
    from graftwork.pipeline.open_project import use_project
    from graftwork.pipeline.reporter import NullReporter
    from graftwork.pipeline.status import standing
    from graftwork.project.load import open_project

    with use_project(open_project(project), NullReporter()) as work:
        found = standing(work)
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


def _table_of_steps(found: "Standing") -> "PlainTable":
    from graftwork.cli.show.course import duration
    from graftwork.cli.show.tables import quote, table

    rows = table("step", "state", "because", "last done", "took", title=found.project, right=("took",))
    for state in found.steps:
        took = duration(state.seconds) if state.seconds is not None else ""
        done = (state.finished_at or "")[:19].replace("T", " ")
        rows.add_row(state.step, STATES[state.state], quote("; ".join(state.because)), done, took)
    return rows


def _print_next(coming: "Next") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.course import duration
    from graftwork.cli.show.tables import print_line

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


def _print_endpoint(endpoint: "EndpointStanding") -> None:
    from graftwork.cli.output import stdout
    from graftwork.cli.show.tables import print_line, quote

    colour = {"ok": "green", "starting": "cyan", "down": "red", "other": "yellow"}.get(endpoint.state, "dim")
    said = f"endpoint: {quote(endpoint.url)} is [{colour}]{quote(endpoint.state)}[/]"
    print_line(stdout, said + (f": {quote(endpoint.reason)}" if endpoint.reason else ""), soft_wrap=True)


def _table_of_runs(runs: "Sequence[RunStanding]") -> "PlainTable":
    """The run, its state, its last change, and between them what at least one run can say."""
    from graftwork.cli.show.course import duration
    from graftwork.cli.show.tables import table

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


def _step_times(run: "RunStanding") -> str:
    """What a step takes, and what the plan expected of it."""
    from graftwork.cli.show.course import duration

    if run.expected_step_seconds is None:
        return ""
    took = duration(run.measured_step_seconds) if run.measured_step_seconds is not None else "?"
    return f"{took} ({duration(run.expected_step_seconds)})"
