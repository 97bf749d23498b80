"""The course of a run, as the report and the run's own page show it.

Input: the plan, the outcome, the journal of steps and the samples of the machine. Output: what the template
`training.html.jinja` puts on a page.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from markupsafe import Markup

from graftwork.records.fleet import Vitals
from graftwork.records.plan import Plan, Residual
from graftwork.records.run import AnswerExtremes, TrainingEvaluation, TrainOutcome, TrainStep
from graftwork.text.wording import change, duration, number, percent
from graftwork.views import charts, html
from graftwork.views.charts import draw_course, draw_looks
from graftwork.views.document import Document, Name, quote
from graftwork.views.plan import view_residuals

LOSS = "loss"
MOST_SHOWN = 2_000
"""Characters of an answer."""


class LabelledPlot(NamedTuple):
    """A small plot with its name."""

    name: str
    figure: Markup


def show_training(
    plan: Plan, outcome: TrainOutcome, steps: Sequence[TrainStep], vitals: Sequence[Vitals]
) -> dict[str, Any]:
    """The values of the training section."""
    restarts = find_restarts(steps)
    others = [look for look in outcome.looks if look.metric != LOSS]
    draws: dict[str, Callable[..., Markup]] = {
        "loss": partial(draw_loss, steps, outcome.looks, outcome),
        "plan": partial(draw_plan, outcome.residuals),
    }
    if others:
        name, best_step = html.name_of(others[0].metric), _find_best_step(others, outcome)
        draws["looks"] = partial(draw_looks, others, name=name, last=outcome.steps, best_step=best_step)
    return {
        "figure": {name: charts.draw_both(draw) for name, draw in draws.items()},
        "courses": [*step_courses(steps, restarts), *machine_courses(vitals, steps)],
        "looks": _list_looks(outcome),
        "residuals": view_residuals((*outcome.residuals, *outcome.residual_parts)),
        "drifts": [drift.says for drift in outcome.drifts],
        "device": plan.device.name,
    }


def make_training_page(
    plan: Plan,
    outcome: TrainOutcome,
    steps: Sequence[TrainStep],
    vitals: Sequence[Vitals],
    *,
    answers: AnswerExtremes | None = None,
) -> str:
    """The training curves of one run as a separate page. The same records give the same bytes."""
    return html.render(
        "training_page.html.jinja",
        plan=plan,
        outcome=outcome,
        training=show_training(plan, outcome, steps, vitals),
        answers=_list_answers(answers) if answers else None,
    )


def _list_answers(answers: AnswerExtremes) -> Document:
    """The best and the worst sampled answers of the last batch, with each part of their rewards."""
    viewed = Document("Answers of the last batch")
    rows = []
    for side, tone, found in (("best", "green", answers.best), ("worst", "yellow", answers.worst)):
        for answer in found:
            parts = ", ".join(
                f"{name} {number(value)}" for name, value in answer.parts.items() if value is not None
            )
            audit = "" if answer.audit is None else number(answer.audit)
            reward, text = f"[bold]{number(answer.reward)}[/]", quote(answer.text[:MOST_SHOWN])
            side_ = f"[{tone}]{side}[/]"
            rows.append((side_, quote(answer.prompt), reward, f"[dim]{quote(parts)}[/]", audit, text))
    viewed.table(("", "Prompt", "Reward", "Parts", "Audit", "Answer"), rows, right=("Reward", "Audit"))
    return viewed


def find_restarts(steps: Sequence[TrainStep]) -> list[tuple[int, int]]:
    """The steps after which the run was killed and at which it resumed: there the number decreases."""
    return [(old.step, new.step) for old, new in pairwise(steps) if new.step <= old.step]


def draw_loss(
    steps: Sequence[TrainStep],
    looks: Sequence[TrainingEvaluation],
    outcome: TrainOutcome | None,
    *,
    width: float = 760,
) -> Markup:
    looks = [look for look in looks if look.metric == LOSS]
    held_out = (outcome.validation_loss_before, outcome.validation_loss_after) if outcome else (None, None)
    return charts.draw_loss(
        [(step.step, step.loss) for step in steps],
        restarts=find_restarts(steps),
        held_out=held_out,
        looks=looks,
        best_step=_find_best_step(looks, outcome),
        width=width,
    )


def _find_best_step(looks: Sequence[TrainingEvaluation], outcome: TrainOutcome | None) -> int | None:
    """If the outcome names no best step, it is the last one that was better than all before it."""
    if outcome is not None and outcome.best_step is not None:
        return outcome.best_step
    return max((look.step for look in looks if look.better), default=None)


def draw_evaluations(
    looks: Sequence[TrainingEvaluation], outcome: TrainOutcome | None, *, last: int, wide: float
) -> list[LabelledPlot]:
    """A plot for each metric but the loss."""
    plots = []
    for metric in dict.fromkeys(look.metric for look in looks if look.metric != LOSS):
        measured = [look for look in looks if look.metric == metric]
        best_step = _find_best_step(measured, outcome)
        draw = partial(draw_looks, measured, name=metric, last=last, best_step=best_step)
        plots.append(LabelledPlot(metric, charts.draw_both(draw, wide=wide)))
    return plots


def step_courses(
    steps: Sequence[TrainStep], restarts: Sequence[tuple[int, int]], *, every: bool = True
) -> list[LabelledPlot]:
    """`every`: the figures of all runs; then what the objective measured: margins, rewards by part, KL."""
    breaks = [float(killed_after) for killed_after, _ in restarts]
    plotted: dict[str, list[tuple[float, float]]] = {}
    if steps and every:
        plotted = {
            "Learning rate": [(step.step, step.learning_rate) for step in steps],
            "Gradient norm": [(step.step, step.gradient_norm) for step in steps],
            "Tokens a second": [(s.step, s.tokens / s.seconds if s.seconds else 0.0) for s in steps],
        }
    for name in dict.fromkeys(name for step in steps for name in step.measures):
        points = [(float(step.step), step.measures[name]) for step in steps if name in step.measures]
        if len(points) > 1:
            plotted[name] = points
    units = {"Tokens a second": "tokens/s"}
    return [
        LabelledPlot(name, draw_course(points, title=name, unit=units.get(name, ""), breaks=breaks))
        for name, points in plotted.items()
    ]


GPU_FIGURES = {
    "use_percent": ("use", "%"),
    "memory_gib": ("memory", "GiB"),
    "temperature_c": ("temperature", "°C"),
    "power_watts": ("power", "W"),
}
"""What is drawn of each GPU, with its unit."""


def machine_courses(vitals: Sequence[Vitals], steps: Sequence[TrainStep]) -> list[LabelledPlot]:
    """Machine metrics over the minutes of the run; metrics that were never measured are left out."""
    if not vitals:
        return []
    begun = vitals[0].at
    breaks = [
        (new.at - begun) / 60 for old, new in pairwise(steps) if new.step <= old.step and new.at > begun
    ]
    figures: dict[str, tuple[str, Callable[[Vitals], float | None]]] = {
        "Memory of the worker": ("GiB", lambda item: item.memory_gib),
        "CPU": ("cores", lambda item: item.cpu_cores),
    }
    devices = sorted({device.index for sample in vitals for device in sample.devices})
    for index in devices:
        name = f"GPU {index}" if len(devices) > 1 else "GPU"
        for key, (figure, unit) in GPU_FIGURES.items():
            figures[f"{name} {figure}"] = (unit, partial(_read_device, index=index, key=key))
    courses = []
    for name, (unit, read) in figures.items():
        points = [
            ((sample.at - begun) / 60, value) for sample in vitals if (value := read(sample)) is not None
        ]
        if points:
            figure = draw_course(points, title=name, unit=unit, along="minute", breaks=breaks)
            courses.append(LabelledPlot(f"{name}, {unit}", figure))
    return courses


def _read_device(sample: Vitals, *, index: int, key: str) -> float | None:
    return next((getattr(device, key) for device in sample.devices if device.index == index), None)


def _list_looks(outcome: TrainOutcome) -> Document:
    viewed = Document("Evaluations during training")
    rows = []
    for look in outcome.looks:
        value = number(look.value) if look.metric == LOSS else percent(look.value)
        note = "" if look.compared else "[dim]fewer cases than the others: not compared[/]"
        note = "[green]best[/]" if look.step == outcome.best_step else note
        rows.append((look.step, f"[bold]{value}[/]", look.cases, duration(look.seconds), note))
    metric = Name(quote(html.name_of(outcome.looks[0].metric))) if outcome.looks else ""
    columns = ("Step", metric, "Cases", "Took", "")
    viewed.table(columns, rows, right=columns[:-1])
    return viewed


_RATIOS = ((1.25, 1.5), (1.4, 2.0), (1.7, 3.0), (2.2, 5.0), (3.2, 10.0), (10.0, 100.0), (32.0, 1000.0))
"""Ratios to mark on both sides of 1: those that reach the farthest value."""


def draw_plan(residuals: Sequence[Residual], *, width: float = 760) -> Markup:
    """Planned range as a band around 1, the actual value as a dot; equal ratios at equal distances."""
    if not residuals:
        return charts.draw_nothing("Plan against reality", width)
    layout = charts.RowLayout(width=width, count=len(residuals), body=22.0, note_width=78.0)
    ratios = [
        tuple(value / (row.planned.value or 1.0) for value in (row.planned.low, row.planned.high, row.actual))
        for row in residuals
    ]
    values = [value for row in ratios for value in row if value > 0]
    farthest = max([max(1 / value, value) for value in values] or [1.0])
    marks = next((ratios for ratios in _RATIOS if ratios[-1] >= farthest * 1.05), _RATIOS[-1])
    x = charts.Scale(1 / marks[-1], marks[-1], layout.start, layout.end, log=True)
    parts = []
    for ratio in (*(1 / mark for mark in reversed(marks)), 1.0, *marks):
        parts += layout.mark(
            x(ratio), "as planned" if ratio == 1 else f"× {round(ratio, 2):g}", strong=ratio == 1
        )
    for i, (row, (low, high, actual)) in enumerate(zip(residuals, ratios, strict=True)):
        inside = low - 1e-9 <= actual <= high + 1e-9
        middle = layout.middle(i)
        left, right = x(low) - 1.5, x(high) + 1.5
        parts += layout.name(i, html.name_of(row.name), change(row.off))
        parts.append(
            charts.element("rect", x=left, y=middle - 6, width=right - left, height=12, rx=3, class_="band")
        )
        parts.append(
            charts.element(
                "circle", cx=x(actual), cy=middle, r=5, class_="dot after" if inside else "dot off"
            )
        )
    return charts.drawing(
        *parts,
        width=width,
        height=layout.height,
        title="Plan against reality",
        description="; ".join(
            f"{html.name_of(row.name)}: {actual:.2f} times the planned value"
            for row, (_, _, actual) in zip(residuals, ratios, strict=True)
        ),
    )


def draw_both_losses(curves: Sequence[Sequence[TrainStep]], *, width: float) -> Markup:
    """The trends of two runs in one plot: A grey, B green. Each step counts as it was last done."""
    title = "Training loss of both runs"
    found = [sorted({s.step: s.loss for s in curve if math.isfinite(s.loss)}.items()) for curve in curves]
    if not all(found):
        return charts.draw_nothing(title, width)
    height, left, right, top, bottom = 260.0, 44.0, 10.0, 12.0, 36.0
    last = max(points[-1][0] for points in found)
    marks = charts.round_ticks(0.0, max(loss for points in found for _, loss in points), count=5)
    x = charts.Scale(0, max(last, 1), left, width - right)
    y = charts.Scale(marks[0], marks[-1], height - bottom, top)
    parts = charts.draw_frame(x, y, marks, last=last, along="step", width=width, height=height)
    for points, kind in zip(found, ("before", "after"), strict=True):
        thinned = points[:: max(len(points) // charts.MOST_CURVE_POINTS, 1)]
        levels = charts.smooth([loss for _, loss in thinned], reach=max(len(thinned) // 16, 1))
        spots = [(x(step), y(level)) for (step, _), level in zip(thinned, levels, strict=True)]
        parts.append(charts.path(spots, class_=f"trend {kind}"))
    ends = [f"{name} ends at {points[-1][1]:.3g}" for name, points in zip("AB", found, strict=True)]
    return charts.drawing(*parts, width=width, height=height, title=title, description="; ".join(ends))
