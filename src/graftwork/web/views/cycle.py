"""The training cycle: where it is, what waits for a person, what was decided, the last cycles."""

import shlex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.cycle import find_waiting_step, list_controls, read_cycle
from graftwork.views.cycle import list_cycles, list_facts
from graftwork.views.document import Document
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
        facts_of=list_facts,
        history=Document("Last cycles", [list_cycles(status.history)]),
        begins=describe_triggers(settings),
        command=control_command,
    )


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
