"""Asks two models of the endpoint the same question and shows both answers with their headers."""

from concurrent.futures import ThreadPoolExecutor

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import endpoint
from graftwork.views.page import show_answer
from graftwork.web.actions import LONGEST_TEXT, ActionForm, log_action, read_form, require_allowed
from graftwork.web.rendering import project_of, render

SECTION = "/playground"
MOST_TOKENS = 2048


def index(request: Request) -> Response:
    return _show(request, ActionForm(project_of(request), "", dict(request.query_params)), [])


async def ask(request: Request) -> Response:
    form = await read_form(request)
    return await run_in_threadpool(lambda: _ask(request, form))


def _ask(request: Request, form: ActionForm) -> Response:
    require_allowed(request)
    messages = _messages(form)
    names = [name for name in (form.text("left"), form.text("right")) if name]
    tokens = int(form.text("tokens") or 256) if form.text("tokens").isdecimal() else 256
    with ThreadPoolExecutor(2) as both:
        answers = list(
            both.map(
                lambda name: endpoint.ask_model(
                    form.project, name, messages, max_tokens=min(max(tokens, 1), MOST_TOKENS)
                ),
                dict.fromkeys(names),
            )
        )
    for name in dict.fromkeys(names):
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
        section=SECTION,
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


ROUTES = [Route("/playground", index), Route("/playground", ask, methods=["POST"])]
