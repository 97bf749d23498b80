"""Templates of the pages, and numbers and names as people write them."""

import re
from collections.abc import Callable
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from graftwork.records.report import Metric
from graftwork.text.wording import duration, plural


def open_templates(**filters: Callable[..., Any]) -> Environment:
    """Everything that is put in is escaped, and a name that is missing is an error, not a blank."""
    environment = Environment(
        loader=PackageLoader("graftwork", "views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    return environment


_UNIT_SUFFIXES = ("seconds", "gib")
_SPELLINGS = {"json": "JSON", "chrf": "chrF", "f1": "F1"}


def name_of(metric: str) -> str:
    """`citation_coverage` as "Citation coverage"; a unit at the end is left to the value."""
    words = metric.split("_")
    if len(words) > 1 and words[-1] in _UNIT_SUFFIXES:
        words = words[:-1]
    first = _SPELLINGS.get(words[0], words[0][:1].upper() + words[0][1:])
    return " ".join([first, *(_SPELLINGS.get(word, word) for word in words[1:])])


def percent(rate: float) -> str:
    """One decimal, and more where one would round to a clean sweep: 99.98 % is not 100 %."""
    value = 100 * rate
    if value == round(value):
        return f"{value:.0f} %"
    for digits in (1, 2, 3):
        if 0 < float(f"{value:.{digits}f}") < 100:
            return f"{value:.{digits}f} %"
    return "over 99.999 %" if value > 50 else "under 0.001 %"


def points(difference: float) -> str:
    return f"{100 * difference:+.1f}".replace("-", "−")


def change(ratio: float) -> str:
    """+16.6 % or −3 %; nothing but rounding noise is 0 %."""
    text = f"{100 * ratio:+.1f} %"
    return "0 %" if text in ("+0.0 %", "-0.0 %") else text.replace("-", "−")


def number(value: float, unit: str = "") -> str:
    """Three digits that matter, thousands apart; dollars stand before their amount."""
    if unit == "$":
        return f"{'−' if value < 0 else ''}${number(abs(value))}"
    size = abs(value)
    if size >= 1000 or (value == int(value) and (size >= 10 or not unit)):
        text = f"{value:,.0f}".replace(",", "\u202f")
    elif size >= 100:
        text = f"{value:.0f}"
    elif size >= 10:
        text = f"{value:.1f}"
    else:
        text = f"{value:.2f}" if size >= 0.1 else f"{value:.3g}"
    return f"{text} {unit}".strip().replace("-", "−")


def value_of(metric: Metric, value: float) -> str:
    return percent(value) if metric.kind == "rate" else number(value, metric.unit)


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def short(digest: str) -> str:
    return digest[:12]


def unbroken(text: str) -> str:
    """A number and its unit stay on one line."""
    return re.sub(r"(\d) (?=(%|s|min|GiB|points)\b|%)", "\\1\u00a0", text)


def commands(text: str) -> Markup:
    """Text whose `commands` are set as code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return Markup.escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if place % 2 else Markup.escape(piece)
        for place, piece in enumerate(pieces)
    )


FILTERS: dict[str, Callable[..., str]] = {
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
"""What templates call them."""
