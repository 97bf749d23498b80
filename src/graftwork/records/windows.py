"""Weekly windows as people write them: `22:00-08:00`, `mon-fri 18:00-23:00`, `sat,sun 00:00-24:00`.

In: text. Out: days and minutes of the day. Knows neither dates nor time zones.
"""

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_A_DAY = 24 * 60

_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d|24:00"
_DAY = "|".join(DAYS)
_DAYS = rf"(?:{_DAY})(?:-(?:{_DAY}))?"
_WINDOW = re.compile(rf"^(?:(?P<days>{_DAYS}(?:,{_DAYS})*) +)?(?P<start>{_CLOCK})-(?P<end>{_CLOCK})$")
_MOMENT = re.compile(rf"^(?:(?P<day>{_DAY}) +)?(?P<clock>{_CLOCK})$")


class WeeklyWindow(NamedTuple):
    """A window that opens on some days. `end` above 1440 is on the next day."""

    days: tuple[int, ...]
    start: int
    end: int


class WeeklyMoment(NamedTuple):
    """A time of day, on one day of the week or on each."""

    day: int | None
    minute: int


def parse_window(text: str) -> WeeklyWindow:
    """An end that is not after the start is on the next day."""
    found = _WINDOW.match(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no window: write 22:00-08:00 or mon-fri 18:00-23:00")
    start, end = _minutes(found["start"]), _minutes(found["end"])
    if start == end:
        raise ValueError(f"{text!r} is empty: write 00:00-24:00 for the whole day")
    return WeeklyWindow(_days(found["days"]), start, end if end > start else end + MINUTES_A_DAY)


def parse_moment(text: str) -> WeeklyMoment:
    found = _MOMENT.match(text.strip().lower())
    if found is None:
        raise ValueError(f"{text!r} is no time: write 00:00 or sat 00:00")
    return WeeklyMoment(DAYS.index(found["day"]) if found["day"] else None, _minutes(found["clock"]))


def _minutes(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str | None) -> tuple[int, ...]:
    """`fri-mon` goes round the end of the week."""
    if not text:
        return tuple(range(7))
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        at, end = DAYS.index(first), DAYS.index(last or first)
        found.add(at)
        while at != end:
            at = (at + 1) % 7
            found.add(at)
    return tuple(sorted(found))


def _checked_window(text: str) -> str:
    parse_window(text)
    return text


def _checked_moment(text: str) -> str:
    parse_moment(text)
    return text


def _checked_zone(text: str) -> str:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{text!r} is no time zone: write a name such as Europe/Berlin or UTC") from error
    return text


WindowText = Annotated[str, AfterValidator(_checked_window)]
MomentText = Annotated[str, AfterValidator(_checked_moment)]
ZoneName = Annotated[str, AfterValidator(_checked_zone)]
