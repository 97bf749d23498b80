"""`graft run --quick`: train and evaluate on a part of the rows, to see in minutes whether a base learns.

Input: an open project. Output: the outputs of the steps up to the evaluation, whose report says that it is a
trial. Never gated and never released: what it shows decides nothing.
"""

from dataclasses import replace
from typing import Any

from graftwork.pipeline.run_plan import plan_run
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import STEPS, run_pipeline, with_needs
from graftwork.project.open_project import OpenProject
from graftwork.records.plan import RunPlan
from graftwork.train.all_models import with_train

LAST_STEP = "evaluate"
QUICK_MINUTES = 10.0
ROWS, CASES = 160, 40
FEWEST_ROWS, FEWEST_CASES = 32, 16
LATENCY_CASES = 2


def run_quick(work: OpenProject) -> StepOutputs:
    """One epoch over few rows, then few cases; both fewer where the plan would exceed the minutes."""
    work = replace(work, quick=True)
    trial = _shorten(work, rows=ROWS, cases=CASES)
    planned = _plan(trial)
    if planned.minutes.value > QUICK_MINUTES:
        part = QUICK_MINUTES / planned.minutes.value
        rows, cases = max(FEWEST_ROWS, round(ROWS * part)), max(FEWEST_CASES, round(CASES * part))
        trial = _shorten(work, rows=rows, cases=cases)
        planned = _plan(trial)
    settings = trial.settings
    trial.reporter.info(
        f"a quick trial of {settings.train.max_rows} rows and {settings.evaluate.max_cases} cases, planned "
        f"{planned.minutes.value:.0f} min ({planned.minutes.low:.0f}–{planned.minutes.high:.0f}); "
        "it is never released"
    )
    return run_pipeline(trial, upto=LAST_STEP)


def _plan(work: OpenProject) -> RunPlan:
    steps = [step for step in STEPS if step.name in with_needs(LAST_STEP)]
    return plan_run(work, steps, only_after_deploy=(), outputs=run_pipeline(work, upto="plan"))


def _shorten(work: OpenProject, *, rows: int, cases: int) -> OpenProject:
    """The project with a smaller run. What is smaller in graft.yaml already stays."""
    train, evaluate = work.settings.train, work.settings.evaluate
    changes: dict[str, Any] = {
        "epochs": min(train.epochs, 1),
        "max_rows": min(train.max_rows or rows, rows),
    }
    changed = with_train(work, changes)
    settings = changed.project.settings.model_copy(
        update={
            "evaluate": evaluate.model_copy(
                update={
                    "max_cases": min(evaluate.max_cases or cases, cases),
                    "latency_cases": min(evaluate.latency_cases, LATENCY_CASES),
                }
            )
        }
    )
    return replace(changed, project=replace(changed.project, settings=settings))
