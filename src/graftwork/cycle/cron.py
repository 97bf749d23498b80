"""Cron expressions: the next moment that a schedule names.

Input: five fields, or a name such as @daily, and a time zone with daylight saving time. Output:
`CronSchedule`. A local time that is skipped in spring comes as much later; one that occurs twice in autumn
counts once. Where the hour is free (`*`), every hour that passes counts.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
LONGEST_DAYS = 366 * 9
"""Longest search for a date: 29 February may be eight years away."""
_PART = re.compile(r"(?P<first>\*|\w+)(?:-(?P<last>\w+))?(?:/(?P<step>\d+))?")
FIELDS: tuple[tuple[str, int, int, tuple[str, ...]], ...] = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, ("", *MONTHS)),
    ("day of the week", 0, 7, WEEKDAYS),
)
"""Name, lowest and highest value, and words for values, counted from 0."""


class CronSchedule(NamedTuple):
    """The values of each field. Weekdays are 0 (Sunday) to 6."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_hour: bool
    any_day: bool
    any_weekday: bool

    def matches_day(self, day: date) -> bool:
        """If both days are restricted, either of them counts, as in every cron."""
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        if self.any_day or self.any_weekday:
            return of_month and of_week
        return of_month or of_week

    def next_after(self, moment: float, zone: ZoneInfo) -> float:
        """The first moment after this one."""
        # A day earlier: a skipped local time of yesterday may come today.
        first = datetime.fromtimestamp(moment, zone).date() - timedelta(days=1)
        for offset in range(LONGEST_DAYS):
            day = first + timedelta(days=offset)
            if self.matches_day(day):
                later = [candidate for candidate in self._moments(day, zone) if candidate > moment]
                if later:
                    return min(later)
        raise ValueError("this date never occurs")

    def _moments(self, day: date, zone: ZoneInfo) -> Iterator[float]:
        for hour in self.hours:
            for minute in self.minutes:
                local = datetime.combine(day, time(hour, minute), zone)
                early = local.timestamp()
                wall_time = datetime.fromtimestamp(early, zone).replace(tzinfo=None)
                skipped = wall_time != local.replace(tzinfo=None)
                if not (skipped and self.any_hour):
                    yield early
                if self.any_hour and not skipped:
                    yield local.replace(fold=1).timestamp()


@lru_cache(maxsize=64)
def parse_cron(expression: str) -> CronSchedule:
    """Raises ValueError with the field that is wrong, or if no such date exists."""
    text = NAMED.get(expression.strip().lower(), expression)
    fields = text.split()
    if len(fields) != len(FIELDS):
        raise ValueError(
            f"a cron expression has five fields (minute, hour, day, month, weekday), {expression!r} has "
            f"{len(fields)}"
        )
    values = [_values(*field, field_text) for field, field_text in zip(FIELDS, fields, strict=True)]
    minutes, hours, days, months, weekdays = values
    schedule = CronSchedule(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(weekday % 7 for weekday in weekdays),
        any_hour=fields[1].startswith("*"),
        any_day=fields[2].startswith("*"),
        any_weekday=fields[4].startswith("*"),
    )
    try:
        schedule.next_after(datetime(2026, 1, 1, tzinfo=UTC).timestamp(), ZoneInfo("UTC"))
    except ValueError:
        raise ValueError(f"{expression!r} never occurs: no such date exists") from None
    return schedule


def _values(name: str, lowest: int, highest: int, names: tuple[str, ...], text: str) -> set[int]:
    def number_of(part: str) -> int:
        number = names.index(part) if part and part in names else -1
        if part.isdecimal() and part.isascii():
            number = int(part)
        if not lowest <= number <= highest:
            raise ValueError(f"the {name} must be {lowest} to {highest}, not {part}")
        return number

    values: set[int] = set()
    for part in text.lower().split(","):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"the {name} {part!r} cannot be read; write 5, 1-5, */10 or 1,3")
        step = int(match["step"] or 1)
        if match["first"] == "*":
            low, high = lowest, highest
        else:
            low = number_of(match["first"])
            high = number_of(match["last"]) if match["last"] else highest if match["step"] else low
        if step < 1 or low > high:
            raise ValueError(f"the {name} {part!r} is empty")
        values |= set(range(low, high + 1, step))
    return values
