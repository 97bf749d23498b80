"""What visitors may do with `graft ui --allow-actions`: each action is a command of the command line.

Input: a form with a reason. Output: the same as the command does, and a line in the log of actions with who
and why. Without `--allow-actions` every action is refused, and the page shows the command instead.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, quote

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api import cycle, datasets, endpoint, evaluations, fleet, releases, runs
from graftwork.api.overview import read_overview
from graftwork.api.project import Project, timestamp
from graftwork.files.disk import Journal, make_folder
from graftwork.records.base import Record
from graftwork.records.errors import Busy, GraftError, NegativeResult, UserError
from graftwork.text.wording import plural
from graftwork.web.rendering import LONGEST_NAME, WHO_COOKIE, address, project_of, render, who_of

LOG_FILE = "actions.jsonl"
LONGEST_REASON = 500
LONGEST_TEXT = 100_000
FORM_BYTES = 1_000_000
MOST_FIELDS = 50
SHOWN = 200
SMALL, LARGE = "adapter", "log"
"""The models of a forecast of escalation if the form names none."""


class ActionLine(Record):
    """A line of the log of actions."""

    at: str
    who: str
    action: str
    command: str
    why: str
    outcome: str


class NotAllowed(NegativeResult):
    """Actions are switched off."""


@dataclass(frozen=True)
class Done:
    """The result of an action, and the page to show next."""

    text: str
    go_to: str


@dataclass(frozen=True)
class ActionForm:
    """The fields of a form, and who sent it."""

    project: Project
    who: str
    fields: dict[str, str]

    def text(self, name: str, *, longest: int = LONGEST_REASON) -> str:
        return self.fields.get(name, "").strip()[:longest]

    @property
    def reason(self) -> str:
        found = self.text("reason")
        if not found:
            raise UserError(
                "the reason is missing", why="every action is logged with one", fix="go back and enter one"
            )
        return found


Act = Callable[[ActionForm], Done]


@dataclass(frozen=True)
class WebAction:
    """`command` is the same on the command line; with a reason it is logged."""

    act: Act
    command: Callable[[ActionForm], str]
    needs_reason: bool = True


def rollback_command(alias: str, reason: str) -> str:
    model, slash, name = alias.rpartition("/")
    parts = ["graft", "release", "rollback", "--alias", name, *(["--model", model] if slash else [])]
    return shlex.join([*parts, "--reason", reason])


def _rollback(form: ActionForm) -> Done:
    alias = form.text("alias")
    _require_same_rollback(form, alias)
    live, target = form.text("from"), form.text("to")
    shown = releases.PlannedRollback(live, target) if live and target else None
    move = releases.rollback(form.project, alias=alias, reason=form.reason, who=form.who, planned=shown)
    return Done(f"{move.alias} points at {_name_release(form.project, move.release_id)} now", "/releases")


def _name_release(project: Project, release: str) -> str:
    return releases.read_release(project, release).entry.version or release[:12]


def _require_same_rollback(form: ActionForm, alias: str) -> None:
    """The alias may have moved since the page was shown."""
    shown = form.text("from"), form.text("to")
    live = next((item for item in read_overview(form.project).live if item.alias == alias), None)
    if any(shown) and (live is None or shown != (live.release.id, live.back_to)):
        raise NegativeResult(
            f"{alias} has moved since the page was shown",
            why="the rollback would lead to another release",
            fix="reload the page and decide again",
        )


def promote_command(release: str, alias: str, reason: str) -> str:
    return shlex.join(["graft", "release", "promote", release[:12], "--alias", alias, "--reason", reason])


def _promote(form: ActionForm) -> Done:
    release, alias = form.text("release"), form.text("alias")
    move = releases.promote(form.project, release, alias=alias, reason=form.reason, who=form.who)
    name = _name_release(form.project, release)
    text = f"{move.alias} points at {name} now" if move else f"{alias} pointed there already"
    return Done(text, f"/releases/{release}")


def _verify(form: ActionForm) -> Done:
    release = form.text("release")
    files = releases.verify_release(form.project, release).files
    signed = "files and signature" if form.project.settings.release.public_key is not None else "files"
    size = sum(file.size for file in files)
    return Done(f"all {len(files)} {signed} verified ({size:,} bytes)", f"/releases/{release}")


def _stop(form: ActionForm) -> Done:
    run = form.text("run")
    if run and runs.read_run(form.project, run).entry.state != "running":
        raise NegativeResult(
            f"run {run} is not running any more",
            why="it ended since the page was shown",
            fix="reload the page",
        )
    stopped = runs.stop_run(form.project)
    is_idle = stopped.state == "not running"
    text = "nothing is running" if is_idle else "the run stops at its next checkpoint"
    return Done(text, f"/runs/{run}" if run else "/runs")


def _run(form: ActionForm) -> Done:
    """`graft run --detach`: the process continues if this server ends."""
    started = runs.start_in_background(form.project)
    if started.state == "already running":
        raise Busy(
            "the project is being worked on already",
            why="a run holds its lock",
            fix="stop it first, or wait for it",
        )
    return Done("The run was started in the background", "/")


def _stop_job(form: ActionForm) -> Done:
    job = fleet.stop_job(form.project, form.text("job"))
    return Done(f"job {job.id} is {job.state}", f"/fleet/{job.id}")


def _apply_reviews(form: ActionForm) -> Done:
    feedback, rows, file = datasets.apply_decisions(form.project)
    text = f"{feedback} decisions became feedback, {rows} rows were written"
    return Done(text + (f" to {file}" if file else ""), "/review")


def escalation_command(small: str, large: str) -> str:
    return shlex.join(["graft", "eval", "escalation", "--small", small, "--large", large])


def _name_pair(form: ActionForm) -> tuple[str, str]:
    """The small and the large model."""
    return form.text("small") or SMALL, form.text("large") or LARGE


def _predict_escalation(form: ActionForm) -> Done:
    small, large = _name_pair(form)
    for subject in (small, large):
        evaluations.require_known_subject(form.project, subject)
    forecast = form.project.predict_escalation(large=large, small=small)
    return Done(f"predicted on {forecast.cases} held-out cases", "/evaluation/escalation")


CAPTURE_FILTERS = ("text", "models", "checks", "min_score", "max_score", "release", "since", "until")
"""Fields of a `CaptureQuery`, as addresses and forms name them."""


def _write_captures(form: ActionForm) -> Done:
    written = endpoint.write_captures(
        form.project,
        endpoint.to_query({name: form.text(name) for name in CAPTURE_FILTERS}),
        file=form.text("file"),
        feedback=form.text("feedback"),
        output_format=form.text("as"),
    )
    left_out = "".join(f"; left out {count:,}: {reason}" for reason, count in written.left_out.items())
    wrote = f"wrote {plural(written.captures, 'capture')} to {form.text('file')}"
    return Done(f"{wrote}{left_out}", "/captures")


def _captures_command(form: ActionForm) -> str:
    filters = {name: form.text(name) for name in CAPTURE_FILTERS}
    command = endpoint.captures_command(filters, feedback=form.text("feedback"))
    return f"{command} {shlex.join(['--as', form.text('as'), '--out', form.text('file')])}"


def _pause(form: ActionForm) -> str:
    return shlex.join(["graft", "fleet", "stop", form.text("job")])


def _control_cycle(action: cycle.ControlAction) -> WebAction:
    """Begin, pause, resume or cancel the training cycle."""

    def act_on_cycle(form: ActionForm) -> Done:
        shown = form.text("cycle") if action == "cancel" else ""
        cycle.control_cycle(form.project, action, why=form.reason, who=form.who, cycle=shown)
        return Done(CONTROLLED[action], "/cycle")

    return WebAction(
        act_on_cycle, lambda form: shlex.join(["graft", "up", action, "--reason", form.text("reason")])
    )


CONTROLLED: dict[cycle.ControlAction, str] = {
    "begin": "a cycle was requested",
    "pause": "the coordinator pauses after the running step",
    "resume": "the coordinator continues",
    "cancel": "the cycle was canceled",
}


def _approve_step(form: ActionForm) -> Done:
    step = form.text("step")
    cycle.approve_in_cycle(form.project, step, why=form.reason, who=form.who, cycle=form.text("cycle"))
    return Done(f"{step} was approved", "/cycle")


def export_command(release: str) -> str:
    return shlex.join(["graft", "release", "export", release[:12]])


def _export(form: ActionForm) -> Done:
    release = form.text("release")
    path = releases.export_release(form.project, release)
    return Done(f"exported to {path.name} ({path.stat().st_size:,} bytes)", f"/releases/{release}")


ACTIONS: dict[str, WebAction] = {
    **{f"cycle-{name}": _control_cycle(name) for name in CONTROLLED},
    "cycle-approve": WebAction(
        _approve_step,
        lambda form: shlex.join(["graft", "up", "approve", form.text("step"), "--reason", form.reason]),
    ),
    "export": WebAction(_export, lambda form: export_command(form.text("release")), needs_reason=False),
    "rollback": WebAction(_rollback, lambda form: rollback_command(form.text("alias"), form.reason)),
    "promote": WebAction(
        _promote, lambda form: promote_command(form.text("release"), form.text("alias"), form.reason)
    ),
    "verify": WebAction(
        _verify,
        lambda form: shlex.join(["graft", "release", "verify", form.text("release")[:12]]),
        needs_reason=False,
    ),
    "stop": WebAction(_stop, lambda _form: "graft stop"),
    "run": WebAction(_run, lambda _form: "graft run --detach"),
    "stop-job": WebAction(_stop_job, _pause),
    "predict-escalation": WebAction(
        _predict_escalation, lambda form: escalation_command(*_name_pair(form)), needs_reason=False
    ),
    "write-captures": WebAction(_write_captures, _captures_command, needs_reason=False),
    "apply-reviews": WebAction(_apply_reviews, lambda _form: "graft data review", needs_reason=False),
}


async def act(request: Request) -> Response:
    """Do an action and go to the page that shows it."""
    name = request.path_params["name"]
    action = ACTIONS.get(name)
    if action is None:
        raise UserError(f"there is no action {name!r}", fix="use the buttons of the page")
    form = await read_form(request)
    if action.needs_reason:
        _ = form.reason
    done = await run_in_threadpool(lambda: perform(request, name, form))
    return RedirectResponse(address(done.go_to, notice=done.text), status_code=303)


def perform(request: Request, name: str, form: ActionForm) -> Done:
    require_allowed(request)
    action = ACTIONS[name]
    command = action.command(form)
    try:
        done = action.act(form)
    except GraftError as error:
        log_action(form, name, command, outcome=f"refused: {error.what}")
        raise
    log_action(form, name, command, outcome=done.text)
    return done


async def read_form(request: Request) -> ActionForm:
    return ActionForm(project_of(request), who_of(request), await read_fields(request))


async def read_fields(request: Request) -> dict[str, str]:
    """The fields of a form that was sent as the browser does it by default."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES:
            raise UserError(
                "the form is too large", why=f"it has over {FORM_BYTES:,} bytes", fix="enter less text"
            )
    try:
        return dict(
            parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
        )
    except ValueError:
        raise HTTPException(400, f"The form has over {MOST_FIELDS} fields") from None


def read_reply(form: ActionForm) -> str:
    reply = form.text("reply", longest=LONGEST_TEXT + 1)
    if len(reply) > LONGEST_TEXT:
        raise UserError(
            "the answer is too long", why=f"it has over {LONGEST_TEXT:,} characters", fix="shorten it"
        )
    return reply.replace("\r\n", "\n")


def require_allowed(request: Request) -> None:
    if not request.app.state.allow_actions:
        raise NotAllowed(
            "this page is read-only",
            why="it was started without --allow-actions",
            fix="run the command in a terminal, or start `graft ui --allow-actions`",
        )


def log_path(project: Project) -> Path:
    return project.folder.state / "web" / LOG_FILE


def log_action(form: ActionForm, name: str, command: str, *, outcome: str) -> None:
    path = log_path(form.project)
    make_folder(path.parent)
    line = ActionLine(
        at=timestamp(), who=form.who, action=name, command=command, why=form.text("reason"), outcome=outcome
    )
    Journal(path).append(line.model_dump(mode="json"), durable=True)


def show_log(request: Request) -> Response:
    project = project_of(request)
    lines = [
        ActionLine.model_validate(line)
        for line in Journal(log_path(project)).read()
        if isinstance(line, dict)
    ]
    return render(
        request,
        "actions.html.jinja",
        title="Log",
        section="/actions",
        lines=list(reversed(lines))[:SHOWN],
        moves=releases.read_alias_log(project)[:SHOWN],
        file=log_path(project),
    )


async def set_name(request: Request) -> Response:
    """Store the visitor's name, which is logged with their actions, in a cookie."""
    form = await read_form(request)
    back = form.text("back")
    answer = RedirectResponse(
        back if back.startswith("/") and not back.startswith(("//", "/\\")) else "/", status_code=303
    )
    name = "".join(c for c in form.text("who", longest=LONGEST_NAME) if c.isprintable())
    answer.set_cookie(WHO_COOKIE, quote(name), httponly=True, samesite="strict", path="/")
    return answer


ROUTES = [
    Route("/actions", show_log),
    Route("/actions/{name}", act, methods=["POST"]),
    Route("/who", set_name, methods=["POST"]),
]
