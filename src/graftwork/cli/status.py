"""`graft status`: how the project stands, and whether a run is stuck."""

from typing import TYPE_CHECKING

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graftwork.cli.show.tables import PlainTable
    from graftwork.coordinate.health import RunStanding

COLOURS = {"working": "green", "starting": "cyan", "slow": "yellow", "stuck": "red", "gone": "red"}


def status(project: Folder = None, json: Json = False) -> None:
    """What was done, what runs and how it feels, what is live.

    Example:  graft status --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import fit_words, print_line, quote, table
    from graftwork.coordinate.health import standing
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.workplace import open_workplace
    from graftwork.evaluate.wording import plural
    from graftwork.project.folder import open_project

    with open_workplace(open_project(project), Silent()) as work:
        found = standing(work)
    if json:
        print_json(found)
        return
    steps = table("step", "what it does", "last done", "took", title=found.project, right=("took",))
    for one in found.steps:
        took = f"{one.seconds:.1f} s" if one.seconds is not None else ""
        steps.add_row(
            one.step, one.title, (one.finished_at or "")[:19].replace("T", " ") or "[dim]not yet[/]", took
        )
    stdout.print(steps)
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
    if found.working:
        stdout.print("[cyan]somebody is working on this project now[/]", highlight=False)


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
