"""What a library said, without the secrets that its environment holds.

In: a message, and the secrets, or the variables of the environment that hold them. Out: the message on one
line, with every such secret, every login in an address and every query replaced. A variable with an address
gives up its login and its query; any other its whole value. Knows no library, and no other secret.
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


def leave_unsaid(said: str, secrets: Iterable[str], *, longest: int = LONGEST) -> str:
    """The message on one line without these. Cut to length last: the beginning of a secret is some of it."""
    # Whatever is no character to be printed could move the cursor of a terminal.
    joined = " ".join("".join(c if c.isprintable() else " " for c in hide(said, secrets)).split())
    joined = _QUERY.sub("?…", _LOGIN.sub("…@", joined))
    return joined if len(joined) <= longest else f"{joined[:longest]}…"


def leave_secrets_unsaid(said: str, *, environment: Mapping[str, str], variables: Iterable[str]) -> str:
    """The same for the secrets that these variables hold."""
    values = (environment.get(name, "") for name in variables)
    return leave_unsaid(said, {secret for value in values for secret in _secrets_in(value)})


def leave_login_unsaid(said: object, address: str) -> str:
    """What a library said of an address, without the login and the query that the address holds."""
    parts = [part for part in address.split("::") if "://" in part]
    found = {secret for part in parts for secret in _secrets_in(part)}
    # A shorter one is found in its address alone; elsewhere it would be a part of any word.
    return leave_unsaid(str(said) or type(said).__name__, {one for one in found if len(one) >= SHORTEST})


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, however each was written into it; nothing else is changed."""
    written = {form for secret in secrets if secret for form in _written(secret)}
    for form in sorted(written, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def _written(secret: str) -> Iterator[str]:
    yield from (secret, json.dumps(secret)[1:-1], quote(secret, safe=""), quote(secret), quote_plus(secret))


def _secrets_in(value: str) -> Iterator[str]:
    if "://" not in value:
        yield from (value, value.strip())
        return
    try:
        parts = urlsplit(value)
    except ValueError:
        # No address after all, and so nothing in it is known to be harmless.
        yield value
        return
    login = parts.netloc.rpartition("@")[0]
    for secret in (login, login.partition(":")[2]):
        yield from (secret, unquote(secret))
    yield parts.query
    for _, secret in parse_qsl(parts.query):
        yield secret
