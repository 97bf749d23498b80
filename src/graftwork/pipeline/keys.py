"""Creates, lists and revokes the API keys of a project. A secret is returned once, by `create_key`."""

import re
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from pydantic import ValidationError

from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.records.errors import UserMistake
from graftwork.serve.budgets import KeyBudget
from graftwork.serve.keys import DEFAULT_SCOPES, ApiKey, digest_secret, make_secret
from graftwork.text.validation import explain_error

_ID_BYTES = 6
_SPAN = re.compile(r"(\d{1,5})([mhdw])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


class CreatedKey(NamedTuple):
    key: ApiKey
    secret: str
    """Stored nowhere: this is the only time that it can be read."""


def create_key(
    work: OpenProject,
    name: str,
    *,
    scopes: Iterable[str] = DEFAULT_SCOPES,
    models: Iterable[str] = (),
    budget: KeyBudget | None = None,
    expires: str | None = None,
) -> CreatedKey:
    """`expires` is a span such as 30d, or a date or time in UTC."""
    secret = make_secret()
    try:
        key = ApiKey.model_validate(
            {
                "id": secrets.token_hex(_ID_BYTES),
                "name": name,
                "digest": digest_secret(secret),
                "scopes": tuple(dict.fromkeys(scopes)),
                "models": tuple(dict.fromkeys(models)),
                "budget": budget or KeyBudget(),
                "created_at": timestamp(),
                "expires_at": None if expires is None else parse_expiry(expires, now=datetime.now(UTC)),
            }
        )
    except ValidationError as refused:
        first = refused.errors(include_url=False, include_input=False)[0]
        option = str(first["loc"][0])
        raise UserMistake(
            f"the key's {option} is not valid",
            why=explain_error(first),
            fix="`graft serve keys create --help` lists the accepted values",
            where=option,
        ) from None
    if not work.api_keys.add(key):
        raise UserMistake(
            f"there is a valid key {name!r} already",
            why="logs and metrics name a key by it",
            fix=f"choose another name, or `graft serve keys revoke {name}` first",
            where=name,
        )
    return CreatedKey(key, secret)


def revoke_key(work: OpenProject, name: str) -> ApiKey:
    """Revoke the valid key with this name or id."""
    for key in work.api_keys.list():
        if name in (key.id, key.name) and key.revoked_at is None:
            at = timestamp()
            work.api_keys.revoke(key.id, at=at)
            return key.model_copy(update={"revoked_at": at})
    raise UserMistake(
        f"there is no valid key {name!r}",
        why="no key of the project has that name or id, or it is revoked already",
        fix="`graft serve keys list` shows all",
        where=name,
    )


def parse_expiry(text: str, *, now: datetime) -> str:
    found = _SPAN.fullmatch(text)
    if found is not None:
        at = now + timedelta(**{_UNITS[found[2]]: int(found[1])})
    else:
        try:
            at = datetime.fromisoformat(text)
            at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
        except (ValueError, OverflowError):
            raise UserMistake(
                f"{text!r} is no time of expiry",
                why="it is neither a span nor a date",
                fix="write 12h, 30d, 2026-12-31 or 2026-12-31T18:00 (UTC)",
                where="--expires",
            ) from None
    if at <= now:
        raise UserMistake(
            "the key would have expired already",
            why=f"{text} is in the past",
            fix="name a later time",
            where="--expires",
        )
    return at.isoformat(timespec="seconds")
