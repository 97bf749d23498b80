"""Redacts secrets and personal data in text and in settings.

Input: text, a record, or the message of a library and the secrets in it that are known. Output: text with
placeholders such as `<REDACTED:email:1>` and their counts; a record as JSON without secrets (`publishable`);
the message on one line. The same value gets the same placeholder from the same `Redactor`, which stores only
hashes of values. Existing placeholders stay, and new ones are numbered after them. Everything that writes
settings uses this module.
"""

import hashlib
import json
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Annotated, Any, NamedTuple
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from pydantic import AfterValidator, Field

from graftwork.records.base import HIDDEN, NotSecret, Record, Secret, secret_of
from graftwork.text.detectors import TEXT_GAP, find_secret_keys, has_access_key, looks_random
from graftwork.text.patterns import (
    PATTERNS,
    Pattern,
    find_likely,
    is_password_under,
    is_secret_name,
    may_name_secret,
)

SECRET_KINDS = frozenset(pattern.kind for pattern in PATTERNS if pattern.secret)
# At most nine digits: no pattern mistakes them for a payment card or phone number.
_PLACEHOLDER = re.compile(r"<REDACTED:([a-z_]{1,24}):([1-9][0-9]{0,8})>")
# Removing a value can expose another next to it; more rounds only matter for hostile text.
_ROUNDS = 4


_SECRET_KEYS = Pattern("aws_secret_key", locate=find_secret_keys)


class Redacted(NamedTuple):
    text: str
    counts: dict[str, int]


class CleanTexts:
    """Remembers texts in which nothing was found, by their digests: turns of a conversation come again.

    Two sets take turns: the newer one becomes the older when it is full, and what is found in the older one
    moves to the newer, so texts that are used stay.
    """

    def __init__(self, most: int = 8192) -> None:
        self._half = max(most // 2, 1)
        self._newer: set[bytes] = set()
        self._older: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)

    def has(self, digest: bytes) -> bool:
        if digest in self._newer:
            return True
        if digest not in self._older:
            return False
        self._older.discard(digest)
        self.add(digest)
        return True

    def add(self, digest: bytes) -> None:
        if len(self._newer) >= self._half:
            self._newer, self._older = set(), self._newer
        self._newer.add(digest)


class Redactor:
    """Numbers the values of one conversation. `clean` saves the search in texts that were searched before."""

    def __init__(self, clean: CleanTexts | None = None) -> None:
        self._clean = clean
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._last: dict[str, int] = {}
        self._has_access_key = False

    def number_past(self, text: str) -> None:
        """Take note of another text of the conversation: its placeholders keep their numbers."""
        self._has_access_key = self._has_access_key or has_access_key(text)
        if "<REDACTED:" in text:
            for kind, number in _PLACEHOLDER.findall(text):
                self._last[kind] = max(self._last.get(kind, 0), int(number))

    def redact(self, text: str) -> Redacted:
        """Replace every value that a pattern recognizes and its check confirms."""
        clean = self._clean
        if clean is None or self._has_access_key:
            return self._redact(text)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if clean.has(digest):
            return Redacted(text, {})
        redacted = self._redact(text)
        # Placeholders count for the numbers of later ones: such a text is read each time.
        if not redacted.counts and not self._has_access_key and "<REDACTED:" not in text:
            clean.add(digest)
        return redacted

    def _redact(self, text: str) -> Redacted:
        counts: dict[str, int] = {}
        self.number_past(text)
        for _ in range(_ROUNDS):
            before = text
            for pattern in self._list_patterns(text):
                text = self._replace(text, pattern, counts)
            if text == before:
                break
        return Redacted(text, dict(sorted(counts.items())) if counts else counts)

    def redact_secrets(self, text: str) -> str:
        """As `redact`, but only secrets: personal data stays."""
        counts: dict[str, int] = {}
        self.number_past(text)
        for pattern in self._list_patterns(text):
            if pattern.secret:
                text = self._replace(text, pattern, counts)
        return text

    def _list_patterns(self, text: str) -> list[Pattern]:
        # A conversation may give the id of a key in one message and its secret in another.
        likely = find_likely(text)
        return [_SECRET_KEYS, *likely] if self._has_access_key else likely

    def redact_under(self, name: str, text: str) -> Redacted:
        """As `redact`, for the value of a field: the value of `password` is a password."""
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
    """Redact a single text."""
    return Redactor().redact(text)


def hold_private(texts: Iterable[str]) -> bool:
    """Whether `redact` would change any of the texts, checked in one pass."""
    joined = TEXT_GAP.join(texts)
    return any(True for pattern in find_likely(joined) for _ in pattern.find(joined))


LONGEST_WORD = 20
"""A longer part of a name with letters and digits mixed is not a word."""
SHORTEST_KNOWN = 8
"""A shorter value of a variable may be part of any word."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def publishable(record: Record) -> dict[str, Any]:
    """Return `record.model_dump(mode="json")` without secrets."""
    published: dict[str, Any] = _publish(record, record.model_dump(mode="json"), None, Redactor())
    return published


def publish_text(text: str) -> str:
    """Replace every known form of a secret."""
    return Redactor().redact_secrets(text)


def hide_in_tracebacks() -> None:
    """Redact secrets in all tracebacks of this process.

    Also the values of environment variables whose names say that they are secrets: libraries put URLs,
    headers and whole requests into their error messages.
    """
    sys.excepthook = _show_error
    threading.excepthook = lambda found: _show_error(found.exc_type, found.exc_value, found.exc_traceback)


def _show_error(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, SystemExit):
        # A thread that ends this way is not an error.
        return
    report = "".join(traceback.format_exception(kind, error, trace))
    secrets = (value for name, value in os.environ.items() if is_secret_name(name) or may_name_secret(name))
    sys.stderr.write(publish_text(hide(report, [value for value in secrets if len(value) >= SHORTEST_KNOWN])))


def _publish(value: Any, dumped: Any, secret: Secret | None, redactor: Redactor) -> Any:
    """`dumped` is the JSON of `value`; the record says which fields are marked."""
    if isinstance(dumped, str):
        return secret.hide(dumped) if secret is not None else redactor.redact_secrets(dumped)
    if isinstance(dumped, dict):
        published = {}
        for name, part in dumped.items():
            inner = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
            marked = secret_of(type(value), name) if isinstance(value, Record) else secret
            published[name] = _publish(inner, part, marked, redactor)
        return published
    if isinstance(dumped, list):
        parts = list(value) if isinstance(value, list | tuple | set | frozenset) else [None] * len(dumped)
        return [_publish(*pair, secret, redactor) for pair in zip(parts, dumped, strict=True)]
    return dumped


def is_variable_name(name: str) -> bool:
    """Whether this can be the name of an environment variable, and not a key in its place."""
    longest = max(name.split("_"), key=len)
    is_key = publish_text(name) != name or (len(longest) >= LONGEST_WORD and looks_random(longest))
    return _VARIABLE.fullmatch(name) is not None and not is_key


def _require_name(name: str) -> str:
    if not is_variable_name(name):
        raise ValueError(
            "this is not the name of an environment variable; the key itself must not be here, because "
            "settings are written into every report"
        )
    return name


VariableName = Annotated[
    str,
    AfterValidator(_require_name),
    Field(json_schema_extra={"pattern": f"^{_VARIABLE.pattern}$"}),
    NotSecret("the name of the environment variable that holds the secret"),
]
"""The name of an environment variable; a key in its place is refused."""


def _require_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("an address begins with http:// or https://")
    if parts.username or parts.password or parts.query:
        raise ValueError("an address with a key in it would be written everywhere: use api_key_env")
    return url.rstrip("/").removesuffix("/chat/completions")


EndpointUrl = Annotated[
    str, AfterValidator(_require_address), NotSecret("a login or a query in it is refused")
]
"""The address of an OpenAI-compatible endpoint, up to /v1."""


LONGEST = 300
SHORTEST = 4
_LOGIN = re.compile(r"(?<=://)[^\s/@]+(?::[^\s@]*)?@")
_QUERY = re.compile(r"\?[^\s'\"]+")


def redact_message(message: str, secrets: Iterable[str], *, longest: int = LONGEST) -> str:
    """Return the message on one line without these secrets; shortened last, so no part of one remains."""
    # Control characters could move the cursor of a terminal.
    joined = " ".join("".join(c if c.isprintable() else " " for c in hide(message, secrets)).split())
    joined = _QUERY.sub("?…", _LOGIN.sub("…@", joined))
    return joined if len(joined) <= longest else f"{joined[:longest]}…"


def redact_variables(message: str, *, environment: Mapping[str, str], variables: Iterable[str]) -> str:
    """Redact the secrets in these environment variables."""
    values = (environment.get(name, "") for name in variables)
    return redact_message(message, {secret for value in values for secret in _secrets_in(value)})


def redact_login(error: object, address: str) -> str:
    """Redact the login and the query of a URL in a message about it."""
    parts = [part for part in address.split("::") if "://" in part]
    secrets = {secret for part in parts for secret in _secrets_in(part)}
    # A shorter one is only replaced in its URL; elsewhere it may be part of any word.
    return redact_message(
        str(error) or type(error).__name__, {item for item in secrets if len(item) >= SHORTEST}
    )


def hide(text: str, secrets: Iterable[str]) -> str:
    """Replace these secrets in every form in which they may be written."""
    forms: set[str] = set()
    for secret in filter(None, secrets):
        forms |= {secret, json.dumps(secret)[1:-1], quote(secret, safe=""), quote(secret), quote_plus(secret)}
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def _secrets_in(value: str) -> Iterator[str]:
    if "://" not in value:
        yield from (value, value.strip())
        return
    try:
        parts = urlsplit(value)
    except ValueError:
        # Not a URL after all, so nothing in it is known to be harmless.
        yield value
        return
    login = parts.netloc.rpartition("@")[0]
    for secret in (login, login.partition(":")[2]):
        yield from (secret, unquote(secret))
    yield parts.query
    for _, secret in parse_qsl(parts.query):
        yield secret
