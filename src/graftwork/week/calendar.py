"""Weekly windows and quota periods as minutes of one week, and its sessions as an iCalendar file (RFC 5545).

Input: the start of the week, windows, resets, by the clock of a time zone; a schedule. Output: spans of
elapsed minutes; the calendar as text, in UTC, whose ids stay the same while place, model and start do. A
night in which clocks change has one hour less or more; a time that is skipped is the moment of the change, a
time that occurs twice the first.
"""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo

from graftwork.records.week import (
    MINUTES_PER_DAY,
    ShownSession,
    WeeklyWindow,
    WeekSchedule,
    parse_moment,
)

Span = tuple[int, int]
"""Minutes since the start of the week, the end excluded."""


def minutes_since(start: datetime, moment: datetime) -> int:
    """Elapsed minutes, regardless of clock changes; rounded down."""
    return int((moment.astimezone(UTC) - start.astimezone(UTC)).total_seconds() // 60)


def local_moment(day: date, minute: int, zone: ZoneInfo) -> datetime:
    """The moment of this local minute of the day; 1440 is the next midnight."""
    extra_days, minute = divmod(minute, MINUTES_PER_DAY)
    local = datetime.combine(day + timedelta(days=extra_days), time(minute // 60, minute % 60), tzinfo=zone)
    back = local.astimezone(UTC).astimezone(zone)
    if back.replace(tzinfo=None) != local.replace(tzinfo=None):
        # Skipped by the change to summer time: the offsets on both sides differ by the gap.
        before = local.replace(fold=0).utcoffset() or timedelta()
        after = local.replace(fold=1).utcoffset() or timedelta()
        gap = abs(before - after)
        wall = back.replace(tzinfo=None)
        # The first minute after the gap: clocks change at whole minutes.
        minute_after = (wall - gap).replace(second=0, microsecond=0)
        while minute_after < wall:
            moment = minute_after.replace(tzinfo=zone)
            if moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) == minute_after:
                return moment
            minute_after += timedelta(minutes=1)
        return wall.replace(tzinfo=zone)
    return local


def week_start(day: date, zone: str, moment: str = "mon 00:00") -> datetime:
    """The last occurrence in the week at or before the end of this day."""
    weekday, minute = parse_moment(moment)
    back = (day.weekday() - (weekday or 0)) % 7
    return local_moment(day - timedelta(days=back), minute, ZoneInfo(zone))


def week_end(start: datetime, zone: str) -> datetime:
    """The same local time seven days later: 167 or 169 hours if clocks change."""
    local = start.astimezone(ZoneInfo(zone))
    return local_moment(
        local.date() + timedelta(days=7), local.hour * 60 + local.minute, ZoneInfo(zone)
    ).astimezone(UTC)


def spans_of(windows: Iterable[WeeklyWindow], *, start: datetime, length: int, zone: str) -> tuple[Span, ...]:
    """Spans within the week in which any of the windows is open."""
    spans = []
    time_zone = ZoneInfo(zone)
    for day in _days_around(start, length, time_zone):
        for window in windows:
            if day.weekday() in window.days:
                opens = minutes_since(start, local_moment(day, window.start, time_zone))
                end = minutes_since(start, local_moment(day, window.end, time_zone))
                spans.append((opens, end))
    return clip(union(spans), (0, length))


def periods_of(
    weekday: int | None, minute: int, *, start: datetime, length: int, zone: str
) -> tuple[Span, ...]:
    """The periods of a quota, each from one reset to the next; the first begins at or before the week.

    It is reset at this minute of one weekday, or of each day.
    """
    time_zone = ZoneInfo(zone)
    resets = [
        minutes_since(start, local_moment(day, minute, time_zone))
        for day in _days_around(start, length, time_zone)
        if weekday is None or day.weekday() == weekday
    ]
    resets = sorted(set(resets))
    return tuple((a, b) for a, b in itertools.pairwise(resets) if b > 0 and a < length)


def _days_around(start: datetime, length: int, zone: ZoneInfo) -> list[date]:
    """Local days from a week before the start to a week after the end: a period may begin that early."""
    first = start.astimezone(zone).date() - timedelta(days=8)
    count = length // MINUTES_PER_DAY + 18
    return [first + timedelta(days=number) for number in range(count)]


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sorted spans that neither overlap nor touch."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return tuple(merged)


def clip(spans: Iterable[Span], to: Span) -> tuple[Span, ...]:
    cut = ((max(start, to[0]), min(end, to[1])) for start, end in spans)
    return tuple((start, end) for start, end in cut if end > start)


def intersect(first: Sequence[Span], second: Sequence[Span]) -> tuple[Span, ...]:
    return union(part for span in second for part in clip(first, span))


def subtract(spans: Iterable[Span], gone: Iterable[Span]) -> tuple[Span, ...]:
    remaining = list(spans)
    for start, end in gone:
        remaining = [
            part for low, high in remaining for part in ((low, min(high, start)), (max(low, end), high))
            if part[1] > part[0]
        ]  # fmt: skip
    return union(remaining)


def cut_at(spans: Iterable[Span], moments: Iterable[int]) -> tuple[Span, ...]:
    """Split the spans at these moments."""
    pieces = []
    for start, end in spans:
        inner = sorted({start, end, *(moment for moment in moments if start < moment < end)})
        pieces += list(itertools.pairwise(inner))
    return tuple(pieces)


def overlap(first: Span, second: Span) -> int:
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


LONGEST_LINE = 75
"""Octets: longer lines are folded."""
ALARM_MINUTES = 10


def calendar_text(schedule: WeekSchedule) -> str:
    """A calendar of the sessions that are not over; those that a person starts say so and have an alarm."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//graftwork//plan week//EN", "CALSCALE:GREGORIAN"]
    for session in schedule.sessions:
        if session.ends_at > schedule.now:
            lines += _event(session, stamp=schedule.now)
    lines.append("END:VCALENDAR")
    return "".join(f"{_fold(line)}\r\n" for line in lines)


def _event(session: ShownSession, *, stamp: datetime) -> list[str]:
    key = f"{session.place}/{session.model}/{_utc(session.starts_at)}"
    uid = hashlib.sha256(key.encode()).hexdigest()[:24]
    minutes = session.end - session.start
    title = f"{'Start by hand' if session.by_hand else 'Train'}: {session.model} at {session.place}"
    how_started = "Start the session by hand." if session.by_hand else "`graft up week` starts the session."
    alarm = [
        "BEGIN:VALARM",
        "ACTION:DISPLAY",
        f"DESCRIPTION:{_text(f'Start {session.model} at {session.place}')}",
        f"TRIGGER:-PT{ALARM_MINUTES}M",
        "END:VALARM",
    ]
    return [
        "BEGIN:VEVENT",
        f"UID:{uid}@graftwork",
        f"DTSTAMP:{_utc(stamp)}",
        f"DTSTART:{_utc(session.starts_at)}",
        f"DTEND:{_utc(session.ends_at)}",
        f"SUMMARY:{_text(title)}",
        "DESCRIPTION:"
        + _text(
            f"{how_started} It takes {minutes // 60} h {minutes % 60:02} min, "
            f"{session.train} min of them training."
        ),
        f"LOCATION:{_text(session.place)}",
        *(alarm if session.by_hand else ()),
        "END:VEVENT",
    ]


def _utc(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y%m%dT%H%M%SZ")


def _text(value: str) -> str:
    """Backslash, comma, semicolon and line breaks are escaped."""
    for mark in ("\\", ";", ","):
        value = value.replace(mark, f"\\{mark}")
    return value.replace("\n", "\\n")


def _fold(line: str) -> str:
    """No line is longer than 75 octets; a character is not divided."""
    parts: list[str] = []
    current = ""
    for letter in line:
        limit = LONGEST_LINE if not parts else LONGEST_LINE - 1
        if len((current + letter).encode()) > limit:
            parts.append(current)
            current = ""
        current += letter
    return "\r\n ".join([*parts, current])
