"""Each kind of result once, as a document that the terminal, the static pages and `graft ui` print."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.records.base import Record
    from graftwork.views.document import Document

VIEWS = {
    "Audit": "audit.view_audit",
    "PreparedData": "dataset.view_prepared",
    "ProjectStatus": "status.view_project_status",
    "PromptDrift": "status.view_drift",
    "SpecReport": "components.view_spec_report",
    "GenerationOutcome": "components.view_generation",
    "ProvenanceReport": "components.view_provenance",
    "EpisodeFiles": "components.view_episodes",
    "LogScoresAudit": "dataset.view_score_audit",
    "RepairPlan": "dataset.view_repair_plan",
    "RepairOutcome": "dataset.view_repair",
    "DatasetDiff": "dataset.view_diff",
    "Trace": "dataset.view_trace",
    "Plan": "plan.view_plan",
    "PastResiduals": "plan.view_past",
    "WeekSchedule": "plan.view_week",
    "ComparedProposal": "week.view_proposal",
    "RunPlan": "plan.view_run_plan",
    "Linted": "plan.view_lint",
    "RewardCheck": "run.view_reward_check",
    "ExportedTaskset": "run.view_taskset",
    "Preflight": "plan.view_preflight",
    "FitAnswer": "plan.view_fit",
    "ServeAnswer": "plan.view_serving",
    "PlaceComparison": "comparison.view_comparison",
    "Purchase": "comparison.view_purchase",
    "TrainOutcome": "run.view_outcome",
    "TrainedAll": "run.view_trained_all",
    "BackgroundRun": "run.view_background_run",
    "StopResult": "run.view_stop",
    "ExportedAdapter": "run.view_exported",
    "MergedAdapter": "run.view_merged",
    "SweepResult": "run.view_sweep",
    "BaseComparison": "evaluation.view_base_comparison",
    "FederationPlan": "run.view_federation_plan",
    "Federation": "run.view_federation",
    "PulledModel": "run.view_pulled",
    "LocalModels": "run.view_models",
    "RemovedModels": "run.view_removed",
    "Report": "evaluation.view_report",
    "Evaluated": "evaluation.view_evaluated",
    "Verdict": "evaluation.view_verdict",
    "WrittenReport": "evaluation.view_written",
    "GatedAll": "evaluation.view_gated",
    "NextStart": "evaluation.view_next_start",
    "ImportedEvaluation": "evaluation.view_imported",
    "CalibratedJudge": "evaluation.view_calibration",
    "Savings": "evaluation.view_savings",
    "Release": "release.view_release",
    "Garbage": "release.view_garbage",
    "LineageGraph": "lineage.view_lineage",
    "TryOut": "release.view_try_out",
    "ABResult": "release.view_ab",
    "AliasMove": "release.view_move",
    "CanaryReport": "release.view_canary",
    "ExportedCaptures": "dataset.view_exported_captures",
    "SelectedCaptures": "dataset.view_selected_captures",
    "Forgotten": "dataset.view_forgotten",
    "Corrections": "dataset.view_corrections",
    "TrainedRouter": "endpoint.view_router",
    "ShadowSummary": "endpoint.view_shadow",
    "EscalationForecast": "endpoint.view_forecast",
    "EscalationLive": "endpoint.view_live",
    "FleetPlaces": "job.view_places",
    "RunOffers": "job.view_offers",
    "FleetJobs": "job.view_jobs",
    "FleetJob": "job.view_job",
    "Reconciled": "job.view_reconciled",
    "CostSummary": "job.view_costs",
    "ExportedBundle": "job.view_bundle",
    "ImageFiles": "job.view_image",
    "CycleState": "cycle.view_cycle",
    "CycleStatus": "cycle.view_status",
    "CyclePlan": "cycle.view_plan",
    "WeekTick": "week.view_tick",
    "WeekStatus": "week.view_week_status",
}
"""Type of record -> module of this folder and its function: a module is imported when it is used."""


def view(record: "Record") -> "Document | None":
    """The record as a document; None if there is no view of its type."""
    named = VIEWS.get(type(record).__name__)
    if named is None:
        return None
    module, _, function = named.partition(".")
    viewed: Document = getattr(import_module(f"graftwork.views.{module}"), function)(record)
    return viewed
