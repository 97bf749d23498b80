"""A folder without a project: a log is read, the bases are weighed for it, and graft.yaml is written."""

import shlex
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api.project import has_project, init_project, propose_project
from graftwork.records.errors import UserError
from graftwork.views.plan import view_bases
from graftwork.web.actions import ActionForm, log_action, read_fields, require_allowed
from graftwork.web.rendering import address, render, who_of

LONGEST_PATH = 1000


def show(request: Request) -> Response:
    if has_project(request.app.state.root):
        return RedirectResponse("/", status_code=303)
    return _show(request, log="")


async def begin(request: Request) -> Response:
    """Weigh the bases for the log that the form names; once a base is chosen, write graft.yaml."""
    fields = await read_fields(request)
    log, base = (fields.get(name, "").strip()[:LONGEST_PATH] for name in ("log", "base"))
    return await run_in_threadpool(lambda: _begin(request, log, base))


def _begin(request: Request, log: str, base: str) -> Response:
    require_allowed(request)
    root: Path = request.app.state.root
    if not log or not log.isprintable():
        raise UserError("the log is missing", fix="go back and enter the path of a log file")
    try:
        path = str(root / Path(log).expanduser())
    except RuntimeError as error:
        raise UserError(str(error), fix="go back and enter the path of a log file") from error
    if not base:
        return _show(request, log=log, path=path)
    form = ActionForm(init_project(root, [path], base=base), who_of(request), {})
    log_action(form, "init", _command(path, base), outcome="graft.yaml was written")
    return RedirectResponse(address("/", notice="graft.yaml was written"), status_code=303)


def _show(request: Request, *, log: str, path: str = "") -> Response:
    proposed = propose_project(request.app.state.root, [path]) if path else None
    bases = proposed.bases if proposed is not None else None
    return render(
        request,
        "start.html.jinja",
        title="New project",
        section="/",
        log=log,
        proposed=proposed,
        table=view_bases(bases, base=proposed.base) if proposed is not None and bases is not None else None,
        bases=[option.base for option in bases.options if option.refused is None] if bases else [],
        command=_command(log or "LOG", ""),
    )


def _command(log: str, base: str) -> str:
    return shlex.join(["graft", "init", log, *(["--base", base] if base else [])])


ROUTES = [
    Route("/start", show),
    Route("/start", begin, methods=["POST"]),
]
