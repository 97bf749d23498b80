"""Everything that can be found out before the first training step, in seconds and without loading weights.

In: an open project with a prepared dataset and a plan. Out: problems, how long each stage will take, and
what disk and port look like. `graft run` does this by itself before it trains; `graft run --dry-run` does
nothing else.
"""

import os
from dataclasses import replace
from pathlib import Path

from graftwork.evaluate.power import what_cases_show
from graftwork.evaluate.preflight import MetricTrial, Problem, Severity, try_out
from graftwork.evaluate.subjects import parse_subjects
from graftwork.files.dataset import iterate_rows
from graftwork.grading.grade import require_gradable
from graftwork.grading.interface import GradeContext
from graftwork.grading.metrics import name_of
from graftwork.pipeline.doctor.machine import DoctorCheck, check_disk
from graftwork.pipeline.doctor.project import check_port
from graftwork.pipeline.evaluation import doubts_about_judge, open_grading
from graftwork.pipeline.evaluation_cases import read_held_out
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.project.settings import ProjectSettings
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.plan import Plan, RunPlan
from graftwork.records.report import Case


class Preflight(Record):
    """What is known before training."""

    cases: int
    metrics: tuple[MetricTrial, ...]
    problems: tuple[Problem, ...]
    run: RunPlan
    """How long each stage takes."""
    power: str = ""
    """What so many held-out cases can show, in a sentence."""

    @property
    def errors(self) -> tuple[Problem, ...]:
        return tuple(problem for problem in self.problems if problem.severity == "error")


def require_ready(work: OpenProject, made: StepOutputs, run: RunPlan) -> Preflight:
    """Raise UserMistake where training would be in vain; return a warning where something is doubtful."""
    found = run_preflight(work, made, run)
    for problem in found.problems:
        if problem.severity == "warning":
            work.reporter.info(f"{problem.what}: {problem.why}")
    if found.errors:
        first, more = found.errors[0], len(found.errors) - 1
        also = "; ".join(problem.what for problem in found.errors[1:])
        raise UserMistake(
            first.what,
            why=f"{first.why}{f' (and {more} more: {also})' if more else ''}",
            fix=f"{first.fix}; `graft run --dry-run` checks again in seconds",
            where=str(work.project.file),
        )
    work.reporter.info(f"{found.cases} held-out cases: every metric and every rule was tried")
    return found


def run_preflight(work: OpenProject, made: StepOutputs, run: RunPlan) -> Preflight:
    """Grade the log's own replies and spoiled ones, and try every rule; `run` is the plan of the stages."""
    prepared, plan = made.get("prepare", PreparedData), made.get("plan", Plan)
    evaluate, gate = work.settings.evaluate, work.settings.gate
    problems: list[Problem] = []
    cases: tuple[Case, ...] = ()
    if evaluate.cases is None and not any(iterate_rows(Path(prepared.folder), "test")):
        problems.append(_nothing_held_out(work))
    else:
        cases = read_held_out(work, Path(prepared.folder))
    trials: tuple[MetricTrial, ...] = ()
    power = ""
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
    problems += [
        Problem(
            severity="warning",
            what=f"{name_of(metric)} may not decide anything: the judge is not calibrated",
            why=why,
            fix="run `graft eval calibrate`, or take the judge out of the rules of the gate",
        )
        for metric, why in doubts_about_judge(work).items()
    ]
    problems += find_missing_keys(work.settings)
    problems += _look_at_machine(work, plan)
    return Preflight(
        cases=len(cases),
        metrics=trials,
        problems=tuple(sorted(problems, key=lambda problem: problem.severity != "error")),
        run=run,
        power=power,
    )


def _with_checks(work: OpenProject, context: GradeContext) -> GradeContext:
    checks = {check.name: check for check in work.settings.evaluate.checks}
    return replace(context, checks=checks)


def _nothing_held_out(work: OpenProject) -> Problem:
    share = work.settings.data.test
    why = f"data.test is {share:g}" if share == 0 else "every row was dropped or assigned to another split"
    return Problem(
        severity="error",
        what="there is no held-out row, so no rule of the gate could be judged",
        why=why,
        fix="give data.test a share, such as 0.2; or name a file of cases with evaluate.cases; or `graft "
        "train`, which asks for no verdict",
    )


def find_missing_keys(settings: ProjectSettings) -> list[Problem]:
    """Variables that should hold the keys of endpoints that training or evaluation will ask, and do not."""
    variables: dict[str, str | None] = {}
    if (judge := settings.evaluate.judge) is not None:
        variables["evaluate.judge.api_key_env"] = judge.api_key_env
    if (rollouts := settings.train.rollouts.endpoint) is not None:
        variables["train.rollouts.endpoint.api_key_env"] = rollouts.api_key_env
    for subject in parse_subjects(settings.evaluate.subjects):
        if subject.endpoint is not None:
            variables[f"evaluate.subjects: {subject.name}"] = subject.endpoint.api_key_env
    return [
        Problem(
            severity="error",
            what=f"the environment variable {variable} is empty or not set",
            why=f"it should hold the key for {where}",
            fix=f"export {variable}=…",
        )
        for where, variable in variables.items()
        if variable is not None and not os.environ.get(variable, "").strip()
    ]


def _look_at_machine(work: OpenProject, plan: Plan) -> list[Problem]:
    """Disk and port, as the doctor sees them; a port in use does not stop a training."""
    disk, port = check_disk(work.project.state, needed=plan.disk_gib.high), check_port(work.project)
    return [*_as_problem(disk, severity="error"), *_as_problem(port, severity="warning")]


def _as_problem(check: DoctorCheck, *, severity: Severity) -> list[Problem]:
    if check.result == "ok":
        return []
    return [Problem(severity=severity, what=f"{check.name}: {check.found}", fix=check.fix)]
