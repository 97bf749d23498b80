"""Sessions that a person starts, as an iCalendar file (RFC 5545).

In: a schedule. Out: text. Times are in UTC; ids stay the same while place, model and start do.
"""

import hashlib
from datetime import UTC, datetime

from graftwork.records.week import ShownSession, WeekSchedule

LONGEST_LINE = 75
"""Octets: longer lines are folded."""
ALARM_MINUTES = 10


def calendar_text(schedule: WeekSchedule) -> str:
    """A calendar with an event, and an alarm, for each session that is started by hand and is not over."""
    lines = ["BEGIN:VCALENDAR", "VERSION:2.0", "PRODID:-//graftwork//plan week//EN", "CALSCALE:GREGORIAN"]
    for session in schedule.sessions:
        if session.by_hand and session.ends_at > schedule.now:
            lines += _event(session, stamp=schedule.now)
    lines.append("END:VCALENDAR")
    return "".join(f"{_fold(line)}\r\n" for line in lines)


def _event(session: ShownSession, *, stamp: datetime) -> list[str]:
    key = f"{session.place}/{session.model}/{_utc(session.starts_at)}"
    uid = hashlib.sha256(key.encode()).hexdigest()[:24]
    minutes = session.end - session.start
    return [
        "BEGIN:VEVENT",
        f"UID:{uid}@graftwork",
        f"DTSTAMP:{_utc(stamp)}",
        f"DTSTART:{_utc(session.starts_at)}",
        f"DTEND:{_utc(session.ends_at)}",
        f"SUMMARY:{_text(f'Train {session.model} at {session.place}')}",
        "DESCRIPTION:"
        + _text(
            f"Start the session by hand. It takes {minutes // 60} h {minutes % 60:02} min, "
            f"{session.train} min of them training."
        ),
        f"LOCATION:{_text(session.place)}",
        "BEGIN:VALARM",
        "ACTION:DISPLAY",
        f"DESCRIPTION:{_text(f'Start {session.model} at {session.place}')}",
        f"TRIGGER:-PT{ALARM_MINUTES}M",
        "END:VALARM",
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
