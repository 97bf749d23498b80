"""Redacts known secrets in messages of libraries.

In: a message, and the secrets or the environment variables that hold them. Out: the message on one line,
with every secret, login in a URL and query string replaced. Of a variable that holds a URL, the login and
the query are secret; of any other, the whole value.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from graftwork.records.base import HIDDEN

LONGEST = 300
SHORTEST = 4
_LOGIN = re.compile(r"(?<=://)[^\s/@]+(?::[^\s@]*)?@")
_QUERY = re.compile(r"\?[^\s'\"]+")


def redact_message(message: str, secrets: Iterable[str], *, longest: int = LONGEST) -> str:
    """Return the message on one line without these secrets. Shortened last: the beginning of a secret must
    not remain.
    """
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
    found = {secret for part in parts for secret in _secrets_in(part)}
    # A shorter one is only replaced in its URL; elsewhere it may be part of any word.
    return redact_message(
        str(error) or type(error).__name__, {item for item in found if len(item) >= SHORTEST}
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
