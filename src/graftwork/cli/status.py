"""`graft status`: how the project stands, and whether a run is stuck."""

from graftwork.cli.output import Json
from graftwork.cli.steps import Folder

COLOURS = {"working": "green", "starting": "cyan", "slow": "yellow", "stuck": "red", "gone": "red"}


def status(project: Folder = None, json: Json = False) -> None:
    """What was done, what runs and how it feels, what is live.

    Example:  graft status --json
    """
    from graftwork.cli.output import print_json, stdout
    from graftwork.cli.show.tables import table
    from graftwork.coordinate.health import standing
    from graftwork.coordinate.narrator import Silent
    from graftwork.coordinate.workplace import open_workplace
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
        runs = table("run", "state", "health", "progress", "last change")
        for run in found.runs:
            health = f"[{COLOURS[run.health]}]{run.health}[/]: {run.reason}" if run.health else ""
            progress = f"{run.done:.0f}/{run.total:.0f}" if run.total else ""
            runs.add_row(run.id, run.state, health, progress, run.updated_at[:19].replace("T", " "))
        stdout.print(runs)
    live = ", ".join(f"{alias} → {to[:12]}" for alias, to in found.aliases.items()) or "nothing"
    stdout.print(f"live: {live}; {found.releases} releases, {found.captures} captures", highlight=False)
    if found.working:
        stdout.print("[cyan]somebody is working on this project now[/]", highlight=False)
