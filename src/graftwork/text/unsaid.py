"""What a library said, without the secrets that its environment holds.

In: a message, the environment, the variables in it that may hold a secret. Out: the message on one line, with
every such secret, every login in an address and every query replaced. A variable with an address gives up its
login and its query; any other its whole value. Knows no library, and no secret that stands in no variable.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qsl, unquote, urlsplit

LONGEST = 300
_LOGIN = re.compile(r"(?<=://)[^\s/@]+(?::[^\s@]*)?@")
_QUERY = re.compile(r"\?[^\s'\"]+")


def leave_secrets_unsaid(said: str, *, environment: Mapping[str, str], variables: Iterable[str]) -> str:
    """Cut to length last: the beginning of a secret is still some of it."""
    values = (environment.get(name, "") for name in variables)
    secrets = {secret for value in values for secret in _secrets_in(value) if secret}
    for secret in sorted(secrets, key=len, reverse=True):
        said = said.replace(secret, "…")
    said = _QUERY.sub("?…", _LOGIN.sub("…@", " ".join(said.split())))
    return said if len(said) <= LONGEST else said[:LONGEST] + "…"


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
