"""Apply checks to the start of an answer, while the rest is still being generated.

Input: the name of a metric or check, a case, the text so far. Output: `fails` where no continuation can pass,
`passes` where every one does, None if it depends on the rest. A check that is not known here judges whole
answers only. A custom function declares it by an attribute: `check.prefix = function(case, text)`, which
gives True, False or None. The beginning of a JSON text is read by the grammar of Python's `json` in its
strict form, without NaN and Infinity.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from graftwork.grading.answers import MISSING, AnswerFields, look_up, read_answer
from graftwork.grading.checks import GradeCheck
from graftwork.grading.custom import is_own, load_own
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.matching import PatternTooSlow, can_match, matches
from graftwork.grading.metrics import NOT_REFUSED, find_extension
from graftwork.grading.rules import BLANK, BySchema, Contains, Exact, FormatRule, Regex, plain_text
from graftwork.records.report import Case

JsonKind = Literal["object", "array", "string", "number", "literal"]

_SPACE = " \t\n\r"
_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+)?)?(?:(?<=[0-9])[eE](?:[-+]?[0-9]*)?)?)?")
_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")


class _NoJson(Exception):
    pass


class _Cut(Exception):
    """The text ends inside a value."""


class JsonPrefix:
    """A text that is JSON, or can become JSON.

    Values are read with a stack of its own, so that no depth of nesting can exhaust Python's.
    """

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._open: list[str] = []
        """Objects and arrays that have begun and not ended."""
        self._key, self._value_at = "", 0
        self.kind: JsonKind | None = None
        """Kind of the outermost value; None before its first character."""
        self.members: dict[str, Any] = {}
        """Members of the outermost object that are complete."""

    def read_document(self) -> None:
        first = self._peek()
        kinds: dict[str, JsonKind] = {"{": "object", "[": "array", '"': "string"}
        self.kind = kinds.get(first, "number" if first in "-0123456789" else "literal")
        state = self._read_value()
        while True:
            if state == "after a value":
                if not self._open:
                    break
                state = self._read_separator()
            elif state == "first key" and self._take("}"):
                state = self._close()
            elif state in ("key", "first key"):
                self._peek()
                start = self._at
                self._read_string()
                if len(self._open) == 1:
                    self._key = self._decode(start)
                if not self._take(":"):
                    raise _NoJson
                state = "value"
            elif state == "first item" and self._take("]"):
                state = self._close()
            else:
                state = self._read_value()
        if self._text[self._at :].strip(_SPACE):
            raise _NoJson

    def _read_value(self) -> str:
        """Read a value, or the start of a container; returns what comes next."""
        first = self._peek()
        if len(self._open) == 1:
            self._value_at = self._at
        if first in "{[":
            self._at += 1
            self._open.append(first)
            return "first key" if first == "{" else "first item"
        if first == '"':
            self._read_string()
        elif first in "-0123456789":
            self._read_number()
        else:
            self._read_literal()
        return "after a value"

    def _read_separator(self) -> str:
        separator, inside = self._peek(), self._open[-1]
        if separator not in (",", "}" if inside == "{" else "]"):
            raise _NoJson
        if len(self._open) == 1 and inside == "{":
            self.members[self._key] = self._decode(self._value_at)
        self._at += 1
        if separator != ",":
            return self._close()
        return "key" if inside == "{" else "value"

    def _decode(self, start: int) -> Any:
        try:
            return json.loads(self._text[start : self._at])
        except (ValueError, RecursionError) as error:
            # Too deep, or a number with thousands of digits: Python reads no document with it.
            raise _NoJson from error

    def _close(self) -> str:
        self._open.pop()
        return "after a value"

    def _read_literal(self) -> None:
        ahead = self._text[self._at : self._at + 5]
        for literal in _LITERALS:
            if ahead.startswith(literal):
                self._at += len(literal)
                return
        if any(literal.startswith(ahead) for literal in _LITERALS):
            raise _Cut
        raise _NoJson

    def _read_number(self) -> None:
        match = _NUMBER.match(self._text, self._at)
        assert match is not None
        if match.end() == len(self._text):
            raise _Cut  # it may continue
        if _WHOLE_NUMBER.fullmatch(match[0]) is None:
            raise _NoJson
        self._at = match.end()

    def _read_string(self) -> None:
        if self._peek() != '"':
            raise _NoJson
        self._at += 1
        while True:
            run = _STRING_RUN.match(self._text, self._at)
            self._at = self._at if run is None else run.end()
            character = self._char()
            self._at += 1
            if character == '"':
                return
            if character != "\\":
                raise _NoJson
            escaped = self._char()
            self._at += 1
            if escaped == "u":
                for _ in range(4):
                    if self._char() not in _HEX:
                        raise _NoJson
                    self._at += 1
            elif escaped not in '"\\/bfnrt':
                raise _NoJson

    def _take(self, char: str) -> bool:
        if self._peek() != char:
            return False
        self._at += 1
        return True

    def _peek(self) -> str:
        """The next character that is not a space."""
        while self._char() in _SPACE:
            self._at += 1
        return self._text[self._at]

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise _Cut
        return self._text[self._at]


def read_json_prefix(text: str) -> JsonPrefix | None:
    """None if neither the text nor any continuation of it is JSON."""
    prefix = JsonPrefix(text)
    try:
        prefix.read_document()
    except _Cut:
        pass
    except _NoJson:
        return None
    return prefix


PrefixGrade = Literal["fails", "passes"] | None
PrefixJudge = Callable[[Case, str, GradeContext], PrefixGrade]


def find_prefix_judge(name: str, context: GradeContext) -> PrefixJudge | None:
    """Return the function that judges the start of an answer for this check; None if it needs the whole
    answer.
    """
    check: GradeCheck | None = context.checks.get(name)
    if check is None:
        return _find_metric(name)
    if check.field is not None or check.at_least is not None:
        return None
    inner = _find_own(check.metric, context) if is_own(check.metric) else _find_rule(check)
    if inner is None:
        return None
    return lambda case, text, given: (
        inner(case, text, replace(given, parameters=check.rule)) if check.where.holds(case) else "passes"
    )


def _find_metric(name: str) -> PrefixJudge | None:
    if name in _METRICS:
        return _METRICS[name]
    judge: PrefixJudge | None = getattr(find_extension(name), "judge_prefix", None)
    return judge


def _find_rule(check: GradeCheck) -> PrefixJudge | None:
    rule = check.rule
    if rule is None:
        return _find_metric(check.metric)
    if isinstance(rule, Regex) and not can_match(rule.pattern):
        return None
    if isinstance(rule, Exact) and rule.value is None:
        return None
    return _RULES.get(type(rule))


def _find_own(name: str, context: GradeContext) -> PrefixJudge | None:
    if context.folder is None:
        return None
    judge = getattr(load_own(name, folder=context.folder), "prefix", None)
    if not callable(judge):
        return None

    def ask(case: Case, text: str, _context: GradeContext) -> PrefixGrade:
        try:
            verdict = judge(case, text)
        except (Exception, SystemExit) as error:
            raise CannotGrade(f"{name}.prefix: {type(error).__name__}") from error
        return None if verdict is None else "passes" if verdict else "fails"

    return ask


def _judge_json_object(_case: Case, text: str, _context: GradeContext) -> PrefixGrade:
    prefix = read_json_prefix(text)
    return "fails" if prefix is None or prefix.kind not in (None, "object") else None


def _judge_schema(text: str, schema: dict[str, Any] | None) -> PrefixGrade:
    if schema is None:
        return "passes"
    prefix = read_json_prefix(text)
    if prefix is None:
        return "fails"
    expected = schema.get("type")
    comparable = prefix.kind in ("object", "array", "string") and expected in ("object", "array", "string")
    return "fails" if comparable and prefix.kind != expected else None


def _judge_not_refused(_case: Case, text: str, context: GradeContext) -> PrefixGrade:
    fields: AnswerFields = context.fields
    if fields.form == "text":
        answer = read_answer(text, fields=fields)
        return "fails" if answer is not None and answer.refused else None
    prefix = read_json_prefix(text)
    if prefix is None or prefix.kind not in (None, "object"):
        return "passes"  # it can no longer be read as an answer, so it refuses nothing
    refused = look_up(prefix.members, fields.refused)
    return None if refused is MISSING else "fails" if refused is True else "passes"


def _judge_contains(_case: Case, text: str, context: GradeContext) -> PrefixGrade:
    rule: Contains = context.parameters
    values = (rule.value,) if isinstance(rule.value, str) else rule.value
    searched = text.casefold() if rule.ignore_case else text
    present = [(value.casefold() if rule.ignore_case else value) in searched for value in values]
    if rule.need == "none":
        return "fails" if any(present) else None
    return "passes" if (all(present) if rule.need == "all" else any(present)) else None


def _judge_exact(_case: Case, text: str, context: GradeContext) -> PrefixGrade:
    rule: Exact = context.parameters
    expected, answered = plain_text(rule.value or "", rule), plain_text(text, rule)
    # Spaces at the end may be followed by more of the value, or by nothing.
    return None if expected.startswith(answered) else "fails"


def _judge_regex(_case: Case, text: str, context: GradeContext) -> PrefixGrade:
    rule: Regex = context.parameters
    return None if _may_match(rule.pattern, text, whole=rule.whole, seconds=rule.seconds) else "fails"


def _may_match(pattern: str, text: str, **options: Any) -> bool:
    try:
        return matches(pattern, text, partial=True, **options)
    except PatternTooSlow as error:
        raise CannotGrade(f"{pattern}: {error}") from error


def _judge_format(_case: Case, text: str, context: GradeContext) -> PrefixGrade:
    layout: FormatRule = context.parameters
    beginning, sure = text.lstrip(), text.strip()
    starts = [layout.starts_with or ""]
    if layout.template is not None:
        starts.append(re.split(BLANK, layout.template.strip(), maxsplit=1)[0])
    if not all(beginning.startswith(start) or start.startswith(beginning) for start in starts):
        return "fails"
    if any(unwanted.casefold() in sure.casefold() for unwanted in layout.without):
        return "fails"
    sizes = {"words": len(sure.split()), "characters": len(sure), "lines": len(sure.splitlines())}
    for unit, size in sizes.items():
        most = getattr(layout, f"max_{unit}")
        if most is not None and size > most:
            return "fails"
    if layout.pattern is not None and can_match(layout.pattern):
        texts = (beginning, sure)
        if not any(_may_match(layout.pattern, part, whole=True) for part in texts):
            return "fails"
    start = layout.starts_with
    decided = start is not None and layout.model_fields_set == {"starts_with"} and sure.startswith(start)
    return "passes" if decided else None


_METRICS: dict[str, PrefixJudge] = {
    "json_valid": _judge_json_object,
    "schema_valid": lambda _case, text, context: _judge_schema(text, context.fields.json_schema),
    NOT_REFUSED: _judge_not_refused,
}
_RULES: dict[type, PrefixJudge] = {
    Contains: _judge_contains,
    Exact: _judge_exact,
    Regex: _judge_regex,
    FormatRule: _judge_format,
    BySchema: lambda _case, text, context: _judge_schema(text, context.parameters.document),
}
"""To add one: a judge that says `fails` only where no continuation passes, and a line here."""
