"""Records in notebooks: their document as HTML, or their fields where there is no view of their type.

Everything is escaped; fields that may hold a secret are hidden as they are in `repr`.
"""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from graftwork.records.base import Figure, Record
from graftwork.text.wording import figure_text
from graftwork.views import html, view
from graftwork.views.document import Document, Table, quote

MOST_ROWS = 20
MOST_CHARACTERS = 200


def render_record(record: Record) -> str:
    return render(view(record) or _view_fields(record))


def render_fields(title: str, fields: Mapping[str, str]) -> str:
    """Named values under a title."""
    return render(
        Document(title, [Table((), [(quote(name), quote(value)) for name, value in fields.items()])])
    )


def render(document: Document) -> str:
    title = Markup("<strong>{}</strong>").format(document.title)
    return Markup('<div class="graftwork">{}{}</div>').format(title, html.body(document))


def _view_fields(record: Record) -> Document:
    """Its plain fields, then a table for each field that holds several records."""
    viewed = Document(type(record).__name__)
    fields = dict(record.__repr_args__())
    viewed.add(
        Table(
            (), [(_label(name), _cell(value)) for name, value in fields.items() if name and _is_plain(value)]
        )
    )
    for name, value in record:
        if not isinstance(value, tuple) or not all(isinstance(item, Record) for item in value):
            continue
        rows = [dict(item.__repr_args__()) for item in value[:MOST_ROWS]]
        columns = [
            column for column in (rows[0] if rows else ()) if any(_is_plain(row[column]) for row in rows)
        ]
        first = f" (first {len(rows)} of {len(value)})" if len(value) > MOST_ROWS else ""
        viewed.table(
            [_label(column) for column in columns],
            [[_cell(row[column]) for column in columns] for row in rows if columns],
            title=f"{_label(name)}{first}",
        )
    return viewed


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | Figure)


def _label(name: str | None) -> str:
    return (name or "").replace("_", " ")


def _cell(value: Any) -> str:
    if isinstance(value, Figure):
        spread = (
            "" if value.low == value.high else f" ({figure_text(value.low)} to {figure_text(value.high)})"
        )
        return quote(f"{figure_text(value.value)} {value.unit}".strip() + spread)
    text = "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
    return quote(text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…")
