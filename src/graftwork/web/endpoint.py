"""The endpoint: what it served, in figures and capture by capture; the same question to two of its models."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import endpoint
from graftwork.views.charts import draw_both
from graftwork.views.endpoint import draw_days
from graftwork.views.page import show_answer
from graftwork.web.actions import LONGEST_TEXT, ActionForm, log_action, read_form, require_allowed
from graftwork.web.rendering import address, number_in, project_of, render, text_in

CAPTURES = "/captures"


def captures(request: Request) -> Response:
    project = project_of(request)
    text, release = text_in(request, "text"), text_in(request, "release")
    traffic = endpoint.read_traffic(project)
    found, by_release = endpoint.list_captures(
        project, text=text, release=release, page=number_in(request, "page")
    )
    return render(
        request,
        "captures.html.jinja",
        title="Captures",
        section=CAPTURES,
        found=found,
        by_release=by_release,
        traffic=traffic,
        figure=draw_both(lambda width: draw_days(traffic.by_day, width=width), wide=860),
        totals=endpoint.read_capture_totals(project),
        text=text,
        release=release,
        serve=project.settings.serve,
    )


def capture(request: Request) -> Response:
    shown, feedback = endpoint.read_capture(project_of(request), request.path_params["capture"])
    asked = shown.request.get("messages")
    turns = [
        (str(turn.get("role", "")), _text_of(turn.get("content")))
        for turn in (asked if isinstance(asked, list) else [])
        if isinstance(turn, dict)
    ]
    return render(
        request,
        "capture.html.jinja",
        title=f"Capture {shown.id[:12]}",
        section=CAPTURES,
        capture=shown,
        feedback=feedback,
        turns=turns,
        back=address(
            CAPTURES,
            text=text_in(request, "text"),
            release=text_in(request, "release"),
            page=text_in(request, "page"),
        ),
    )


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)


def drift(request: Request) -> Response:
    """A part of the page: measuring reads the dataset and the captures."""
    return render(request, "part_drift.html.jinja", title="Drift", drift=project_of(request).drift())


PLAYGROUND = "/playground"
MOST_TOKENS = 2048


def playground(request: Request) -> Response:
    return _show(request, ActionForm(project_of(request), "", dict(request.query_params)), [])


async def ask(request: Request) -> Response:
    form = await read_form(request)
    return await run_in_threadpool(lambda: _ask(request, form))


def _ask(request: Request, form: ActionForm) -> Response:
    require_allowed(request)
    messages = _messages(form)
    names = dict.fromkeys(name for name in (form.text("left"), form.text("right")) if name)
    tokens = int(form.text("tokens") or 256) if form.text("tokens").isdecimal() else 256
    answers = endpoint.ask_models(form.project, names, messages, max_tokens=min(max(tokens, 1), MOST_TOKENS))
    for name in names:
        log_action(form, "ask", endpoint.curl_command(form.project, name, messages)[:2000], outcome="asked")
    return _show(request, form, answers)


def _messages(form: ActionForm) -> list[dict[str, str]]:
    system, prompt = form.text("system", longest=LONGEST_TEXT), form.text("prompt", longest=LONGEST_TEXT)
    turns = [{"role": "system", "content": system}] if system else []
    return [*turns, {"role": "user", "content": prompt}]


def _show(request: Request, form: ActionForm, answers: list[endpoint.EndpointAnswer]) -> Response:
    models = endpoint.list_endpoint_models(form.project)
    left, right = form.text("left"), form.text("right")
    shown = []
    for place, answer in enumerate(answers):
        other = answers[1 - place].text if len(answers) == 2 else ""
        shown.append((answer, show_answer(answer.text, reference=other)))
    return render(
        request,
        "playground.html.jinja",
        title="Playground",
        section=PLAYGROUND,
        models=models,
        left=left or (models[0] if models else "champion"),
        right=right or (models[1] if len(models) > 1 else ""),
        system=form.text("system", longest=LONGEST_TEXT),
        prompt=form.text("prompt", longest=LONGEST_TEXT),
        tokens=form.text("tokens") or "256",
        answers=shown,
        url=endpoint.ask_address(form.project),
        command=endpoint.curl_command(form.project, left or "champion", _messages(form)),
    )


ROUTES = [
    Route("/playground", playground),
    Route("/playground", ask, methods=["POST"]),
    Route("/captures", captures),
    Route("/captures/{capture}", capture),
    Route("/parts/drift", drift),
]
