"""Interactions without secrets and personal data.

In: an interaction. Out: the same one with placeholders, and how many values of each kind stood in
it. All text that can reach a dataset goes through here: turns, replies, names, whatever else the
log said. The numbers of the placeholders begin anew in every row, so that a row's result depends
on the row alone: rows can be worked on in any order, by many processes, and again later, with the
same bytes. Only `origin` stays as it is: without it nothing can be traced.
"""

import hashlib
from collections import Counter
from typing import Any, NamedTuple

from graftwork.records.interaction import Interaction, Message
from graftwork.text.locate import is_password_under, is_secret_name
from graftwork.text.redact import Redactor, hold_private

# Names that say the same in every row keep their words around the placeholder.
_SHARED_NAMES = ("status", "finish_reason", "group", "domain", "model", "split")
# Names that tell rows apart: two people's sessions must not become one `<REDACTED:email:1>`.
_OWN_NAMES = ("id", "session")
DEEPEST_EXTRA = 64


class RedactedRow(NamedTuple):
    row: Interaction
    counts: dict[str, int]


def redact_row(row: Interaction) -> RedactedRow:
    """The row with placeholders; the row itself where there is nothing to replace."""
    seen = _see(row)
    if not seen.named_secret and not hold_private(seen.texts):
        return RedactedRow(row, {})
    cleaner = _Cleaner(seen.texts)
    update: dict[str, Any] = {
        "messages": tuple(
            Message(role=turn.role, content=cleaner.clean(turn.content)) for turn in row.messages
        ),
        "reply": cleaner.clean(row.reply),
        "rejected": None if row.rejected is None else cleaner.clean(row.rejected),
        "extra": cleaner.clean_value(row.extra),
    }
    for name in _SHARED_NAMES:
        text = getattr(row, name)
        update[name] = None if text is None else cleaner.clean(text)
    for name in _OWN_NAMES:
        text = getattr(row, name)
        update[name] = None if text is None else cleaner.clean_own_name(name, text)
    return RedactedRow(row.model_copy(update=update), dict(sorted(cleaner.counts.items())))


class _Seen(NamedTuple):
    """Every text of a row, and whether one is a secret by the name of its field alone."""

    texts: list[str]
    named_secret: bool


def _see(row: Interaction) -> _Seen:
    texts = [turn.content for turn in row.messages]
    texts.append(row.reply)
    texts += [
        text
        for text in (
            *(row.id, row.session, row.rejected),
            *(row.status, row.finish_reason, row.group, row.domain, row.model, row.split),
        )
        if text
    ]
    named_secret = False
    waiting: list[tuple[str, Any]] = [("", row.extra)] if row.extra else []
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, int | float) and not isinstance(value, bool):
            named_secret = named_secret or is_secret_name(name)
        elif isinstance(value, str):
            texts.append(value)
            named_secret = named_secret or bool(name and is_password_under(name, value))
        elif isinstance(value, dict):
            texts.extend(value)
            waiting.extend(value.items())
        elif isinstance(value, (list, tuple)):
            waiting.extend((name, item) for item in value)
    return _Seen(texts, named_secret)


class _Cleaner:
    """One row's redactor and its counts."""

    def __init__(self, texts: list[str]) -> None:
        self._redactor = Redactor()
        self.counts: Counter[str] = Counter()
        for text in texts:
            self._redactor.number_past(text)

    def clean(self, text: str, *, name: str = "") -> str:
        redacted = self._redactor.redact_under(name, text) if name else self._redactor.redact(text)
        self.counts.update(redacted.counts)
        return redacted.text

    def clean_own_name(self, name: str, text: str) -> str:
        """A name after a person keeps its identity, as a hash, and not the person."""
        if self.clean(text) == text:
            return text
        return f"{name}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:16]}"

    def clean_value(self, value: Any, *, name: str = "", depth: int = 0) -> Any:
        if isinstance(value, str):
            return self.clean(value, name=name)
        if not isinstance(value, (dict, list, tuple)):
            # A number has no form to know it by; where it is called a password it goes.
            return None if is_secret_name(name) and not isinstance(value, bool) else value
        if depth >= DEEPEST_EXTRA:
            # Nothing that the product reads lies so deep, and nothing unredacted may pass.
            return None
        if isinstance(value, dict):
            return {
                self.clean(key): self.clean_value(item, name=key, depth=depth + 1)
                for key, item in value.items()
            }
        return [self.clean_value(item, name=name, depth=depth + 1) for item in value]
