"""Numbers, times, amounts and errors of settings as people read and write them.

Counts, times, shares and amounts are written for people; times and the numbers of logs are read from text;
errors of pydantic are put in plain words. Pure.
"""

import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any


def plural(count: float, noun: str) -> str:
    """1 row, 2,000 rows, 1.5 years."""
    return f"{count:{',' if isinstance(count, int) else 'g'}} {noun}{'' if count == 1 else 's'}"


def truncate(text: str, most: int) -> str:
    """At most so many characters; an ellipsis shows that the end is missing."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def duration(seconds: float) -> str:
    """50 ms, 5.0 s, 42 s, 1 min 05 s or 2 h 01 min."""
    if seconds < 0.095:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    # Rounded first: no minute has 60 seconds.
    minutes, remainder = divmod(round(seconds), 60)
    if not minutes:
        return f"{remainder} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {remainder:02} s"


_SPAN = re.compile(r"(\d{1,5})([mhdw])")
_SPANS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_time(text: str, *, now: datetime, back: bool = False) -> datetime | None:
    """A date or a time (UTC if no zone is named), or a span such as 12h, 30d or 2w from now or back."""
    text = text.strip()
    if (span := _SPAN.fullmatch(text)) is not None:
        delta = timedelta(**{_SPANS[span[2]]: int(span[1])})
        return now - delta if back else now + delta
    try:
        parsed = datetime.fromisoformat(text)
        return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def figure_text(value: float) -> str:
    """1,234, 12.3 or 1.23."""
    if value >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def moment(timestamp: float) -> str:
    """2026-05-01 12:30, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(timestamp))


def ago(seconds: float, stamp: datetime) -> str:
    if seconds < -5:
        return stamp.strftime("%d %b %H:%M")
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min ago"
    if seconds < 23.5 * 3600:
        return f"{seconds / 3600:.0f} h ago"
    if seconds < 30 * 86400:
        return f"{plural(round(seconds / 86400), 'day')} ago"
    return stamp.strftime("%d %b %Y")


def percent(rate: float) -> str:
    """One decimal, or more if rounding would give 0 or 100 %: 99.98 % is not 100 %."""
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
    """Three significant digits, with thousands separators; the dollar sign precedes the amount."""
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


def p_value(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def short(digest: str) -> str:
    return digest[:12]


def unbroken(text: str) -> str:
    """A number and its unit stay on one line."""
    return re.sub(r"(\d) (?=(%|s|min|GiB|points)\b|%)", "\\1\u00a0", text)


def size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def usd(amount: float | None) -> str:
    if amount is None:
        return "–"
    return f"${amount:,.2f}" if abs(amount) < 1000 else f"${amount:,.0f}"


_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


def take_figure(value: Any) -> float | None:
    """Return a number, including from text (tables only have text); None for anything else."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def take_score(value: Any) -> float | None:
    """Return a score: a number, or 1 for true and 0 for false."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().casefold(), value)
    return float(value) if isinstance(value, bool) else take_figure(value)


_ERROR_WORDS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "set_type": "must be a list",
    "frozen_set_type": "must be a list",
    "dict_type": "must be keys and values",
    "mapping_type": "must be keys and values",
    "model_type": "must be keys and values",
    "model_attributes_type": "must be keys and values",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "extra_forbidden": "unknown key",
    "missing": "is missing",
}


def explain_error(error: Mapping[str, Any]) -> str:
    """What is wrong with a value, in our own wording."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in ("string_too_short", "too_short") and context.get("min_length") == 1:
        return "must not be empty"
    if kind in _ERROR_WORDS:
        # Limits as one writes them: 1 and not 1.0.
        limits = {
            key: f"{limit:.15g}" if isinstance(limit, float) else limit for key, limit in context.items()
        }
        return _ERROR_WORDS[kind].format(**limits)
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"^(Input|String|Value|Tuple|List|Dictionary) should\b", "must", message)
