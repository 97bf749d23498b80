"""Secrets and personal data out of text, placeholders in.

In: text. Out: the text with placeholders such as `<REDACTED:email:1>` and how many of each kind
were replaced. The same value gets the same placeholder from the same `Redactor`, so that a
conversation stays readable; the values themselves are never kept, returned or logged: the redactor
remembers only their hashes. Does not know files or rows.
"""

import hashlib
from collections import Counter
from re import Match
from typing import NamedTuple

from graftwork.text.patterns import PATTERNS, Pattern

SECRET_KINDS = frozenset(pattern.kind for pattern in PATTERNS if pattern.secret)
PERSONAL_KINDS = frozenset(pattern.kind for pattern in PATTERNS if not pattern.secret)


class Redacted(NamedTuple):
    text: str
    counts: dict[str, int]


class Redactor:
    """Remembers which value got which number, for as long as one dataset is being made."""

    def __init__(self) -> None:
        self._numbers: dict[str, dict[bytes, int]] = {}

    def redact(self, text: str) -> Redacted:
        """Replace every value that a pattern recognises and its check confirms."""
        counts: Counter[str] = Counter()
        folded = text.casefold()
        for pattern in PATTERNS:
            # Most texts hold none of the literals, and looking for those is much faster.
            if pattern.hints and not any(hint in folded for hint in pattern.hints):
                continue
            text = self._replace(text, pattern, counts)
        return Redacted(text, dict(sorted(counts.items())))

    def _replace(self, text: str, pattern: Pattern, counts: Counter[str]) -> str:
        def give_placeholder(match: Match[str]) -> str:
            value = match.group("value")
            if not pattern.check(value):
                return match.group()
            counts[pattern.kind] += 1
            start, end = match.span("value")
            before = text[match.start() : start]
            after = text[end : match.end()]
            return f"{before}<REDACTED:{pattern.kind}:{self._number(pattern.kind, value)}>{after}"

        return pattern.regex.sub(give_placeholder, text)

    def _number(self, kind: str, value: str) -> int:
        numbers = self._numbers.setdefault(kind, {})
        return numbers.setdefault(hashlib.sha256(value.encode(errors="replace")).digest(), len(numbers) + 1)


def redact(text: str) -> Redacted:
    """One text by itself."""
    return Redactor().redact(text)
