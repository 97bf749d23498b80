"""Audit, datasets, rows as the model sees them, drops, traces, comparisons; the queue of rows to review."""

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api import datasets
from graftwork.records.dataset import ReviewAction
from graftwork.records.errors import UserError
from graftwork.views.charts import draw_lengths
from graftwork.web.actions import ActionForm, log_action, read_form, read_reply, require_allowed
from graftwork.web.rendering import address, number_in, project_of, render, text_in, who_of

SECTION = "/data"
SEVERITIES = {"blocker": 0, "warning": 1, "info": 2}
LATEST = "latest"


def index(request: Request) -> Response:
    project = project_of(request)
    audit = datasets.read_audit(project)
    return render(
        request,
        "data.html.jinja",
        title="Data",
        section=SECTION,
        audit=audit,
        findings=sorted(audit.findings, key=lambda found: SEVERITIES[found.severity]) if audit else [],
        datasets=datasets.list_datasets(project),
    )


def finding(request: Request) -> Response:
    audit = datasets.read_audit(project_of(request))
    code = request.path_params["code"]
    found = next((item for item in audit.findings if item.code == code), None) if audit else None
    if found is None:
        raise HTTPException(404, f"there is no finding {code}")
    return render(request, "finding.html.jinja", title=found.title, section=SECTION, finding=found)


def clusters(request: Request) -> Response:
    audit = datasets.read_audit(project_of(request))
    return render(request, "clusters.html.jinja", title="Clusters", section=SECTION, audit=audit)


def dataset(request: Request) -> Response:
    project = project_of(request)
    name = _name(request)
    found = datasets.read_dataset(project, name)
    lengths: dict[str, Sequence[int]] = {
        split: summary.spread_lengths() for split, summary in found.splits.items()
    }
    others = [line for line in datasets.list_datasets(project) if line.hash != found.content_hash]
    return render(
        request,
        "dataset.html.jinja",
        title=f"Dataset {found.content_hash[:12]}",
        section=SECTION,
        dataset=found,
        groups=datasets.count_groups(project, name),
        lengths={"wide": draw_lengths(lengths, width=520), "narrow": draw_lengths(lengths, width=340)},
        dropped_by_step=datasets.list_drops(project, name)[1],
        others=others,
    )


def rows(request: Request) -> Response:
    project, name = project_of(request), _name(request)
    split, group = text_in(request, "split") or "train", text_in(request, "group")
    page = datasets.list_rows(project, name, split=split, group=group, page=number_in(request, "page"))
    return render(
        request,
        "rows.html.jinja",
        title=f"Rows of {split}",
        section=SECTION,
        page_of=page,
        chosen=split,
        group=group,
        groups=datasets.count_groups(project, name),
        dataset=datasets.read_dataset(project, name),
    )


def row(request: Request) -> Response:
    project, name, row_id = project_of(request), _name(request), request.path_params["row"]
    by_token = bool(request.query_params.get("tokens"))
    view = datasets.read_row(project, name, row_id, by_token=by_token)
    traced = datasets.trace_line(project, f"{view.split}:{view.number}", name)
    return render(
        request,
        "row.html.jinja",
        title=f"Row {view.row.id}",
        section=SECTION,
        view=view,
        traced=traced.rows[0] if traced.rows else None,
        by_token=by_token,
        group=text_in(request, "group"),
        page_number=text_in(request, "page"),
        dataset=datasets.read_dataset(project, name),
    )


def drops(request: Request) -> Response:
    project, name = project_of(request), _name(request)
    step, reason = text_in(request, "step"), text_in(request, "reason")
    found, by_step, by_reason = datasets.list_drops(
        project, name, step=step, reason=reason, page=number_in(request, "page")
    )
    return render(
        request,
        "drops.html.jinja",
        title="Dropped rows",
        section=SECTION,
        found=found,
        by_step=by_step,
        by_reason=by_reason,
        step=step,
        reason=reason,
        dataset=datasets.read_dataset(project, name),
    )


def trace(request: Request) -> Response:
    what, name = text_in(request, "what"), text_in(request, "dataset")
    project = project_of(request)
    found = datasets.trace_line(project, what, name) if what else None
    return render(
        request,
        "trace.html.jinja",
        title="Trace",
        section=SECTION,
        what=what,
        found=found,
        lines=datasets.show_log_lines(project, found) if found else {},
    )


def compare(request: Request) -> Response:
    project = project_of(request)
    a, b = text_in(request, "a"), text_in(request, "b")
    return render(
        request,
        "compare_datasets.html.jinja",
        title="Compare datasets",
        section=SECTION,
        a=a,
        b=b,
        diff=datasets.compare_datasets(project, a, b) if a and b else None,
        datasets=datasets.list_datasets(project),
    )


def latest(request: Request) -> Response:
    found = datasets.read_dataset(project_of(request))
    return RedirectResponse(address(f"/data/sets/{found.content_hash}"), status_code=303)


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    return "" if name == LATEST else name


REVIEW = "/review"
DECISIONS: dict[str, ReviewAction] = {"accept": "accept", "reject": "reject", "edit": "edit", "skip": "skip"}
REASONS = {
    "disagreement": "different answers to the same prompt",
    "low_reward": "rated low by users",
    "gate_failure": "a held-out case that the adapter fails",
    "wrong_label": "the rest of the log suggests another label",
    "drift": "unlike any training prompt",
    "rare_group": "a role with few rows",
    "unrated": "not rated yet",
}


def review(request: Request) -> Response:
    turn = datasets.next_review(
        project_of(request),
        who=who_of(request),
        key=text_in(request, "key"),
        hold=request.app.state.allow_actions,
    )
    return render(
        request,
        "review.html.jinja",
        title="Review",
        section=REVIEW,
        turn=turn,
        reasons=REASONS,
        editing=bool(text_in(request, "edit")),
    )


async def decide(request: Request) -> Response:
    form = await read_form(request)
    action = form.text("action")
    text = await run_in_threadpool(lambda: _decide(request, form, action))
    return RedirectResponse(address(REVIEW, notice=text), status_code=303)


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
    chosen = DECISIONS.get(action)
    if chosen is None:
        raise UserError(f"there is no decision {action!r}", fix="use the buttons of the page")
    key = form.text("key")
    reply = read_reply(form) if chosen == "edit" else None
    if not datasets.decide_review(form.project, key, chosen, who=form.who, reply=reply):
        return "another reviewer has decided about it"
    log_action(form, "review", "graft data review", outcome=f"{chosen} {key}")
    return {"accept": "accepted", "reject": "rejected", "edit": "answer replaced", "skip": "skipped"}[chosen]


ROUTES = [
    Route("/data", index),
    Route("/data/findings/{code}", finding),
    Route("/data/clusters", clusters),
    Route("/data/trace", trace),
    Route("/data/compare", compare),
    Route("/data/sets/latest", latest),
    Route("/data/sets/{name}", dataset),
    Route("/data/sets/{name}/rows", rows),
    Route("/data/sets/{name}/rows/{row:path}", row),
    Route("/data/sets/{name}/drops", drops),
    Route("/review", review),
    Route("/review/decide", decide, methods=["POST"]),
]
