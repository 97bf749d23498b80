"""How a chat template writes tool calls, learned from what it writes.

Input: a function that renders an assistant's turn. Output: the form (what stands before, between and after
the calls), by which a turn is read back to text and calls; None for a template whose calls cannot be read
back. The calls themselves must be JSON with a name and arguments, one by one or as a list.
"""

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from graftwork.text.tool_calls import CLOSE, OPEN, TextAndCalls, ToolCall

_PROBE_TEXT = "I look it up."
_FIRST = ToolCall("find_station", {"city": "Bern", "count": 2})
_SECOND = ToolCall("read_clock", {})
_BRACKET = re.compile(r"[{\[]")
_ARGUMENTS = ("arguments", "parameters")

WriteTurn = Callable[[TextAndCalls], str]
"""Renders the body of an assistant's turn with the template. Raises if the template refuses."""


class ToolForm(NamedTuple):
    """`before` comes between text and the first call, `alone` before a call without text."""

    alone: str
    before: str | None
    between: str | None
    after: str

    def read(self, body: str) -> TextAndCalls | None:
        """Read a turn back; None if it holds no calls in this form."""
        spans = _find_calls(body)
        if not spans or body[spans[-1][1] :].strip() != self.after.strip():
            return None
        for (_, end, _), (start, _, _) in pairwise(spans):
            if self.between is None or body[end:start].strip() != self.between.strip():
                return None
        calls = tuple(call for _, _, part in spans for call in part)
        head = body[: spans[0][0]]
        if head.strip() == self.alone.strip():
            return TextAndCalls("", calls)
        if self.before is None or not head.rstrip().endswith(self.before.strip()):
            return None
        return TextAndCalls(head.rstrip().removesuffix(self.before.strip()).rstrip(), calls)


TAGGED = ToolForm(alone=OPEN, before=f"\n{OPEN}", between=f"{CLOSE}\n{OPEN}", after=CLOSE)
"""Calls as rows store them: the form that is taught to a base whose template has none."""


def learn_form(write: WriteTurn, refused: type[Exception]) -> ToolForm | None:
    """Learn the form from three turns, and prove it on them."""
    probes = (
        TextAndCalls("", (_FIRST,)),
        TextAndCalls(_PROBE_TEXT, (_FIRST,)),
        TextAndCalls("", (_FIRST, _SECOND)),
    )
    bodies: list[str | None] = []
    for probe in probes:
        try:
            bodies.append(write(probe))
        except refused:
            bodies.append(None)
    single, texted, several = (None if body is None else _find_calls(body) for body in bodies)
    if not single or bodies[0] is None:
        return None
    form = ToolForm(bodies[0][: single[0][0]], None, None, bodies[0][single[-1][1] :])
    if texted and bodies[1] is not None and _PROBE_TEXT in (head := bodies[1][: texted[0][0]]):
        form = form._replace(before=head.partition(_PROBE_TEXT)[2])
    if several and bodies[2] is not None and len(several) > 1:
        form = form._replace(between=bodies[2][several[0][1] : several[1][0]])
    return form if form.read(bodies[0]) == probes[0] else None


def _find_calls(body: str) -> list[tuple[int, int, tuple[ToolCall, ...]]]:
    """Find the JSON values in a text that are calls, or lists of calls: start, end, the calls."""
    decoder = json.JSONDecoder()
    spans: list[tuple[int, int, tuple[ToolCall, ...]]] = []
    position = 0
    while (bracket := _BRACKET.search(body, position)) is not None:
        start = bracket.start()
        try:
            value, end = decoder.raw_decode(body, start)
        except (ValueError, RecursionError):
            position = start + 1
            continue
        calls = _to_calls(value)
        if calls:
            spans.append((start, end, calls))
            position = end
        else:
            position = start + 1
    return spans


def _to_calls(value: Any) -> tuple[ToolCall, ...]:
    listed: Sequence[Any] = value if isinstance(value, list) else [value]
    calls = []
    for item in listed:
        name = item.get("name") if isinstance(item, dict) else None
        key = next((key for key in _ARGUMENTS if isinstance(item, dict) and key in item), None)
        if not isinstance(name, str) or key is None:
            return ()
        calls.append(ToolCall(name, item[key]))
    return tuple(calls)
