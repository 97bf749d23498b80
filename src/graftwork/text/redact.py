"""Secrets and personal data out of text, placeholders in.

In: text. Out: the text with placeholders such as `<REDACTED:email:1>` and how many of each kind
were replaced. The same value gets the same placeholder from the same `Redactor`, so that a
conversation stays readable; the values themselves are never kept, returned or logged: the redactor
remembers only their hashes. Placeholders that stand in a text already stay, and new ones are
numbered past them. Does not know files or rows.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

from graftwork.text.locate import is_password_under
from graftwork.text.patterns import PATTERNS, Pattern, find_likely

SECRET_KINDS = frozenset(pattern.kind for pattern in PATTERNS if pattern.secret)
PERSONAL_KINDS = frozenset(pattern.kind for pattern in PATTERNS if not pattern.secret)

# Nine digits at most: no pattern takes so few for a card or a telephone.
_PLACEHOLDER = re.compile(r"<REDACTED:([a-z_]{1,24}):([1-9][0-9]{0,8})>")
# A value that is gone can lay bare another beside it; more often than this only in hostile text.
_ROUNDS = 4
# No pattern reaches across this, so that many texts can be searched as one.
_GAP = "\n<\n"


class Redacted(NamedTuple):
    text: str
    counts: dict[str, int]


class Redactor:
    """Remembers which value got which number, for as long as one conversation is being redacted."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._last: dict[str, int] = {}

    def number_past(self, text: str) -> None:
        """Give no number again that a placeholder in `text` has."""
        if "<REDACTED:" in text:
            for kind, number in _PLACEHOLDER.findall(text):
                self._last[kind] = max(self._last.get(kind, 0), int(number))

    def redact(self, text: str) -> Redacted:
        """Replace every value that a pattern recognises and its check confirms."""
        counts: dict[str, int] = {}
        self.number_past(text)
        for _ in range(_ROUNDS):
            before = text
            for pattern in find_likely(text):
                text = self._replace(text, pattern, counts)
            if text == before:
                break
        return Redacted(text, dict(sorted(counts.items())))

    def redact_secrets(self, text: str) -> str:
        """As `redact`, for secrets alone: names and numbers of people stay."""
        counts: dict[str, int] = {}
        self.number_past(text)
        for pattern in find_likely(text):
            if pattern.secret:
                text = self._replace(text, pattern, counts)
        return text

    def redact_under(self, name: str, text: str) -> Redacted:
        """As `redact`, for the value of a field: what stands under `password` is a password."""
        if is_password_under(name, text):
            return Redacted(self._give_placeholder("password", text), {"password": 1})
        return self.redact(text)

    def _replace(self, text: str, pattern: Pattern, counts: dict[str, int]) -> str:
        parts: list[str] = []
        done = 0
        for start, end in pattern.find(text):
            parts += (text[done:start], self._give_placeholder(pattern.kind, text[start:end]))
            counts[pattern.kind] = counts.get(pattern.kind, 0) + 1
            done = end
        return "".join((*parts, text[done:])) if parts else text

    def _give_placeholder(self, kind: str, value: str) -> str:
        key = kind, hashlib.sha256(value.encode(errors="replace")).digest()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = self._last[kind] = self._last.get(kind, 0) + 1
        return f"<REDACTED:{kind}:{number}>"


def redact(text: str) -> Redacted:
    """One text by itself."""
    return Redactor().redact(text)


def hold_private(texts: Iterable[str]) -> bool:
    """Whether `redact` would change any of the texts: in one look at all of them."""
    joined = _GAP.join(texts)
    return any(True for pattern in find_likely(joined) for _ in pattern.find(joined))
