"""The plan of a run, how it compares with past runs, and what a preflight says of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from graftwork.grading.metrics import name_of
from graftwork.records.base import Figure
from graftwork.records.plan import Plan, Residual, RunPlan
from graftwork.text.wording import duration, figure_text, plural
from graftwork.views.document import Document, quote

if TYPE_CHECKING:
    from graftwork.evaluate.preflight import MetricTrial
    from graftwork.pipeline.preflight import Preflight
    from graftwork.plan.project import PastResiduals

NAMES = {
    "total_parameters": "parameters of the base",
    "trainable_parameters": "trainable parameters",
    "peak_memory_gib": "peak memory",
    "disk_gib": "disk",
    "tokens": "tokens",
    "trained_tokens": "trained tokens",
    "steps": "steps",
    "tokens_per_second": "throughput",
    "minutes": "time",
}


def view_plan(plan: Plan) -> Document:
    viewed = Document("Plan")
    viewed.line(
        f"{plan.method} on [bold]{quote(plan.base)}[/], {plan.dtype}, {plan.device.name} "
        f"({plan.device.threads} threads); certainty: {plan.certainty}"
    )
    figures: dict[str, Figure] = {title: getattr(plan, name) for name, title in NAMES.items()}
    viewed.table(
        ("figure", "planned", "range"),
        [(title, _planned(figure), _spread(figure)) for title, figure in figures.items()],
        right=("planned",),
    )
    if plan.base_note:
        viewed.line(f"[yellow]base:[/] {quote(plan.base_note)}")
    viewed.line(*(f"[dim]{quote(note)}[/]" for note in plan.notes))
    return viewed


def _planned(figure: Figure) -> str:
    return f"{figure_text(figure.value)} {figure.unit}".strip()


def _spread(figure: Figure) -> str:
    return "" if figure.low == figure.high else f"{figure_text(figure.low)} … {figure_text(figure.high)}"


def view_residuals(residuals: Sequence[Residual]) -> Document:
    """Planned and actual figures of a run, and of their parts."""
    viewed = Document("Plan against reality")
    columns = ("figure", "planned", "range", "actual", "error")
    viewed.table(columns, map(_residual, residuals), right=("planned", "actual", "error"))
    return viewed


def _residual(residual: Residual) -> tuple[str, ...]:
    return (
        _name_figure(residual.name),
        _planned(residual.planned),
        _spread(residual.planned),
        f"[{'green' if residual.inside else 'yellow'}]{figure_text(residual.actual)}[/]",
        f"{100 * residual.off:+.0f} %",
    )


def view_run_plan(plan: RunPlan) -> Document:
    """Estimated time of each step and of the whole run."""
    viewed, rows = Document("Run"), list[tuple[str, ...]]()
    for stage in plan.stages:
        figure = stage.seconds
        if figure.value == 0:
            rows.append((stage.stage, "", "", f"[dim]{stage.state}[/]"))
            continue
        state = "" if stage.state == "to do" else stage.state
        spread = f"{duration(figure.low)} … {duration(figure.high)}"
        rows.append((stage.stage, duration(figure.value), spread, state))
    whole = plan.minutes
    spread = f"{duration(60 * whole.low)} … {duration(60 * whole.high)}"
    rows.append(("[bold]whole run[/]", f"[bold]{duration(60 * whole.value)}[/]", spread, ""))
    viewed.table(("step", "planned", "range", ""), rows, right=("planned",))
    if plan.rough:
        viewed.line(
            "[dim]rough estimate from the size of the logs: the dataset is not prepared yet[/]",
        )
    return viewed


def view_past(found: "PastResiduals") -> Document:
    """The figures of each run, then the bias over all runs."""
    viewed, rows = Document("Past runs"), list[tuple[str, ...]]()
    if not found.runs:
        viewed.line("no run of this project has finished yet: `graft train` starts one")
        return viewed
    for run in found.runs:
        first = (f"{quote(run.run_id)}\n[dim]{quote(run.recorded_at[:16])}[/]", quote(run.device))
        for residual in run.residuals:
            planned = residual.planned
            if "." in residual.name or planned.low == planned.high == residual.actual:
                # Parts are in the JSON and on the page of the run; exact figures are no estimates.
                continue
            rows.append((*first, *_residual(residual)))
            first = ("", "")
    columns = ("run", "on", "figure", "planned", "range", "actual", "error")
    viewed.table(columns, rows, right=("planned", "error"))
    viewed.table(
        ("bias over past runs", "runs", "median", "range", "within the planned range"),
        [
            (
                _name_figure(bias.figure),
                str(bias.runs),
                f"{100 * bias.off.value:+.0f} %",
                f"{100 * bias.off.low:+.0f} … {100 * bias.off.high:+.0f} %",
                f"{100 * bias.inside.value:.0f} %",
            )
            for bias in found.biases
        ],
        right=("runs",),
    )
    return viewed


def _name_figure(figure: str) -> str:
    whole, _, part = figure.partition(".")
    title = NAMES.get(whole, whole)
    return f"[dim]{title}: {quote(part)}[/]" if part else title


def view_preflight(found: "Preflight") -> Document:
    viewed = Document("Preflight")
    cases = f"{plural(found.cases, 'held-out case')} after the split"
    viewed.line(f"{cases}. {quote(found.power)}".rstrip())
    # The score of each metric on correct answers and on corrupted ones.
    viewed.table(
        ("metric", "cases", "log replies", "corrupted", "constant answer"),
        map(_trial, found.metrics),
        right=("cases",),
    )
    for problem in found.problems:
        mark = "[red]✗[/]" if problem.severity == "error" else "[yellow]![/]"
        why = f": {quote(problem.why)}" if problem.why else ""
        viewed.line(f"{mark} {quote(problem.what)}{why}")
        if problem.fix:
            viewed.line(f"  [dim]fix:[/] {quote(problem.fix)}")
    viewed.add(view_run_plan(found.run))
    if hint := _how_to_shorten(found.run):
        viewed.line(hint)
    if found.errors:
        viewed.line(f"[bold red]not ready[/]: {plural(len(found.errors), 'error')}")
    else:
        viewed.line("[bold green]ready[/]: `graft run` trains, evaluates and gates.")
    return viewed


def _trial(trial: "MetricTrial") -> tuple[str, ...]:
    graded = (trial.own, trial.spoiled, trial.constant)
    shares = ("–" if share is None else f"{100 * share:.1f} %" for share in graded)
    return quote(name_of(trial.name)), str(trial.cases), *shares


LONG_RUN_MINUTES = 240.0
SHORTER = {
    "train": "fewer train.epochs or a smaller data.max_tokens",
    "evaluate": "a smaller evaluate.max_new_tokens or data.test",
}
"""Settings that shorten a stage."""


def _how_to_shorten(run: RunPlan) -> str | None:
    """What shortens a run of many hours: the settings of its longest stage, or another machine."""
    longest = max(run.stages, key=lambda stage: stage.seconds.value, default=None)
    if longest is None or run.minutes.value < LONG_RUN_MINUTES:
        return None
    here = SHORTER.get(longest.stage)
    elsewhere = "`graft plan compare` estimates it on other machines"
    return f"a long run: {here} shortens it here; {elsewhere}" if here else f"a long run: {elsewhere}"
