"""The condition of `data.keep`: which rows of a log are used, by their own fields.

In: `stars >= 3 and lang == "de" or stars missing`, and the fields of a row. Out: None where the row is
kept, else why it is not. The condition is parsed and never evaluated as code; `and` binds tighter than `or`.
"""

import operator
import re
from functools import cache
from typing import NamedTuple

from graftwork.records.interaction import Interaction
from graftwork.text.wording import take_figure, take_score

GRAMMAR = "FIELD >= NUMBER (also <=, >, <), FIELD == VALUE (also !=), FIELD missing, joined by `and` and `or`"
NO_NUMBER = "no number"
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
_EQUAL = {"==": operator.eq, "!=": operator.ne}
_TOKEN = re.compile(r"""\s*(>=|<=|==|!=|>|<|"[^"]*"|'[^']*'|`[^`]+`|[^\s<>=!"'`]+)""")
_TRUTH = {"true": 1.0, "false": 0.0}
_FIELDS = {
    **{name: name for name in ("status", "session", "domain", "model", "finish_reason", "stage", "reward")},
    **{name: name for name in ("duration_ms", "cost", "prompt_tokens", "reply_tokens")},
    "role": "group",
    "score": "reward",
    "latency_ms": "duration_ms",
}


class FieldTest(NamedTuple):
    """`sign` is None where the field must be missing."""

    field: str
    sign: str | None
    value: str | float | None
    word: str
    """The value as it is written."""


def require_condition(text: str) -> str:
    """Raise a ValueError where the text is no condition."""
    parse_condition(text)
    return text


@cache
def parse_condition(text: str) -> tuple[tuple[FieldTest, ...], ...]:
    """Alternatives, each of comparisons that must all hold."""
    tokens, end = [], 0
    while match := _TOKEN.match(text, end):
        tokens.append(match[1])
        end = match.end()
    if text[end:].strip():
        raise ValueError(f"{text[end:].strip()[:20]!r} is not understood; a condition is {GRAMMAR}")
    alternatives: list[list[FieldTest]] = [[]]
    while True:
        comparison, tokens = _take_comparison(tokens)
        alternatives[-1].append(comparison)
        if not tokens:
            return tuple(tuple(comparisons) for comparisons in alternatives)
        joint, *tokens = tokens
        if joint == "or":
            alternatives.append([])
        elif joint != "and":
            raise ValueError(f"`and` or `or` must stand before {joint!r}; a condition is {GRAMMAR}")


def _take_comparison(tokens: list[str]) -> tuple[FieldTest, list[str]]:
    if len(tokens) >= 2 and tokens[1] == "missing":
        return FieldTest(tokens[0].strip("`"), None, None, "missing"), tokens[2:]
    if len(tokens) < 3 or tokens[1] not in {*_COMPARE, *_EQUAL} or tokens[0][0] in "\"'<>=!":
        raise ValueError(f"a condition is {GRAMMAR}; found: {' '.join(tokens[:3]) or 'nothing'}")
    field, sign, word, *rest = tokens
    number = None if word[0] in "\"'" else _TRUTH.get(word, take_figure(word))
    if number is None and sign in _COMPARE:
        raise ValueError(f"`{sign}` compares numbers, and {word} is none; a condition is {GRAMMAR}")
    value = word.strip("\"'") if number is None else number
    return FieldTest(field.strip("`"), sign, value, word), rest


def find_objection(row: Interaction, condition: str) -> str | None:
    """Return why the row is not kept."""
    objections: list[str] = []
    for comparisons in parse_condition(condition):
        objection = next((why for item in comparisons if (why := _test(row, item))), None)
        if objection is None or objection.startswith(NO_NUMBER):
            return objection
        objections.append(objection)
    return objections[0]


def _test(row: Interaction, item: FieldTest) -> str | None:
    value = getattr(row, _FIELDS[item.field]) if item.field in _FIELDS else None
    value = row.extra.get(item.field) if value is None else value
    if item.sign is None:
        return None if value is None else f"`{item.field}` is not missing"
    if value is None:
        return f"`{item.field}` is missing"
    if item.sign in _COMPARE:
        number = take_score(value)
        if number is None:
            return f"{NO_NUMBER}: `{item.field}` is text, and it is compared with {item.word}"
        holds = _COMPARE[item.sign](number, float(item.value or 0))
    else:
        holds = _EQUAL[item.sign](
            take_score(value) if isinstance(item.value, float) else str(value), item.value
        )
    return None if holds else f"it is not {item.field} {item.sign} {item.word}"


def list_fields(row: Interaction) -> list[str]:
    """The fields that a condition may name and the row has."""
    return [*(name for name, key in _FIELDS.items() if getattr(row, key) is not None), *row.extra]
