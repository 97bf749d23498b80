"""A project at a glance: its steps, what comes next, runs, releases, the endpoint, captures and drift."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graftwork.text.wording import duration, plural
from graftwork.views.document import Cell, Document, State, Table, quote
from graftwork.views.endpoint import view_shadow
from graftwork.views.week import summarize_week

if TYPE_CHECKING:
    from graftwork.pipeline.status import EndpointStatus, NextRun, ProjectStatus, RunStatus, StepState
    from graftwork.records.live import PromptDrift
    from graftwork.serve.captures import CaptureTotals

STEP_TONES = {"fresh": "green", "running": "cyan", "stale": "yellow", "missing": "dim", "not_due": "dim"}
HEALTH_TONES = {"working": "green", "starting": "cyan", "slow": "yellow", "stuck": "red", "gone": "red"}
ENDPOINT_TONES = {"ok": "green", "starting": "cyan", "down": "red", "other": "yellow"}


def view_project_status(status: "ProjectStatus") -> Document:
    viewed = Document(f"Project {quote(status.project)}")
    viewed.add(_list_steps(status.steps, title=quote(status.project)))
    viewed.line(_say_next(status.next, status.steps))
    if status.runs:
        viewed.add(list_runs(status.runs), list_devices(status.runs))
    for run in status.runs:
        if run.health:
            health = f"[{HEALTH_TONES[run.health]}]{run.health}[/]"
            viewed.line(f"run {run.id} is {health}: {quote(run.reason)}")
    live = (
        ", ".join(f"{alias} → {release_id[:12]}" for alias, release_id in status.aliases.items()) or "nothing"
    )
    counts = f"{plural(status.releases, 'release')}, {plural(status.captures, 'capture')}"
    viewed.line(f"live: {quote(live)}; {counts}", _say_endpoint(status.endpoint), wrap=False)
    viewed.line(*_say_captures(status.capture_totals))
    viewed.add(view_drift(status.drift), None if status.shadow is None else view_shadow(status.shadow))
    if status.week is not None:
        viewed.line(*summarize_week(status.week), wrap=False)
    if status.working:
        viewed.line("[cyan]another process is working on this project[/]")
    return viewed


def _list_steps(steps: "Sequence[StepState]", *, title: str) -> Table:
    rows = [
        (
            step.step,
            State(step.state.replace("_", " "), STEP_TONES.get(step.state, "")),
            quote("; ".join(step.because)),
            (step.finished_at or "")[:19].replace("T", " "),
            duration(step.seconds) if step.seconds is not None else "",
            duration(step.time.planned.value) if step.time is not None else "",
        )
        for step in steps
    ]
    right = ("took", "planned")
    return Table(("step", "state", "because", "last done", *right), rows, title, right)


def _say_next(following: "NextRun", steps: "Sequence[StepState]") -> str:
    running = next((state.step for state in steps if state.state == "running"), None)
    if running is not None:
        after = f"; not up to date after it: {', '.join(following.steps)}" if following.steps else ""
        return f"now: {running} is running{after}"
    if not following.steps:
        return f"next: everything is up to date; `{following.command}` has nothing to do"
    text = f"next: `{following.command}` would run {', '.join(following.steps)}"
    if following.seconds is not None:
        text += f", about {duration(following.seconds)}"
    if following.minutes is not None:
        low, high = following.minutes
        text += f" ({duration(low * 60)} to {duration(high * 60)})"
    return text


def list_runs(runs: "Sequence[RunStatus]") -> Table:
    """Runs with their state; columns that are empty for every run are left out."""
    columns: dict[str, list[Cell]] = {
        "run": [run.id for run in runs],
        "state": [run.state for run in runs],
        "health": [State(run.health, HEALTH_TONES[run.health]) if run.health else "" for run in runs],
        "progress": [f"{run.done:.0f}/{run.total:.0f}" if run.total > 1 else "" for run in runs],
        "step time (plan)": [_say_step_times(run) for run in runs],
        "time left": [duration(run.seconds_left) if run.seconds_left is not None else "" for run in runs],
        "last change": [run.updated_at[:19].replace("T", " ") for run in runs],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return Table(tuple(shown), list(zip(*shown.values(), strict=True)), no_wrap={0})


def list_devices(runs: "Sequence[RunStatus]") -> Table | None:
    """The GPUs of the runs that work now; None if there are none."""
    rows = [
        (
            run.id,
            f"{device.index} {quote(device.name)}",
            *(
                "" if value is None else f"{value:.{digits}f} {unit}"
                for value, digits, unit in (
                    (device.use_percent, 0, "%"),
                    (device.memory_gib, 1, "GiB"),
                    (device.temperature_c, 0, "°C"),
                    (device.power_watts, 0, "W"),
                )
            ),
        )
        for run in runs
        if run.state == "running" and run.vitals is not None
        for device in run.vitals.devices
    ]
    columns = ("run", "GPU", "use", "memory", "temperature", "power")
    return Table(columns, rows, right=columns[2:], no_wrap={0}) if rows else None


def _say_step_times(run: "RunStatus") -> str:
    """The measured time of a training step, and the planned one."""
    if run.expected_step_seconds is None:
        return ""
    measured = duration(run.measured_step_seconds) if run.measured_step_seconds is not None else "?"
    return f"{measured} ({duration(run.expected_step_seconds)})"


def _say_endpoint(endpoint: "EndpointStatus") -> str:
    tone = ENDPOINT_TONES.get(endpoint.state, "dim")
    reason = f": {quote(endpoint.reason)}" if endpoint.reason else ""
    return f"endpoint: {quote(endpoint.url)} is [{tone}]{quote(endpoint.state)}[/]{reason}"


def _say_captures(totals: "CaptureTotals | None") -> list[str]:
    lines = []
    if totals is not None and totals.journaled:
        lines.append(f"captures: {totals.journaled:,} wait in the journal for the database")
    if totals is not None and (totals.dropped or totals.lost):
        killed = f" ({totals.killed:,} when the endpoint was killed)" if totals.killed else ""
        text = f"{totals.lost:,} lost{killed}, {totals.dropped:,} dropped because the queue was full"
        lines.append(f"captures: [yellow]{text}[/], of {totals.offered:,}")
    return lines


def view_drift(drift: "PromptDrift") -> Document:
    viewed = Document("Drift")
    if drift.all is None:
        viewed.line(*([f"drift: not measured, {quote(drift.why_not)}"] if drift.dataset else []))
        return viewed
    share = drift.all
    viewed.line(
        f"drift: {share.unlike:,} of {share.prompts:,} live prompts ({share.share:.0%}, {share.low:.0%} to "
        f"{share.high:.0%}) are unlike any training prompt; {drift.expected:.0%} would be without drift"
    )
    for group in drift.by_group:
        if group.low > drift.expected:
            viewed.line(
                f"  nearest to {quote(group.group)}: {group.unlike:,} of {group.prompts:,} "
                f"({group.share:.0%}, {group.low:.0%} to {group.high:.0%})"
            )
    viewed.line(f"  [{'yellow' if drift.due else 'dim'}]{quote(drift.reason)}[/]")
    return viewed
