"""What the logged calls used, day by day: tokens and cost by role and model.

In: columns of the corpus. Out: `UsageDay` records, dropped rows included, since they cost as well. A row
whose log states no time has no day.
"""

from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from graftwork.data.audit.findings import AuditFacts
from graftwork.records.interaction import Interaction, UsageDay

if TYPE_CHECKING:
    from numpy.typing import NDArray

NO_DAY = -1
UNKNOWN = -1
"""Of a number of tokens, which is never negative. An unknown cost is negative too."""
_FIRST = date(1970, 1, 1)
TIME_FIELDS = (
    "timestamp",
    "ts",
    "created_at",
    "created",
    "start_time",
    "startTime",
    "started_at",
    "time",
    "date",
)
_LATEST = 4102444800.0
"""The year 2100: a larger number of seconds is one of milli-, micro- or nanoseconds."""


def day_of(row: Interaction) -> int:
    """Days since 1970 in UTC; NO_DAY where the log does not state when the call was made."""
    given = [row.capture.at] if row.capture is not None else []
    given += [row.extra[name] for name in TIME_FIELDS if name in row.extra]
    return next((day for value in given if (day := read_day(value)) is not None), NO_DAY)


def read_day(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        days = (moment.date() - _FIRST).days
        return days if days >= 0 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e8 < value < 1e20:
        return None
    seconds = float(value)
    while seconds > _LATEST:
        seconds /= 1000
    return int(seconds // 86400)


def count_usage(facts: AuditFacts) -> tuple[UsageDay, ...]:
    """One record for each day, role and model, in that order."""
    import numpy as np

    corpus = facts.corpus
    if not corpus.rows:
        return ()
    days = corpus.column("day").astype(np.int64)
    groups, models = facts.labels("group"), facts.labels("model")
    keys = np.stack([days, groups[0].astype(np.int64), models[0].astype(np.int64)])
    found, where = np.unique(keys, axis=1, return_inverse=True)
    where = where.reshape(-1)

    def total(values: "NDArray[Any]", chosen: "NDArray[Any]") -> "NDArray[Any]":
        weights = np.where(chosen, values, 0).astype(np.float64)
        return np.bincount(where, weights=weights, minlength=found.shape[1])

    prompt, reply = corpus.column("prompt_tokens"), corpus.column("reply_tokens")
    cached, cost = corpus.column("cached_tokens"), corpus.column("cost")
    counted, costed = (prompt >= 0) & (reply >= 0), cost >= 0
    everything = np.ones(corpus.rows, dtype=bool)
    unpriced = counted & ~costed
    chars, reply_characters = corpus.column("prompt_chars"), corpus.column("reply_chars")
    sums = {
        "calls": total(np.ones(corpus.rows), everything),
        "prompt_characters": total(chars, everything),
        "reply_characters": total(reply_characters, everything),
        "counted": total(np.ones(corpus.rows), counted),
        "prompt_tokens": total(prompt, counted),
        "cached_tokens": total(np.maximum(cached, 0), counted),
        "reply_tokens": total(reply, counted),
        "uncounted_prompt_characters": total(chars, ~counted & ~costed),
        "uncounted_reply_characters": total(reply_characters, ~counted & ~costed),
        "costed": total(np.ones(corpus.rows), costed),
        "cost": total(cost, costed),
        "unpriced_prompt_tokens": total(prompt, unpriced),
        "unpriced_cached_tokens": total(np.maximum(cached, 0), unpriced),
        "unpriced_reply_tokens": total(reply, unpriced),
    }
    records = []
    for place, (day, group, model) in enumerate(found.T.tolist()):
        figures = {name: float(values[place]) for name, values in sums.items()}
        records.append(
            UsageDay(
                day=None if day < 0 else _FIRST + timedelta(days=day),
                group=groups[1][group] if group >= 0 else None,
                model=models[1][model] if model >= 0 else None,
                **{name: value if name == "cost" else round(value) for name, value in figures.items()},
            )
        )
    return tuple(records)
