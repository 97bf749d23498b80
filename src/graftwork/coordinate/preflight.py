"""Everything that can be found out before the first training step, in seconds and without loading weights.

In: an open workplace with a prepared dataset and a plan. Out: problems, how long each stage will take, and
what disk and port look like. `graft run` does this by itself before it trains; `graft run --dry-run` does
nothing else.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from graftwork.coordinate.doctor.check import Check
from graftwork.coordinate.doctor.machine import look_at_disk
from graftwork.coordinate.doctor.project_files import look_at_port
from graftwork.coordinate.evaluate_context import open_grading
from graftwork.coordinate.step import Made
from graftwork.coordinate.steps.prepare import Prepared
from graftwork.coordinate.workplace import Workplace
from graftwork.evaluate.cases import choose_cases
from graftwork.evaluate.metrics import GradeContext, require_gradable
from graftwork.evaluate.power import what_cases_show
from graftwork.evaluate.preflight import MetricTrial, Problem, Severity, try_out
from graftwork.files.dataset_folder import iterate_rows
from graftwork.records.base import Record
from graftwork.records.dataset import Row
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.figure import Figure
from graftwork.records.plan import Plan

FORWARD_AGAINST_STEP = 2.5
"""Tokens that are only read, for each that is trained on in the same time."""
DECODE_COST = 3.0
"""What a generated token takes, in tokens that are only read: it reads all weights again."""
LOADING_MINUTES = 0.25
EVERYTHING_ELSE_MINUTES = 0.5
"""Gate, release, a trial of the served release, report."""
MEASURED_SECONDS = 5.0
"""An evaluation that took less had its answers already: it says nothing of the next."""


class Stage(Record):
    """What will be done, and how long it takes; `source` says where that is known from."""

    step: str
    minutes: Figure
    source: str


class Preflight(Record):
    """What is known before training."""

    cases: int
    metrics: tuple[MetricTrial, ...]
    problems: tuple[Problem, ...]
    stages: tuple[Stage, ...]
    minutes: Figure
    """Of the whole run."""
    power: str = ""
    """What so many held-out cases can show, in a sentence."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")


def require_ready(work: Workplace, made: Made) -> Preflight:
    """Look ahead; a UserMistake where training would be in vain, a word where something is doubtful."""
    found = look_ahead(work, made)
    for problem in found.problems:
        if problem.severity == "warning":
            work.narrator.word(f"{problem.what}: {problem.why}")
    if found.errors:
        first, more = found.errors[0], len(found.errors) - 1
        also = "; ".join(problem.what for problem in found.errors[1:])
        raise UserMistake(
            first.what,
            why=f"{first.why}{f' (and {more} more: {also})' if more else ''}",
            fix=f"{first.fix}; `graft run --dry-run` checks again in seconds",
            where=str(work.project.file),
        )
    whole = found.minutes
    work.narrator.word(
        f"{found.cases} held-out cases, every metric and rule tried; from here about {whole.value:.0f} min "
        f"({whole.low:.0f}–{whole.high:.0f})"
    )
    return found


def look_ahead(work: Workplace, made: Made) -> Preflight:
    """Grade the log's own replies and spoiled ones, try every rule, estimate every stage."""
    prepared, plan = made.get("prepare", Prepared), made.get("plan", Plan)
    evaluate, gate = work.settings.evaluate, work.settings.gate
    rows = list(iterate_rows(Path(prepared.folder), "test"))
    problems: list[Problem] = []
    if not rows:
        problems.append(_nothing_held_out(work))
    trials: tuple[MetricTrial, ...] = ()
    power = ""
    cases = choose_cases(rows, most=evaluate.max_cases) if rows else ()
    if cases:
        try:
            grading = open_grading(work, cases)
            context = grading.context()
            require_gradable(_with_checks(work, context))
            found = try_out(cases, evaluate=evaluate, gate=gate, context=context)
            trials, problems = found.metrics, [*problems, *found.problems]
        except GraftError as error:
            problems.append(Problem(severity="error", what=error.what, why=error.why, fix=error.fix))
        power = what_cases_show(len(cases), confidence=evaluate.confidence).sentence
    problems += _look_at_machine(work, plan)
    kept = {case.id for case in cases}
    stages = _estimate(work, plan, [row for row in rows if row.id in kept])
    return Preflight(
        cases=len(cases),
        metrics=trials,
        problems=tuple(sorted(problems, key=lambda problem: problem.severity != "error")),
        stages=stages,
        minutes=_total(stages),
        power=power,
    )


def _with_checks(work: Workplace, context: GradeContext) -> GradeContext:
    checks = {check.name: check for check in work.settings.evaluate.checks}
    return replace(context, checks=checks)


def _nothing_held_out(work: Workplace) -> Problem:
    share = work.settings.data.test
    why = f"data.test is {share:g}" if share == 0 else "every row was dropped or dealt to another split"
    return Problem(
        severity="error",
        what="there is no held-out row, so no rule of the gate could be judged",
        why=why,
        fix="give data.test a share, such as 0.2; or `graft train`, which asks for no verdict",
    )


def _look_at_machine(work: Workplace, plan: Plan) -> list[Problem]:
    """Disk and port, as the doctor sees them; a port in use does not stop a training."""
    disk, port = look_at_disk(work.project.state, needed=plan.disk_gib.high), look_at_port(work.project)
    return [*_as_problem(disk, severity="error"), *_as_problem(port, severity="warning")]


def _as_problem(check: Check, *, severity: Severity) -> list[Problem]:
    if check.result == "ok":
        return []
    return [Problem(severity=severity, what=f"{check.name}: {check.found}", fix=check.fix)]


def _estimate(work: Workplace, plan: Plan, rows: Iterable[Row]) -> tuple[Stage, ...]:
    """Training by the plan; evaluation by the last one like it, or else by the plan's speed."""
    lengths = [(row.trained_from, len(row.tokens) - row.trained_from) for row in rows]
    stages = [Stage(step="train", minutes=plan.minutes, source="plan")]
    if lengths:
        stages.append(_estimate_evaluation(work, plan, lengths))
    rest = Figure.about(EVERYTHING_ELSE_MINUTES, down=0.3, up=3, unit="min")
    return (*stages, Stage(step="gate, release, try, report", minutes=rest, source="rule of thumb"))


def _estimate_evaluation(work: Workplace, plan: Plan, lengths: list[tuple[int, int]]) -> Stage:
    last = work.ledger.get("evaluate" if work.model == work.settings.main_model else f"evaluate@{work.model}")
    if last is not None and (asked := last.output.get("report", {}).get("cases")):
        minutes = last.seconds / 60 * len(lengths) / asked
        if last.seconds > MEASURED_SECONDS:
            figure = Figure.about(minutes, down=0.6, up=1.7, unit="min")
            return Stage(step="evaluate", minutes=figure, source="the last evaluation")
    read = sum(prompt for prompt, _ in lengths)
    written = sum(min(reply, work.settings.evaluate.max_new_tokens) for _, reply in lengths)
    speed = plan.tokens_per_second.value * FORWARD_AGAINST_STEP
    # The base is shown a worked example, which is another row in front of each prompt.
    each = (read * 1.5 + written * DECODE_COST) / max(speed, 1e-9) / 60
    subjects = 2 + (work.releases.aliases().get("champion") is not None)
    single = work.settings.evaluate.latency_cases / len(lengths) * each
    minutes = subjects * (each + single + LOADING_MINUTES)
    return Stage(
        step="evaluate",
        minutes=Figure.about(minutes, down=0.4, up=3, unit="min"),
        source="the plan's speed",
    )


def _total(stages: Iterable[Stage]) -> Figure:
    figures = [stage.minutes for stage in stages]
    return Figure(
        value=sum(figure.value for figure in figures),
        low=sum(figure.low for figure in figures),
        high=sum(figure.high for figure in figures),
        unit="min",
    )
