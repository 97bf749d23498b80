"""The endpoint: what it served, in figures and capture by capture; the same question to two models."""

import shlex

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api import endpoint
from graftwork.records.report import Case
from graftwork.views.charts import draw_both
from graftwork.views.endpoint import draw_days
from graftwork.views.page import show_answer
from graftwork.views.turns import show_turns
from graftwork.web.actions import (
    CAPTURE_FILTERS,
    LONGEST_TEXT,
    ActionForm,
    log_action,
    read_form,
    read_reply,
    require_allowed,
)
from graftwork.web.rendering import address, number_in, project_of, render, text_in

CAPTURES = "/captures"


def captures(request: Request) -> Response:
    """With a filter, what `graft data captures` lists; without one, all."""
    project, number = project_of(request), number_in(request, "page")
    filters = {name: text_in(request, name) for name in CAPTURE_FILTERS}
    feedback = text_in(request, "feedback")
    traffic = endpoint.read_traffic(project)
    listed, by_release = endpoint.list_captures(project, page=number)
    selected = None
    if feedback or any(filters.values()):
        query = endpoint.to_query(filters)
        selected = endpoint.select_captures(project, query, feedback=feedback, page=number)
    return render(
        request,
        "captures.html.jinja",
        title="Captures",
        section=CAPTURES,
        listed=selected or listed,
        is_selected=selected is not None,
        filters={**filters, "feedback": feedback},
        feedback_kinds=endpoint.FEEDBACK_FILTERS,
        command=endpoint.captures_command(filters, feedback=feedback),
        by_release=by_release,
        traffic=traffic,
        figure=draw_both(lambda width: draw_days(traffic.by_day, width=width), wide=860),
        totals=endpoint.read_capture_totals(project),
        serve=project.settings.serve,
    )


def capture(request: Request) -> Response:
    shown, feedback = endpoint.read_capture(project_of(request), request.path_params["capture"])
    return render(
        request,
        "capture.html.jinja",
        title=f"Capture {shown.id[:12]}",
        section=CAPTURES,
        capture=shown,
        feedback=feedback,
        messages=endpoint.read_prompt(shown),
        back=address(
            CAPTURES, **{name: text_in(request, name) for name in (*CAPTURE_FILTERS, "feedback", "page")}
        ),
    )


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
    messages = _messages(form, _example(form))
    names = dict.fromkeys(name for name in (form.text("left"), form.text("right")) if name)
    tokens = int(form.text("tokens") or 256) if form.text("tokens").isdecimal() else 256
    answers = endpoint.ask_any(form.project, names, messages, max_tokens=min(max(tokens, 1), MOST_TOKENS))
    for name in names:
        log_action(form, "ask", endpoint.curl_command(form.project, name, messages)[:2000], outcome="asked")
    return _show(request, form, answers)


async def rate(request: Request) -> Response:
    form = await read_form(request)
    return await run_in_threadpool(lambda: _rate(request, form))


def _rate(request: Request, form: ActionForm) -> Response:
    require_allowed(request)
    capture, score, note = form.text("capture"), form.text("score"), form.text("note")
    if score == "correct":
        notice, correction = "corrected", read_reply(form)
        endpoint.correct_answer(form.project, capture, correction, note, who=form.who)
    else:
        notice = f"rated {'good' if score == '1' else 'bad'}"
        endpoint.rate_answer(form.project, capture, 1.0 if score == "1" else 0.0, note, who=form.who)
    log_action(form, "rate", "graft chat", outcome=f"{notice}: capture {capture[:12]}")
    return RedirectResponse(address(f"{CAPTURES}/{capture}", notice=notice), status_code=303)


def _example(form: ActionForm) -> Case | None:
    number = form.text("example")
    return endpoint.read_chat_example(form.project, int(number)) if number.isdecimal() else None


def _messages(form: ActionForm, example: Case | None) -> list[dict[str, str]]:
    system, prompt = form.text("system", longest=LONGEST_TEXT), form.text("prompt", longest=LONGEST_TEXT)
    if example is None:
        turns = [{"role": "system", "content": system}] if system else []
        return [*turns, {"role": "user", "content": prompt}]
    turns = [{"role": turn.role, "content": turn.content} for turn in example.messages]
    if prompt and turns[-1]["role"] == "user":
        # As it is in the form: it may have been changed there.
        turns.pop()
    return [*turns, {"role": "user", "content": prompt}] if prompt else turns


def _show(request: Request, form: ActionForm, answers: list[endpoint.EndpointAnswer]) -> Response:
    choices, example = endpoint.read_playground(form.project), _example(form)
    able = [*(choices.served or ()), *(choice.name for choice in choices.subjects if not choice.why_not)]
    names = [*dict.fromkeys(able)]
    left = form.text("left") or next(iter(names), "")
    # The base is what a model is compared with.
    right = form.text("right") if "right" in form.fields else ("base" if left != "base" else "")
    prompt = form.text("prompt", longest=LONGEST_TEXT)
    turns, asked_last = [], None if example is None else example.messages[-1]
    if example is not None and asked_last is not None:
        is_question = asked_last.role == "user"
        turns = list(show_turns(example.messages[:-1] if is_question else example.messages))
        prompt = prompt or (asked_last.content if is_question and not answers else "")
    shown = []
    for place, answer in enumerate(answers):
        other = answers[1 - place].text if len(answers) == 2 else ""
        shown.append((answer, show_answer(answer.text, reference=other)))
    return render(
        request,
        "playground.html.jinja",
        title="Playground",
        section=PLAYGROUND,
        choices=choices,
        names=names,
        left=left,
        right=right,
        system=form.text("system", longest=LONGEST_TEXT),
        prompt=prompt,
        example=form.text("example") if example is not None else "",
        turns=turns,
        reference="" if example is None else example.reference,
        tokens=form.text("tokens") or "256",
        answers=shown,
        capture_header=endpoint.CAPTURE_HEADER,
        url=endpoint.ask_address(form.project),
        command=_command(left, prompt, form.text("example")),
    )


def _command(name: str, prompt: str, example: str) -> str:
    question = ["--example", example] if example else (["--prompt", prompt] if prompt else [])
    return shlex.join(["graft", "chat", *([name] if name else []), *question])


ROUTES = [
    Route("/playground", playground),
    Route("/playground", ask, methods=["POST"]),
    Route("/playground/rate", rate, methods=["POST"]),
    Route("/captures", captures),
    Route("/captures/{capture}", capture),
    Route("/parts/drift", drift),
]
