"""`graft run --quick`: train and evaluate on a part of the rows, to see in minutes whether a base learns.

Input: an open project. Output: the outputs of the steps up to the evaluation, whose report says that it is a
trial. Never gated and never released: what it shows decides nothing.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from graftwork.data.project import PreparedData
from graftwork.pipeline.run_plan import plan_run
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import STEPS, run_pipeline, with_needs
from graftwork.project.open_project import OpenProject, name_entry, timestamp
from graftwork.records.base import fingerprint
from graftwork.records.plan import RunPlan
from graftwork.train.all_models import with_train

LAST_STEP = "evaluate"
QUICK_MINUTES = 10.0
LATENCY_CASES = 2
SIZE = "quick-size"
"""The ledger's name for the size that was chosen."""


class QuickSize(NamedTuple):
    rows: int
    cases: int


LARGEST, SMALLEST = QuickSize(160, 40), QuickSize(32, 16)


def run_quick(work: OpenProject) -> StepOutputs:
    """One epoch over few rows, then few cases; both fewer where the plan would exceed the minutes."""
    work = replace(work, quick=True)
    trial = shorten(work, choose_size(work))
    planned, settings = _plan(trial), trial.settings
    trial.reporter.info(
        f"a quick trial of {settings.train.max_rows} rows and {settings.evaluate.max_cases} cases, planned "
        f"{planned.minutes.value:.0f} min ({planned.minutes.low:.0f}–{planned.minutes.high:.0f}); "
        "it is never released"
    )
    return run_pipeline(trial, upto=LAST_STEP)


def choose_size(work: OpenProject) -> QuickSize:
    """The rows and cases that fit the minutes. They are kept: a trial that is continued is the same run,
    whatever its first part showed about this machine.
    """
    settings = work.settings
    dataset = run_pipeline(work, upto="prepare").get("prepare", PreparedData).dataset
    inputs = fingerprint(
        [dataset.content_hash, settings.train.what_is_learned(), settings.evaluate.model_dump(mode="json")]
    )
    chosen = work.ledger.get(name_entry(work, SIZE))
    if chosen is not None and chosen.fingerprint == inputs:
        return QuickSize(**chosen.output)
    size, minutes = LARGEST, _plan(shorten(work, LARGEST)).minutes.value
    if minutes > QUICK_MINUTES:
        part = QUICK_MINUTES / minutes
        size = QuickSize(
            rows=max(SMALLEST.rows, round(LARGEST.rows * part)),
            cases=max(SMALLEST.cases, round(LARGEST.cases * part)),
        )
    entry = name_entry(work, SIZE)
    work.ledger.put(entry, fingerprint=inputs, output=size._asdict(), finished_at=timestamp(), seconds=0.0)
    return size


def _plan(work: OpenProject) -> RunPlan:
    steps = [step for step in STEPS if step.name in with_needs(LAST_STEP)]
    return plan_run(work, steps, only_after_deploy=(), outputs=run_pipeline(work, upto="plan"))


def shorten(work: OpenProject, size: QuickSize) -> OpenProject:
    """The project with a smaller run. What is smaller in graft.yaml already stays."""
    train, evaluate = work.settings.train, work.settings.evaluate
    changes: dict[str, Any] = {
        "epochs": min(train.epochs, 1),
        "max_rows": min(train.max_rows or size.rows, size.rows),
    }
    changed = with_train(work, changes)
    settings = changed.project.settings.model_copy(
        update={
            "evaluate": evaluate.model_copy(
                update={
                    "max_cases": min(evaluate.max_cases or size.cases, size.cases),
                    "latency_cases": min(evaluate.latency_cases, LATENCY_CASES),
                }
            )
        }
    )
    return replace(changed, project=replace(changed.project, settings=settings))
