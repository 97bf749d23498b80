"""Training runs: the list, one run with curves that grow while it works, events, and two runs compared."""

import math
from collections.abc import Collection, Sequence
from functools import partial

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from graftwork.api import runs
from graftwork.api.project import Project
from graftwork.records.run import TrainStep
from graftwork.views import charts
from graftwork.views.plan import view_residuals
from graftwork.views.training import (
    LOSS,
    draw_both_losses,
    draw_evaluations,
    draw_loss,
    draw_plan,
    machine_courses,
    step_courses,
)
from graftwork.web.rendering import number_in, project_of, render, text_in

SECTION = "/runs"
EVENT_KINDS = ("message", "alert", "checkpoint", "evaluation")
MOST_CURVE_POINTS = 4000
TABLE_STEPS = 50
HALF = 500.0
"""Width of a plot in half a row."""


def index(request: Request) -> Response:
    state = text_in(request, "state")
    found, counts = runs.list_runs(project_of(request), state=state, page=number_in(request, "page"))
    return render(
        request,
        "runs.html.jinja",
        title="Runs",
        section=SECTION,
        found=found,
        counts=counts,
        state=state,
        states=runs.STATES,
    )


def run(request: Request) -> Response:
    project, run_id = project_of(request), request.path_params["run"]
    view = runs.read_run(project, run_id)
    residuals = runs.residuals_of(view)
    return render(
        request,
        "run.html.jinja",
        title=f"Run {view.entry.id}",
        section=SECTION,
        view=view,
        status=view.status,
        loss=charts.draw_both(partial(draw_loss, view.steps, view.looks, view.outcome)),
        courses=[*step_courses(view.steps, (), every=False), *machine_courses(view.vitals, view.steps)],
        looks=draw_evaluations(
            view.looks, view.outcome, last=max((step.step for step in view.steps), default=1), wide=HALF
        ),
        plan_figure=charts.draw_both(lambda width: draw_plan(residuals, width=width), wide=HALF)
        if residuals
        else None,
        residuals=view_residuals(residuals),
        table=view.steps[-TABLE_STEPS:],
        graded=runs.list_answer_extremes(project, run_id),
    )


def curve(request: Request) -> Response:
    """The steps of a run as columns, for the chart in the browser; after a step, only the new ones.
    `validation` is always whole: an evaluation ends after its step was sent."""
    steps, evaluations = runs.read_run_curve(
        project_of(request), request.path_params["run"], after=number_in(request, "after", 0)
    )
    validation = [point for point in evaluations if point.metric == LOSS]
    columns = {
        **to_columns(steps, keep={point.step for point in validation}),
        "validation": {
            "step": [point.step for point in validation],
            "loss": [_finite(point.value) for point in validation],
        },
    }
    return JSONResponse(columns, headers={"cache-control": "no-store"})


def to_columns(steps: Sequence[TrainStep], *, keep: Collection[int] = ()) -> dict[str, list[float | None]]:
    """Each step once, as it was last done; long runs are thinned, but keep the steps that were skipped, and
    those in `keep`.
    """
    last = {step.step: step for step in steps}
    ordered = [last[number] for number in sorted(last)]
    every = max(len(ordered) // MOST_CURVE_POINTS, 1)
    ordered = [
        step
        for position, step in enumerate(ordered)
        if position % every == 0 or step.skipped or step.step in keep
    ]
    measured = dict.fromkeys(name for step in ordered for name in step.measures)
    return {
        "step": [float(step.step) for step in ordered],
        "loss": [_finite(step.loss) for step in ordered],
        "skipped": [float(step.skipped) for step in ordered],
        "learning rate": [_finite(step.learning_rate) for step in ordered],
        "gradient norm": [_finite(step.gradient_norm) for step in ordered],
        "tokens/s": [_finite(step.tokens / step.seconds) if step.seconds else None for step in ordered],
        **{name: [_finite(step.measures.get(name)) for step in ordered] for name in measured},
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def events(request: Request) -> Response:
    run_id, kind = request.path_params["run"], text_in(request, "kind")
    found = runs.list_events(project_of(request), run_id, kind=kind)
    return render(
        request,
        "events.html.jinja",
        title=f"Events of {run_id}",
        section=SECTION,
        run_id=run_id,
        events=[event for event in found if kind or event.kind not in ("machine", "step")],
        kind=kind,
        kinds={"": "all", **{kind: f"{kind}s" for kind in EVENT_KINDS}},
    )


def compare(request: Request) -> Response:
    """Differences only, unless `?all=1`."""
    project = project_of(request)
    a, b, everything = text_in(request, "a"), text_in(request, "b"), bool(text_in(request, "all"))
    found = runs.compare_runs(project, a, b) if a and b else None
    rows = [row for row in found.rows if everything or not row.same] if found else []
    return render(
        request,
        "compare_runs.html.jinja",
        title="Compare runs",
        section=SECTION,
        a=a,
        b=b,
        everything=everything,
        found=found,
        rows=rows,
        same=sum(row.same for row in found.rows) if found else 0,
        runs=runs.list_runs(project)[0].items,
        losses=_draw_comparison(project, (a, b)) if found else None,
    )


def _draw_comparison(project: Project, names: Sequence[str]) -> Markup | None:
    """None if one of the runs has no step."""
    curves = [runs.read_run_curve(project, name)[0] for name in names]
    return charts.draw_both(lambda width: draw_both_losses(curves, width=width)) if all(curves) else None


ROUTES = [
    Route("/runs", index),
    Route("/runs/compare", compare),
    Route("/runs/{run}", run),
    Route("/runs/{run}/curve.json", curve),
    Route("/runs/{run}/events", events),
]
