"""Each kind of result once, as a document that the terminal, the static pages and `graft ui` print."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftwork.records.base import Record
    from graftwork.views.document import Document

VIEWS = {
    "CycleState": "cycle.view_cycle",
    "CycleStatus": "cycle.view_status",
    "CyclePlan": "cycle.view_plan",
    "WeekTick": "cycle.view_tick",
    "WeekStatus": "cycle.view_week_status",
}
"""Type of record -> module of this folder and its function: a module is imported when it is used."""


def view(record: "Record") -> "Document | None":
    """The record as a document; None where there is no view of its type."""
    named = VIEWS.get(type(record).__name__)
    if named is None:
        return None
    module, _, function = named.partition(".")
    viewed: Document = getattr(import_module(f"graftwork.views.{module}"), function)(record)
    return viewed
