"""Step: the whole story on one page."""

from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.evaluate.escalation import read_forecast
from graftwork.evaluate.live.drift import measure_drift
from graftwork.evaluate.project import Evaluated, put_page, savings_of
from graftwork.evaluate.project_subjects import find_without_repaired
from graftwork.evaluate.settings import CostSettings
from graftwork.files.disk import file_digest, write_atomic
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps.release import TryOut
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record, fingerprint
from graftwork.records.dataset import Audit
from graftwork.records.live import EscalationForecast
from graftwork.records.plan import Plan
from graftwork.records.release import Release
from graftwork.records.report import Verdict
from graftwork.records.run import TrainOutcome
from graftwork.registry.project import full_alias
from graftwork.train.run_folder import read_journal
from graftwork.train.runs import read_vitals


class WrittenReport(Record):
    path: str
    sha256: str


def _do(work: OpenProject, made: StepOutputs) -> WrittenReport:
    from graftwork.views.page import AnswerPair, ReportPage, render_report

    outcome = made.get("train", TrainOutcome)
    released = "release" in made.outputs
    entries = {name: work.ledger.get(name_entry(work, name)) for name in made.outputs}
    pairs = (
        AnswerPair(
            question=tried.question,
            base_answer=tried.base_answer,
            adapter_answer=tried.release_answer,
            reference=tried.reference,
            release=tried.answered_by,
        )
        for tried in (made.get("try", TryOut).tried if released else ())
    )
    page = ReportPage(
        project=work.settings.project,
        audit=made.get("audit", Audit),
        dataset=made.get("prepare", PreparedData).dataset,
        plan=made.get("plan", Plan),
        steps=tuple(read_journal(work.project.runs / outcome.run_id)),
        outcome=outcome,
        vitals=read_vitals(work.project.runs / outcome.run_id),
        report=made.get("evaluate", Evaluated).report,
        verdict=made.get("gate", Verdict),
        release=made.get("release", Release) if released else None,
        side_by_side=tuple(pairs),
        seconds={name: entry.seconds if entry else None for name, entry in entries.items()},
        savings=savings_of(work, made.get("audit", Audit), made.get("prepare", PreparedData).dataset),
        evaluation_page=Path(put_page(work, made.get("evaluate", Evaluated)).page).name,
        without_repaired=f"model:{without}" if (without := find_without_repaired(work)) else "",
        drift=measure_drift(work),
        escalation=_find_forecast(work),
    )
    path = work.project.report_of(work.model)
    write_atomic(path, render_report(page))
    return WrittenReport(path=str(path), sha256=file_digest(path))


def _find_forecast(work: OpenProject) -> EscalationForecast | None:
    """The last forecast of escalation, if it is about this model."""
    found = read_forecast(work.project.state)
    return found if found is not None and found.model in ("", full_alias(work)) else None


def _depends_on(work: OpenProject, made: StepOutputs) -> list[Any]:
    found: list[Any] = [name for name in made.outputs if name in ("release", "try")]
    if (forecast := _find_forecast(work)) is not None:
        found.append({"escalation": fingerprint(forecast.model_dump(mode="json"))})
    costs = work.settings.evaluate.costs
    return found if costs == CostSettings() else [*found, costs.model_dump(mode="json")]


STEP = PipelineStep(
    name="report",
    title="write the report",
    needs=("audit", "prepare", "plan", "train", "evaluate", "gate"),
    makes=WrittenReport,
    depends_on=_depends_on,
    do=_do,
    still_there=lambda _work, written: (
        Path(written.path).exists() and file_digest(Path(written.path)) == written.sha256
    ),
)
