"""Answers made readable, and what differs from the reference marked.

In: texts as a model wrote them. Out: pieces of text, each marked or not. Does not know HTML.
"""

import json
import re
from difflib import SequenceMatcher
from typing import NamedTuple

_PIECES = re.compile(r"\w+|\s+|[^\w\s]")
MOST_PIECES = 2000
"""Longer texts are shown unmarked: comparing them takes longer than it helps."""


class Piece(NamedTuple):
    text: str
    differs: bool


class Shown(NamedTuple):
    """An answer as the page shows it."""

    pieces: tuple[Piece, ...]
    is_json: bool
    same: bool


def show_answer(text: str, *, reference: str) -> Shown:
    pretty, is_json = make_pretty(text)
    expected, _ = make_pretty(reference)
    pieces = mark_differences(pretty, reference=expected) if reference else (Piece(pretty, False),)
    return Shown(pieces=pieces, is_json=is_json, same=bool(reference) and pretty == expected)


def make_pretty(text: str) -> tuple[str, bool]:
    """JSON objects and lists indented, short ones on one line; anything else as it is."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return text.strip(), False
    if not isinstance(document, dict):
        return text.strip(), False
    lines = [
        f"  {json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        for key, value in document.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}" if lines else "{}"), True


def mark_differences(text: str, *, reference: str) -> tuple[Piece, ...]:
    """The text in pieces; those that the reference does not have in this place differ."""
    ours, theirs = _PIECES.findall(text), _PIECES.findall(reference)
    if len(ours) > MOST_PIECES or len(theirs) > MOST_PIECES:
        return (Piece(text, False),)
    pieces: list[Piece] = []
    for kind, start, end, _, _ in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        part = "".join(ours[start:end])
        if part:
            # White space alone is no difference worth a mark.
            pieces.append(Piece(part, kind != "equal" and not part.isspace()))
    return tuple(pieces)
