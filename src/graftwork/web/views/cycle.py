"""The training cycle: where it is, what waits for a person, what was decided, the last cycles."""

import shlex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.cycle import find_waiting_step, list_controls, read_cycle
from graftwork.web.rendering import project_of, render

SECTION = "/cycle"
SIGNS = {"done": "✓", "running": "▶", "failed": "✗", "skipped": "–", "waiting": "·"}
STATES = {
    "done": "fresh",
    "running": "running",
    "failed": "refused",
    "skipped": "missing",
    "waiting": "waiting",
}
"""The look of a step, as in the pipeline of the first screen."""
LONGEST = 64


def index(request: Request) -> Response:
    project = project_of(request)
    status, settings = read_cycle(project), project.settings.cycle
    state = status.state
    return render(
        request,
        "cycle.html.jinja",
        title="Cycle",
        section=SECTION,
        status=status,
        state=state,
        cycle=state.cycle,
        settings=settings,
        waits_for=find_waiting_step(state, settings),
        controls=list_controls(state),
        signs=SIGNS,
        states=STATES,
        facts_of=facts_of,
        begins=describe_triggers(settings),
        command=control_command,
    )


def facts_of(summary: dict[str, Any]) -> str:
    """What a step came to, in one line."""
    return ", ".join(f"{name} {_short(value)}" for name, value in summary.items() if value not in ("", None))


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    text = str(value)
    return text[:12] if len(text) == LONGEST else text


def describe_triggers(settings: Any) -> list[str]:
    """When a cycle begins by itself."""
    found = []
    if settings.schedule:
        found.append(f"at the times of {settings.schedule} ({settings.timezone})")
    if settings.when.new_rows is not None:
        found.append(f"after {settings.when.new_rows:,} new rows")
    if settings.when.drift is not None:
        found.append(f"when {settings.when.drift:.0%} of the live prompts are unlike the training prompts")
    return found


def control_command(action: str, *arguments: str) -> str:
    return shlex.join(["graft", "up", action, *arguments, "--reason", "…"])


ROUTES = [Route("/cycle", index)]
