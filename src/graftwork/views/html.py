"""Documents as HTML: in pages, in `graft ui` and in notebooks; the templates of pages and their filters."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import pairwise
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.text import Text

from graftwork.records.base import Figure, Record
from graftwork.records.interaction import Message
from graftwork.records.report import Metric
from graftwork.text.wording import (
    ago,
    duration,
    figure_text,
    number,
    p_value,
    percent,
    plural,
    points,
    short,
    size,
    truncate,
    unbroken,
    usd,
)
from graftwork.views import view
from graftwork.views.charts import draw_both, draw_gantt, draw_legend
from graftwork.views.document import Cell, Document, Meter, Name, State, Table, Timestamp, quote
from graftwork.views.turns import show_turn, show_turns


@cache
def templates(*folders: str) -> Environment:
    """All inserted values are escaped, and a missing name is an error, not a blank."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("graftwork", folder) for folder in (*folders, "views")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def render(template: str, **values: Any) -> str:
    return templates().get_template(template).render(**values)


def body(document: Document, *, label: str = "") -> Markup:
    """The parts of a document as HTML; `label` names its tables for screen readers."""
    macros: Any = templates().get_template("document.html.jinja").module
    return Markup(macros.body(document, label or document.title))


def page(document: Document) -> str:
    """The document as one HTML file without scripts or external links."""
    return render("document_page.html.jinja", document=document)


def kind_of(part: object) -> str:
    return type(part).__name__


CLASSES = {"green": "good", "yellow": "warn", "red": "bad", "dim": "soft", "bold": "strong", "cyan": "name"}
CHIPS = {"green": "pass", "yellow": "warning", "red": "fail", "cyan": "info", "dim": "", "": ""}


def mark_up(text: str) -> Markup:
    """Convert markup of documents to HTML; `commands` are set as code."""
    plain = Text.from_markup(text, emoji=False)
    edges = sorted({0, len(plain), *(edge for span in plain.spans for edge in (span.start, span.end))})
    pieces = []
    for start, end in pairwise(edges):
        styles = [str(span.style) for span in plain.spans if span.start <= start and end <= span.end]
        classes = " ".join(CLASSES[word] for style in styles for word in style.split() if word in CLASSES)
        piece = Markup("<br>").join(map(commands, plain.plain[start:end].split("\n")))
        pieces.append(Markup('<span class="{}">{}</span>').format(classes, piece) if classes else piece)
    return Markup("").join(pieces)


def show_cell(cell: Cell) -> Markup | str:
    if isinstance(cell, State):
        kind = CHIPS[cell.tone.removeprefix("bold ")]
        return Markup('<span class="chip {}">{}</span>').format(kind, cell.word)
    if isinstance(cell, Meter):
        bar = Markup('<meter min="0" max="1" value="{:.4f}" aria-label="{:.0%}"></meter> {}')
        return bar.format(cell.share, cell.share, mark_up(cell.text))
    if isinstance(cell, Timestamp):
        return when(cell.at)
    return number(cell) if isinstance(cell, int) else mark_up(cell or "")


def when(moment: str | float | None) -> Markup | str:
    """A relative time such as 3 min ago, with the exact one in its title."""
    if moment in (None, ""):
        return "never"
    at = _parse(moment)
    if at is None:
        return str(moment)
    stamp = datetime.fromtimestamp(at, UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        stamp.isoformat(timespec="seconds"), stamp.strftime("%Y-%m-%d %H:%M:%S"), ago(time.time() - at, stamp)
    )


def _parse(moment: str | float | None) -> float | None:
    if isinstance(moment, int | float):
        return float(moment)
    try:
        parsed = datetime.fromisoformat(str(moment))
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


_UNIT_SUFFIXES = ("seconds", "gib")
_SPELLINGS = {"json": "JSON", "chrf": "chrF", "f1": "F1"}


def name_of(metric: str) -> str:
    """`citation_coverage` as "Citation coverage"; a unit at the end is left to the value."""
    words = metric.split("_")
    if len(words) > 1 and words[-1] in _UNIT_SUFFIXES:
        words = words[:-1]
    first = _SPELLINGS.get(words[0], words[0][:1].upper() + words[0][1:])
    return " ".join([first, *(_SPELLINGS.get(word, word) for word in words[1:])])


def value_of(metric: Metric, value: float) -> str:
    return percent(value) if metric.kind == "rate" else number(value, metric.unit)


def commands(text: str) -> Markup:
    """Text whose `commands` are set as code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return Markup.escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if place % 2 else Markup.escape(piece)
        for place, piece in enumerate(pieces)
    )


def clip(text: str | None, length: int = 160) -> str:
    """One line of a text."""
    return truncate(" ".join((text or "").split()), length)


def sentence(text: str) -> str:
    """The text with a capital letter at its start, unless it starts with a command or the name of a model."""
    first = text.partition(" ")[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() else text


def plain(value: Any) -> str:
    """A value of settings as graft.yaml would have it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {plain(inner)}" for key, inner in value.items()) or "none"
    return str(value)


def score(value: float | None) -> str:
    """A grade of an answer: right, wrong, or a share."""
    if value is None:
        return "–"
    return {0.0: "✗", 1.0: "✓"}.get(float(value), f"{value:.2f}")


FILTERS: dict[str, Callable[..., Any]] = {
    "turns": show_turns,
    "answer": lambda text: show_turn(Message(role="assistant", content=text)),
    "cell": show_cell,
    "kind": kind_of,
    "mark_up": mark_up,
    "head": lambda text: mark_up(text if isinstance(text, Name) else text[:1].upper() + text[1:]),
    "gantt": lambda chart: draw_both(lambda width: draw_gantt(chart, width=width), wide=980, narrow=420),
    "legend": draw_legend,
    "body": body,
    "when": when,
    "clip": clip,
    "sentence": sentence,
    "size": size,
    "usd": usd,
    "plain": plain,
    "score": score,
    "name": name_of,
    "percent": percent,
    "number": number,
    "duration": duration,
    "short": short,
    "points": points,
    "p_value": p_value,
    "plural": plural,
    "unbroken": unbroken,
    "commands": commands,
}
"""Filters of the templates, by name."""


MOST_ROWS = 20
MOST_CHARACTERS = 200


def render_record(record: Record) -> str:
    return _notebook(view(record) or _view_fields(record))


def render_fields(title: str, fields: Mapping[str, str]) -> str:
    """Named values under a title."""
    return _notebook(
        Document(title, [Table((), [(quote(name), quote(value)) for name, value in fields.items()])])
    )


def _notebook(document: Document) -> str:
    title = Markup("<strong>{}</strong>").format(document.title)
    return Markup('<div class="graftwork">{}{}</div>').format(title, body(document))


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
    return quote(truncate(text, MOST_CHARACTERS))
