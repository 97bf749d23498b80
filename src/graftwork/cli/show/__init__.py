"""Records as tables for the terminal, one function per type of record."""

from importlib import import_module

from rich.console import Console

from graftwork.records.base import Record

MODULES = {
    "data": ("Audit", "PreparedData", "RepairPlan", "RepairOutcome"),
    "training": (
        *("Plan", "RunPlan", "TrainOutcome", "TrainedAll", "ExportedAdapter", "MergedAdapter"),
        *("SweepResult", "Federation", "FederationPlan", "PulledModel", "LocalModels", "RemovedModels"),
    ),
    "evaluation": ("Report", "Evaluated", "Verdict", "WrittenReport"),
    "releases": ("Release", "TryOut"),
    "fleet": (
        "FleetPlaces",
        "RunOffers",
        "FleetJobs",
        "FleetJob",
        "Reconciled",
        "CostSummary",
        "DrillReport",
        "ExportedBundle",
        "ImageFiles",
    ),
    "cycle": ("CycleState", "CycleStatus", "CyclePlan", "WeekTick", "WeekStatus"),
    "live": ("TrainedRouter", "EscalationForecast", "EscalationLive"),
}


def show(console: Console, record: Record) -> None:
    """Print the record as tables, or as JSON if there is no printer for it."""
    name = type(record).__name__
    module = next((module for module, names in MODULES.items() if name in names), None)
    if module is None:
        console.print_json(record.to_json())
    else:
        import_module(f"graftwork.cli.show.{module}").PRINTERS[name](console, record)
