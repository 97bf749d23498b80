"""The review queue: one row, keys for decisions, the next row by itself."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api import datasets
from graftwork.records.dataset import ReviewAction
from graftwork.records.errors import UserMistake
from graftwork.web.actions import LONGEST_TEXT, ActionForm, log_action, read_form, require_allowed
from graftwork.web.rendering import address, project_of, render, text_in, who_of
from graftwork.web.security import WebOptions

SECTION = "/review"
ACTIONS: dict[str, ReviewAction] = {"accept": "accept", "reject": "reject", "edit": "edit", "skip": "skip"}
REASONS = {
    "disagreement": "different answers to the same prompt",
    "low_reward": "rated low by users",
    "gate_failure": "a held-out case that the adapter fails",
    "wrong_label": "the rest of the log suggests another label",
    "drift": "unlike any training prompt",
    "rare_group": "a role with few rows",
    "unrated": "not rated yet",
}


def index(request: Request) -> Response:
    options: WebOptions = request.app.state.options
    turn = datasets.next_review(
        project_of(request), who=who_of(request), key=text_in(request, "key"), hold=options.allow_actions
    )
    return render(
        request,
        "review.html.jinja",
        title="Review",
        section=SECTION,
        turn=turn,
        reasons=REASONS,
        editing=bool(text_in(request, "edit")),
    )


async def decide(request: Request) -> Response:
    form = await read_form(request)
    action = form.text("action")
    text = await run_in_threadpool(lambda: _decide(request, form, action))
    return RedirectResponse(address(SECTION, notice=text), status_code=303)


def _decide(request: Request, form: ActionForm, action: str) -> str:
    require_allowed(request)
    if action == "undo":
        undone = datasets.undo_review(form.project, who=form.who)
        if undone is None:
            return "nothing to take back"
        log_action(
            form, "review", "graft data review", outcome=f"took back {undone.action} of {undone.item.key}"
        )
        return f"taken back: {undone.action}"
    chosen = ACTIONS.get(action)
    if chosen is None:
        raise UserMistake(f"there is no decision {action!r}", fix="use the buttons of the page")
    key = form.text("key")
    reply = _read_reply(form) if chosen == "edit" else None
    if not datasets.decide_review(form.project, key, chosen, who=form.who, reply=reply):
        return "another reviewer has decided about it"
    log_action(form, "review", "graft data review", outcome=f"{chosen} {key}")
    return {"accept": "accepted", "reject": "rejected", "edit": "answer replaced", "skip": "skipped"}[chosen]


def _read_reply(form: ActionForm) -> str:
    reply = form.text("reply", longest=LONGEST_TEXT + 1)
    if len(reply) > LONGEST_TEXT:
        raise UserMistake(
            "the answer is too long", why=f"it has over {LONGEST_TEXT:,} characters", fix="shorten it"
        )
    return reply.replace("\r\n", "\n")


ROUTES = [Route("/review", index), Route("/review/decide", decide, methods=["POST"])]
