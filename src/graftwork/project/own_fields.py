"""The own fields of a log: which there are, and what each is taken for.

In: logged interactions. Out: one record for each field, and the part of graft.yaml that names them. Pure.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from graftwork.data.audit.usage import TIME_FIELDS, read_day
from graftwork.data.ingest.fields import say_status
from graftwork.data.settings import DataSettings
from graftwork.records.base import Record
from graftwork.records.interaction import Interaction
from graftwork.text.numbers import take_figure, take_score

Meaning = Literal["status", "session", "time", "score", "user", "cost", "nothing"]
_NAMES: dict[Meaning, str] = {
    "status": r"outcome|result|state|status(?:_code)?|resolution|success|ok",
    "session": r"(?:conversation|session|thread|chat|dialog(?:ue)?|ticket|call)(?:_?id)?",
    "score": r"(?:user_?)?(?:stars?|rating|score|csat|nps|thumbs?|feedback|satisfaction)(?:_?score)?",
    "user": r"(?:end_?)?(?:user|customer|client|account)(?:_?id|_?name)?",
    "cost": r".*(?:cost|price)(?:_?usd)?",
}
_TYPED: dict[str, Meaning] = {"status": "status", "session": "session", "reward": "score"}
MAPPED: dict[Meaning, str] = {"status": "status", "session": "session", "score": "reward"}
_WITH_PATHS = {"chat", "sharegpt", "preference", "alpaca", "completion", "openai_log"}
MOST_SHOWN = 5
FEW_STATUSES = 12


class OwnField(Record):
    """A field of the rows, and what it is taken for."""

    name: str
    taken_for: Meaning
    rows: int
    values: tuple[str, ...]
    """The most frequent values, where there are only a few."""
    mapped: bool = False
    """Whether `data.mapping` names it."""
    note: str = ""


def find_own_fields(rows: Sequence[Interaction], *, formats: Iterable[str]) -> tuple[OwnField, ...]:
    """The fields besides the texts, in the order of the log. Other formats have no paths of their own."""
    can_map = set(formats) <= _WITH_PATHS
    values: dict[str, list[Any]] = {}
    typed = {name: [value for row in rows if (value := getattr(row, name)) is not None] for name in _TYPED}
    for row in rows:
        for name, value in row.extra.items():
            values.setdefault(name, []).append(value)
    fields = [
        _describe(name, _TYPED[name], found, note="recognized by its key")
        for name, found in typed.items()
        if found
    ]
    taken = {field.taken_for for field in fields}
    for name, found in values.items():
        meaning = _guess(name, found)
        mapped = can_map and meaning in MAPPED and meaning not in taken
        note = ""
        if meaning == "score" and mapped and 2 * sum((take_score(v) or 0) <= 0 for v in found) > len(found):
            mapped, note = (
                False,
                "not mapped: most are 0 or less, so a 0 may mean that nobody rated the reply",
            )
        if meaning == "status" and mapped and (unknown := _unknown_statuses(found)):
            mapped, note = False, f"not mapped: data.keep_status would have to name {unknown}"
        if meaning == "time" and name not in TIME_FIELDS:
            note = "not read: the log's time is read from `timestamp` or `created_at`"
        if mapped:
            taken.add(meaning)
        fields.append(_describe(name, meaning, found, mapped=mapped, note=note))
    return tuple(fields)


def _guess(name: str, values: Sequence[Any]) -> Meaning:
    last = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).casefold()
    named = next((meaning for meaning, pattern in _NAMES.items() if re.fullmatch(pattern, last)), None)
    if name in TIME_FIELDS or (
        named is None and all(isinstance(value, str) and read_day(value) is not None for value in values)
    ):
        return "time"
    if last in ("at", "when", "time", "datetime", "epoch") and all(
        read_day(value) is not None for value in values
    ):
        return "time"
    if named == "score" and any(take_score(value) is None for value in values):
        return "nothing"
    if named == "cost" and any(take_figure(value) is None for value in values):
        return "nothing"
    if named == "status" and len(set(map(str, values))) > FEW_STATUSES:
        return "nothing"
    return named or "nothing"


def _unknown_statuses(values: Sequence[Any]) -> str:
    """Statuses that are neither a success nor a failure by their words: their rows would be dropped."""
    known = {*DataSettings().keep_status, "success", "failed", "failure", "error", "timeout", "cancelled"}
    words = {say_status(value) or "" for value in values}
    return ", ".join(sorted(word for word in words if word.casefold() not in known)[:MOST_SHOWN])


def _describe(
    name: str, meaning: Meaning, values: Sequence[Any], *, mapped: bool = False, note: str = ""
) -> OwnField:
    counted = Counter(str(value) for value in values)
    few = len(counted) <= FEW_STATUSES and meaning != "session"
    shown = tuple(value[:40] for value, _ in counted.most_common(MOST_SHOWN)) if few else ()
    return OwnField(name=name, taken_for=meaning, rows=len(values), values=shown, mapped=mapped, note=note)


def data_settings(rows: Sequence[Interaction], fields: Sequence[OwnField]) -> dict[str, Any]:
    """The settings under `data:` that read the fields so."""
    mapping = {MAPPED[field.taken_for]: field.name for field in fields if field.mapped}
    worst = find_scale(rows, fields)
    return {
        **({"mapping": mapping} if mapping else {}),
        **({"rated_bad_below": worst} if worst is not None else {}),
    }


def find_scale(rows: Sequence[Interaction], fields: Sequence[OwnField]) -> float | None:
    """The middle of a scale from 1, such as 1 to 5: a score below it is rated bad. None for another score."""
    score = next((field for field in fields if field.mapped and field.taken_for == "score"), None)
    if score is None:
        return None
    given = {take_score(row.extra[score.name]) for row in rows if score.name in row.extra}
    whole = sorted(value for value in given if value is not None and value.is_integer())
    if len(whole) < len(given) or len(whole) < 3 or whole[0] < 1 or whole[-1] not in (5, 7, 10):
        return None
    return (1 + whole[-1]) / 2
