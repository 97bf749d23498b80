"""Whether a text can still become JSON, and what its first level holds so far.

In: the beginning of a text. Out: a `JsonPrefix`, or None where no continuation is JSON. The grammar is that
of Python's `json` in its strict form, without NaN and Infinity.
"""

import json
import re
from typing import Any, Literal, NamedTuple

JsonKind = Literal["object", "array", "string", "number", "literal"]

_SPACE = " \t\n\r"
_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+)?)?(?:(?<=[0-9])[eE](?:[-+]?[0-9]*)?)?)?")
_WHOLE_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonPrefix(NamedTuple):
    """A text that is JSON, or can become JSON."""

    kind: JsonKind | None
    """Of the outermost value; None before its first character."""
    members: dict[str, Any]
    """Members of the outermost object that are complete."""


class _NoJson(Exception):
    pass


class _Cut(Exception):
    """The text ends within a value."""


def read_json_prefix(text: str) -> JsonPrefix | None:
    """None where neither the text nor any continuation of it is JSON."""
    reader = _PrefixReader(text)
    try:
        reader.read_document()
    except _Cut:
        pass
    except _NoJson:
        return None
    return JsonPrefix(reader.kind, reader.members)


class _PrefixReader:
    """Reads values with a stack of its own, so that no depth of nesting can exhaust Python's."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._open: list[str] = []
        """Objects and arrays that have begun and not ended."""
        self._key, self._value_at = "", 0
        self.kind: JsonKind | None = None
        self.members: dict[str, Any] = {}

    def read_document(self) -> None:
        self.kind = self._kind()
        state = self._read_value()
        while True:
            if state == "after a value":
                if not self._open:
                    break
                state = self._read_separator()
            elif state == "first key" and self._take("}"):
                state = self._close()
            elif state in ("key", "first key"):
                self._read_key()
                state = "value"
            elif state == "first item" and self._take("]"):
                state = self._close()
            else:
                state = self._read_value()
        self._read_end()

    def _read_value(self) -> str:
        """Read one, or the beginning of a container; returns what comes next."""
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

    def _read_key(self) -> None:
        self._peek()
        begin = self._at
        self._read_string()
        if len(self._open) == 1:
            self._key = self._decode(begin)
        if not self._take(":"):
            raise _NoJson

    def _read_separator(self) -> str:
        found, inside = self._peek(), self._open[-1]
        if found not in (",", "}" if inside == "{" else "]"):
            raise _NoJson
        if len(self._open) == 1 and inside == "{":
            self.members[self._key] = self._decode(self._value_at)
        self._at += 1
        if found != ",":
            return self._close()
        return "key" if inside == "{" else "value"

    def _decode(self, begin: int) -> Any:
        try:
            return json.loads(self._text[begin : self._at])
        except (ValueError, RecursionError) as error:
            # Too deep, or a number with thousands of digits: Python reads no document with it.
            raise _NoJson from error

    def _close(self) -> str:
        self._open.pop()
        return "after a value"

    def _kind(self) -> JsonKind:
        first = self._peek()
        kinds: dict[str, JsonKind] = {"{": "object", "[": "array", '"': "string"}
        if first in kinds:
            return kinds[first]
        return "number" if first in "-0123456789" else "literal"

    def _read_literal(self) -> None:
        rest = self._text[self._at : self._at + 5]
        for literal in _LITERALS:
            if rest.startswith(literal):
                self._at += len(literal)
                return
        if any(literal.startswith(rest) for literal in _LITERALS):
            raise _Cut
        raise _NoJson

    def _read_number(self) -> None:
        found = _NUMBER.match(self._text, self._at)
        assert found is not None
        if found.end() == len(self._text):
            raise _Cut  # it may go on
        if _WHOLE_NUMBER.fullmatch(found[0]) is None:
            raise _NoJson
        self._at = found.end()

    def _read_string(self) -> None:
        if self._peek() != '"':
            raise _NoJson
        self._at += 1
        while True:
            run = _STRING_RUN.match(self._text, self._at)
            self._at = self._at if run is None else run.end()
            found = self._char()
            self._at += 1
            if found == '"':
                return
            if found != "\\":
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

    def _read_end(self) -> None:
        if self._text[self._at :].strip(_SPACE):
            raise _NoJson

    def _peek(self) -> str:
        """The next character that is no space."""
        while self._char() in _SPACE:
            self._at += 1
        return self._text[self._at]

    def _char(self) -> str:
        if self._at >= len(self._text):
            raise _Cut
        return self._text[self._at]
