"""The `cycle` section of graft.yaml: when to train again, where, who is asked and who is notified.

A schedule is a cron expression: five fields, or a name such as @daily, and the next moment that it names in a
time zone with daylight saving time. A local time that is skipped in spring comes as much later; one that
occurs twice in autumn counts once. Where the hour is free (`*`), every hour that passes counts.
"""

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from graftwork.records.base import NotSecret, Record, SecretLink, SecretText
from graftwork.records.week import ZoneName

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
"""29 February may be eight years away."""
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


COLLECT, CANARY, PROMOTE, DELIVER, REPORT = "collect", "canary", "promote", "deliver", "report"
CYCLE_STEPS = (
    COLLECT, "audit", "prepare", "plan", "train", "evaluate", "gate", "release", "try", CANARY, PROMOTE,
    DELIVER, REPORT,
)  # fmt: skip
"""The steps of a cycle in their order: those of `graft run`, with what comes before and after."""

NoticeKind = Literal[
    "gate", "promoted", "rolled_back", "approval", "stalled", "spend", "failed", "paused", "finished"
]
NOTICE_KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
QUIET: tuple[NoticeKind, ...] = ("finished",)
"""Not sent unless they are asked for."""


def _require_cron(expression: str) -> str:
    parse_cron(expression)
    return expression


class TriggerSettings(Record):
    """A cycle begins when one of these holds; they are checked every ten minutes."""

    new_rows: int | None = Field(
        None, ge=1, description="Usable captures and new log rows since the last cycle."
    )
    drift: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Share of live prompts that are unlike any training prompt (lower end of the interval).",
    )
    rest_hours: float = Field(
        12.0,
        ge=0,
        description="Minimum time after a cycle before an event starts another one; the schedule is not "
        "affected.",
    )

    @property
    def is_set(self) -> bool:
        return self.new_rows is not None or self.drift is not None


class CanarySettings(Record):
    """A new release answers a share of live sessions first (`serve.split`), and is promoted if it holds."""

    minutes: float = Field(60.0, ge=0, description="How long to watch, unless it is decided earlier.")
    fewest_sessions: int = Field(
        100,
        ge=0,
        description="Sessions of the new release to wait for, at most three times `minutes`. After 20, a "
        "release that fails 40 % of requests is often missed; after 100, hardly ever.",
    )
    metric: str = Field(
        "feedback", description="Metric to compare the two by, as in `graft release ab --metric`."
    )


class DeliverSettings(Record):
    """A serving machine that gets the promoted release."""

    to: Annotated[str, NotSecret("a host and a folder, or the URL of a store")] = Field(
        min_length=1,
        description="`[user@]host:/folder` of a project in which `graft serve` runs, `here`, or the URL of a "
        "store.",
    )
    graft: str = Field("graft", description="The `graft` command on that machine.")
    requests: int = Field(
        3, ge=0, description="Questions that the endpoint must answer; otherwise the alias is rolled back."
    )


def _as_deliveries(value: Any) -> Any:
    """One line will do: `deliver: gpu1:/srv/helpdesk`."""
    listed = value if isinstance(value, list | tuple) else [value]
    return [{"to": item} if isinstance(item, str) else item for item in listed]


class NotifySettings(Record):
    """Who is notified of what. Notices are kept until they are delivered."""

    kinds: tuple[NoticeKind, ...] = Field(
        tuple(kind for kind in NOTICE_KINDS if kind not in QUIET), description="Which notices to send."
    )
    command: SecretText | None = Field(
        None, description="A command that receives the notice as JSON on standard input."
    )
    webhook: SecretLink | None = Field(None, description="An http(s) URL that receives the notice as JSON.")


class RetrySettings(Record):
    """What happens when a step fails for a reason that may pass."""

    attempts: int = Field(5, ge=1, description="Attempts at a step before the cycle fails.")
    cycles: int = Field(
        3, ge=1, description="Consecutive failed cycles before the coordinator pauses and sends a notice."
    )


class CycleSettings(Record):
    """What `graft up` does: collect, data, plan, train, evaluate, gate, release, canary, promote, deliver."""

    schedule: Annotated[str, AfterValidator(_require_cron)] | None = Field(
        None, description="A cron expression, such as `0 2 * * *`, or @daily. Unset: no fixed times."
    )
    timezone: ZoneName = Field("UTC", description="The time zone of the schedule, such as Europe/Berlin.")
    when: TriggerSettings = Field(default_factory=TriggerSettings, description="Events that start a cycle.")
    models: tuple[str, ...] = Field(
        (), description="Models to run a cycle for, one after the other; empty: the main model."
    )
    collect: str | None = Field(
        None,
        description="Log file to export captures to first; `data.logs` must match it. Unset: read the logs "
        "as they are.",
    )
    place: str = Field(
        "local",
        min_length=1,
        description="Where to train: local, or a place from `graft fleet places`. Its cost is limited by "
        "`fleet.caps`.",
    )
    gpu: str = Field("", description="GPU to order at a place; empty: the cheapest.")
    approve: tuple[str, ...] = Field(
        (), description="Steps that wait for approval, such as train or promote: `graft up approve`."
    )
    canary: CanarySettings | None = Field(
        None, description="Watch a new release in live traffic before it is promoted; needs `serve.split`."
    )
    deliver: Annotated[tuple[DeliverSettings, ...], BeforeValidator(_as_deliveries)] = Field(
        (), description="Where to send promoted releases: `gpu1:/srv/helpdesk`, or a list."
    )
    notify: NotifySettings = Field(default_factory=NotifySettings, description="Notifications.")
    retry: RetrySettings = Field(default_factory=RetrySettings, description="Failures and pauses.")

    @model_validator(mode="after")
    def _known_steps(self) -> Self:
        unknown = [step for step in self.approve if step not in CYCLE_STEPS]
        if unknown:
            raise ValueError(f"approve: there is no step {unknown[0]!r}; known: {', '.join(CYCLE_STEPS)}")
        return self
