"""How many values a JSON text would give, before it is parsed.

In: text or bytes that may be JSON. Out: whether it holds more values than one row may. A parsed value takes
up to a hundred times the two bytes that it is written with: 30 MB of `{},{},{}` become a gigabyte. Pure.
"""

import re

MOST_VALUES = 1 << 20
"""Of one row, or of JSON written as text within one. A long conversation has some thousand."""

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
_STRING_OR_MARK = re.compile(rf"{_STRING}|([,\[{{])", re.DOTALL)
_STRING_OR_MARK_BYTES = re.compile(_STRING_OR_MARK.pattern.encode(), re.DOTALL)


def has_too_many_values(text: str | bytes, *, most: int = MOST_VALUES) -> bool:
    """Counts what begins a value; commas and brackets in strings do not count."""
    if len(text) < most:
        return False
    if isinstance(text, str):
        if text.count(",") + text.count("[") + text.count("{") < most:
            return False
        marks = (match.lastindex for match in _STRING_OR_MARK.finditer(text))
    else:
        if text.count(b",") + text.count(b"[") + text.count(b"{") < most:
            return False
        marks = (match.lastindex for match in _STRING_OR_MARK_BYTES.finditer(text))
    found = 0
    for mark in marks:
        if mark:
            found += 1
            if found >= most:
                return True
    return False
