"""Turns what somebody asks for on the command line into a query for releases, or refuses it."""

import re
from datetime import UTC, datetime, timedelta
from typing import get_args

from graftwork.records.errors import UserMistake
from graftwork.records.release import ReleaseQuery
from graftwork.records.verdict import Decision

_UNITS = {"d": "days", "h": "hours", "w": "weeks"}


def make_query(
    *,
    tag: str | None,
    decision: str | None,
    model: str | None,
    base: str | None,
    since: str | None,
    search: str | None,
    collected: bool,
    limit: int,
) -> ReleaseQuery:
    """One more than `limit` is asked for, so that it can be said whether there are more."""
    chosen = next((one for one in get_args(Decision) if one == decision), None)
    if decision is not None and chosen is None:
        raise UserMistake(
            f"{decision!r} is no decision",
            fix=f"choose one of {', '.join(get_args(Decision))}",
            where="--decision",
        )
    return ReleaseQuery(
        tag=tag,
        decision=chosen,
        model=model,
        base=base,
        since=to_time(since, now=datetime.now(UTC)) if since else None,
        search=search,
        collected=collected,
        limit=limit + 1 if limit else None,
    )


def to_time(text: str, *, now: datetime) -> str:
    """A date, a time, or how long ago, as the index writes times."""
    ago = re.fullmatch(r"(\d{1,5})([dhw])", text.strip())
    if ago is not None:
        return (now - timedelta(**{_UNITS[ago[2]]: int(ago[1])})).isoformat(timespec="seconds")
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise UserMistake(
            f"{text!r} is no time", fix="write it like 2026-03-01, or like 7d, 12h or 2w", where="--since"
        ) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC).isoformat(timespec="seconds")
