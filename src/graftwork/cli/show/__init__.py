"""Records as tables for the terminal, one function per type of record."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from graftwork.records.base import Record

PRINTERS = {
    "Audit": "data.show_audit",
    "PreparedData": "data.show_prepared",
    "RepairPlan": "data.show_plan",
    "RepairOutcome": "data.show_outcome",
    "DatasetDiff": "data.show_diff",
    "Trace": "data.show_trace",
    "Plan": "training.show_plan",
    "RunPlan": "training.show_run_plan",
    "TrainOutcome": "training.show_outcome",
    "TrainedAll": "training.show_trained_all",
    "ExportedAdapter": "training.show_exported",
    "MergedAdapter": "training.show_merged",
    "SweepResult": "training.show_sweep",
    "FederationPlan": "training.show_federation_plan",
    "Federation": "training.show_federation",
    "PulledModel": "training.show_pulled",
    "LocalModels": "training.show_models",
    "RemovedModels": "training.show_removed",
    "FitAnswer": "plan.show_fit",
    "Preflight": "plan.show_preflight",
    "ServeAnswer": "plan.show_serving",
    "Purchase": "costs.show_purchase",
    "Report": "evaluation.show_report",
    "Evaluated": "evaluation.show_evaluated",
    "Verdict": "evaluation.show_verdict",
    "WrittenReport": "evaluation.show_written",
    "Savings": "evaluation.show_savings",
    "Release": "releases.show_release",
    "TryOut": "releases.show_try_out",
    "ABResult": "releases.show_ab",
    "AliasMove": "releases.show_move",
    "CanaryReport": "releases.show_canary",
    "TrainedRouter": "live.show_router",
    "EscalationForecast": "live.show_forecast",
    "EscalationLive": "live.show_live",
    "ShadowSummary": "live.show_shadow",
    "FleetPlaces": "fleet.show_places",
    "RunOffers": "fleet.show_offers",
    "FleetJobs": "fleet.show_jobs",
    "FleetJob": "fleet.show_job",
    "Reconciled": "fleet.show_reconciled",
    "CostSummary": "fleet.show_costs",
    "ExportedBundle": "fleet.show_bundle",
    "ImageFiles": "fleet.show_image",
}
"""Type of record -> module of this folder and its function: a module is imported when it prints."""


def show(console: "Console", record: "Record") -> None:
    """Print the record as tables, or as JSON if there is no printer for it."""
    from graftwork.views import view
    from graftwork.views.terminal import print_document

    if (viewed := view(record)) is not None:
        print_document(console, viewed)
        return
    printer = PRINTERS.get(type(record).__name__)
    if printer is None:
        console.print_json(record.to_json())
    else:
        module, _, function = printer.partition(".")
        getattr(import_module(f"graftwork.cli.show.{module}"), function)(console, record)
