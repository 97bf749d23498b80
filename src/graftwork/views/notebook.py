"""Records as HTML tables, for notebooks.

In: a record. Out: escaped HTML: its plain fields, then a table for each field that holds several records.
Fields that may hold a secret are hidden as they are in `repr`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graftwork.records.base import Figure, Record
from graftwork.views.html import render

MOST_ROWS = 20
MOST_CHARACTERS = 200
FIELDS: dict[str, tuple[str, ...]] = {
    "Audit": ("verdict", "rows", "readable", "usable", "fit_to_train"),
    "Plan": (
        "base", "method", "device", "certainty", "fits", "trainable_parameters", "peak_memory_gib",
        "disk_gib", "tokens", "steps", "tokens_per_second", "minutes",
    ),
    "TrainOutcome": (
        "run_id", "steps", "epochs", "rows", "first_loss", "final_loss", "validation_loss_before",
        "validation_loss_after", "seconds", "tokens_per_second", "peak_memory_gib", "adapter_folder",
    ),
    "Verdict": ("decision", "reason"),
    "Release": ("id", "model", "base", "decision", "run_id", "created_at", "licence"),
}  # fmt: skip
"""The fields that are shown of records with many; of any other record, all that are plain."""
COLUMNS: dict[str, tuple[str, ...]] = {
    "Finding": ("severity", "code", "count", "title", "fix"),
    "RuleResult": ("rule", "outcome", "sentence"),
    "Residual": ("name", "planned", "actual"),
    "SubjectReport": ("subject",),
    "Comparison": ("metric", "baseline", "candidate", "n", "wins", "losses", "p_value"),
}
"""The columns of tables of records with many fields."""


class NotebookTable(NamedTuple):
    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    more: int
    """How many rows there are, where not all of them are shown; otherwise 0."""


def render_record(record: Record) -> str:
    """The record as HTML."""
    record = getattr(record, "report", record)
    shown = _fields(record)
    fields = [(_label(name), _cell(value)) for name, value in shown.items() if _is_plain(value)]
    tables = [table for name, value in dict(record).items() if (table := _table(name, value)) is not None]
    return _render(type(record).__name__, fields, tables)


def render_fields(title: str, fields: Mapping[str, str]) -> str:
    """Named values under a title, as HTML."""
    return _render(title, list(fields.items()), [])


def _render(title: str, fields: Sequence[tuple[str, str]], tables: Sequence[NotebookTable]) -> str:
    return render("notebook.html.jinja", title=title, fields=fields, tables=tables)


def _fields(record: Record) -> dict[str, Any]:
    hidden = {name: value for name, value in record.__repr_args__() if name is not None}
    chosen = FIELDS.get(type(record).__name__)
    if chosen is None:
        return hidden
    return {name: hidden.get(name, getattr(record, name)) for name in chosen}


def _is_plain(value: Any) -> bool:
    return value is not None and isinstance(value, str | int | float | Figure)


def _table(name: str, value: Any) -> NotebookTable | None:
    if not isinstance(value, tuple) or not value or not all(isinstance(item, Record) for item in value):
        return None
    kind = type(value[0])
    columns = COLUMNS.get(kind.__name__) or tuple(
        field for field in kind.model_fields if any(_is_plain(getattr(item, field)) for item in value)
    )
    rows = []
    for item in value[:MOST_ROWS]:
        fields = {**{column: getattr(item, column) for column in columns}, **_fields(item)}
        rows.append([_cell(fields[column]) for column in columns])
    if not columns:
        return None
    more = len(value) if len(value) > MOST_ROWS else 0
    return NotebookTable(_label(name), [_label(column) for column in columns], rows, more)


def _label(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Figure):
        span = "" if value.low == value.high else f" ({_number(value.low)} to {_number(value.high)})"
        return f"{_number(value.value)} {value.unit}".strip() + span
    text = _number(value) if isinstance(value, float) else str(value)
    return text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
