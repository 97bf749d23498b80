"""The gate's verdict, metrics with intervals, slices, and cases page by page, two subjects side by side."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api import evaluations
from graftwork.api.evaluations import CaseQuery
from graftwork.views.endpoint import view_forecast
from graftwork.views.evaluation_page import (
    compare_pairs,
    compare_subjects,
    draw_metrics,
    subjects_of,
    view_confusions,
    view_cuts,
)
from graftwork.views.page import show_answer
from graftwork.web.actions import LARGE, SMALL, escalation_command
from graftwork.web.rendering import address, number_in, project_of, render, text_in

SECTION = "/evaluation"
OUTCOMES = {
    "lost": "lost",
    "won": "won",
    "both_wrong": "both wrong",
    "both_right": "both right",
    "same": "same score",
    "ungraded": "not graded",
}


def index(request: Request) -> Response:
    project = project_of(request)
    view = evaluations.read_evaluation(project)
    report = view.evaluated.report if view else None
    by_case = evaluations.metrics_of(report) if report else ()

    def link_cases(metric: str) -> str:
        model = text_in(request, "model")
        return address("/evaluation/cases", metric=metric, model=model) if metric in by_case else ""

    return render(
        request,
        "evaluation.html.jinja",
        title="Evaluation",
        section=SECTION,
        view=view,
        origins=evaluations.trace_subjects(project),
        report=report,
        verdict=view.verdict if view else None,
        figure=draw_metrics(report) if report else None,
        subjects=[subject.subject for subject in subjects_of(report)] if report else [],
        metrics=compare_subjects(report, link_cases) if report else None,
        pairs=compare_pairs(report) if report else None,
        cuts=view_cuts(report.slices) if report else None,
        confusions=view_confusions(report) if report else None,
        models=tuple(project.settings.all_models),
    )


def cases(request: Request) -> Response:
    project = project_of(request)
    page = evaluations.list_cases(project, _query(request))
    return render(
        request,
        "cases.html.jinja",
        title="Cases",
        section=SECTION,
        page_of=page,
        origins=evaluations.trace_subjects(project),
        query=page.query,
        outcomes=OUTCOMES,
        link=_link,
    )


def case(request: Request) -> Response:
    project, query = project_of(request), _query(request)
    view = evaluations.read_case(project, request.path_params["case"], query)
    by_subject = {answer.subject: answer for answer in view.answers}
    names = list(by_subject)
    left = query.left if query.left in by_subject else names[0]
    right = query.right if query.right in by_subject else names[min(1, len(names) - 1)]
    chosen = [by_subject[left], by_subject[right]] if left != right else [by_subject[left]]
    shown = []
    for place, answer in enumerate(chosen):
        other = chosen[1 - place].text if len(chosen) > 1 else None
        shown.append((answer, show_answer(answer.text or "", reference=other or "")))
    return render(
        request,
        "case.html.jinja",
        title=f"Case {view.case.id}",
        section=SECTION,
        view=view,
        shown=shown,
        origins=evaluations.trace_subjects(project),
        reference=show_answer(view.case.reference, reference=""),
        others=[answer for answer in view.answers if answer not in chosen],
        query=query,
        link=_link,
    )


def _query(request: Request) -> CaseQuery:
    return CaseQuery(
        left=text_in(request, "left"),
        right=text_in(request, "right"),
        metric=text_in(request, "metric"),
        outcome=text_in(request, "outcome"),
        part=text_in(request, "part"),
        text=text_in(request, "text"),
        page=number_in(request, "page"),
    )


def _link(path: str, query: CaseQuery, **changes: object) -> str:
    """An address with the same filters."""
    values = {**query.model_dump(), **changes}
    if values.get("page") == 1:
        values["page"] = ""
    return address(path, **values)


def escalation(request: Request) -> Response:
    """The last forecast of escalation, and the form to request another."""
    project = project_of(request)
    small, large = text_in(request, "small") or SMALL, text_in(request, "large") or LARGE
    forecast = evaluations.read_escalation(project)
    return render(
        request,
        "escalation.html.jinja",
        title="Escalation",
        section=SECTION,
        forecast=forecast,
        viewed=view_forecast(forecast) if forecast is not None else None,
        threshold_command=f"{escalation_command(small, large)} --logprob",
        settings=project.settings.serve.escalate,
        small=small,
        large=large,
        command=escalation_command(small, large),
    )


def gate(_request: Request) -> Response:
    return RedirectResponse("/evaluation#gate", status_code=303)


ROUTES = [
    Route("/evaluation", index),
    Route("/evaluation/cases", cases),
    Route("/evaluation/cases/{case:path}", case),
    Route("/evaluation/escalation", escalation),
    Route("/gate", gate),
]
