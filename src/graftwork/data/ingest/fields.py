"""Typed values and metadata from parsed JSON.

Input: a row. Output: values, and the fields of an `Interaction` other than its text, under the keys that most
logs use. A required value raises `BadRow` that names the key and the type found. An optional value that
cannot be used is None: no row is lost over its model's name. Short values under other keys go to `extra`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime
from http import HTTPStatus
from typing import Any, TypeVar, cast

import orjson
from pydantic import ValidationError

from graftwork.data.ingest.blocks import ReadFault
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact
from graftwork.text.shape import has_too_many_values
from graftwork.text.wording import take_figure, take_score

Result = TypeVar("Result")

_LARGEST_COUNT = 1 << 53
_DURATION = re.compile(
    r"\s*(\d{1,15}(?:\.\d{0,15})?)\s*(ms|s|m|min|[a-z]{3,12})\.?\s*", re.ASCII | re.IGNORECASE
)
_MILLISECONDS = {
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1.0),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1e3),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 6e4),
}
_NAMES_OF_OBJECTS = ("name", "id", "role", "value", "code")


class BadRow(ValueError):
    """A row whose content does not match its format. The message names keys, never values."""


def explain(error: "BadRow | ValidationError") -> str:
    """Return what is wrong with a row, without its values."""
    if isinstance(error, BadRow):
        return str(error)
    first = error.errors(include_input=False, include_url=False)[0]
    return f"`{'.'.join(str(part) for part in first['loc'])}`: {first['msg']}"


def report_bad_row(error: "BadRow | ValidationError", origin: Origin, *, path: str = "") -> ReadFault:
    """The fault of a row, or of the part of it at this path, that cannot be read."""
    message = f"`{path}`: {explain(error)}" if path else explain(error)
    # Keys come from the user and may contain secrets.
    return ReadFault(origin=origin, code="schema", message=redact(message).text)


def read_each(
    items: Iterable[Any], path: str, read: Callable[[Any], Result]
) -> "Iterator[tuple[str, Result | BadRow | ValidationError]]":
    """Read the items of a list in a row, each with its path. One that cannot be read does not stop the
    others: its error stands in its place.
    """
    for index, item in enumerate(items):
        name = f"{path}[{index}]"
        try:
            result = read(item)
        except (BadRow, ValidationError) as error:
            yield name, error
        else:
            yield name, result


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def take_text(value: Any, key: str) -> str:
    """Return text, or the text parts of a list of content parts."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRow(f"`{key}` holds a NUL character")
        return value
    if not isinstance(value, list):
        raise BadRow(f"`{key}` must be text, not {name_type(value)}")
    texts = []
    for index, part in enumerate(value):
        name = f"{key}[{index}]"
        if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS:
            text = first_of(part, "text", "content", "value", "refusal")
            # OpenAI's Assistants API wraps the text together with its annotations.
            texts.append(take_text(text.get("value") if isinstance(text, dict) else text, f"{name}.text"))
        elif isinstance(part, str):
            texts.append(take_text(part, name))
        else:
            raise BadRow(f"`{name}` is not text, and only text is read")
    return "".join(texts)


def plain_text(value: Any) -> str:
    """Return text that is valid; empty for anything else."""
    return value if isinstance(value, str) and "\0" not in value else ""


def take_optional_text(value: Any, key: str) -> str | None:
    """Return text or None; an integer becomes its digits, since logs write ids both ways."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return take_text(value, key)


def take_fact(value: Any) -> str | None:
    """Return short metadata as text: a string, the digits of a number, the name of an object; else None."""
    if isinstance(value, dict):
        value = first_of(value, *_NAMES_OF_OBJECTS)
    if isinstance(value, str):
        return value if value and "\0" not in value else None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def take_duration(value: Any) -> float | None:
    """Return milliseconds; text may name its unit, as in `12.5ms` or `3 s`."""
    if value is None:
        return None
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return take_figure(value)
    unit = _MILLISECONDS.get(match[2].lower())
    return None if unit is None else float(match[1]) * unit


def take_count(value: Any) -> int | None:
    if value is None:
        return None
    number = take_figure(value)
    return None if number is None or abs(number) > _LARGEST_COUNT else int(number)


def take_object(value: Any, key: str) -> dict[str, Any]:
    """Return an object; empty if it is missing."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"`{key}` must be an object, not {name_type(value)}")
    return cast("dict[str, Any]", value)


def take_list(value: Any, key: str) -> list[Any]:
    """Return a list; empty if it is missing."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"`{key}` must be a list, not {name_type(value)}")
    return value


def open_json(value: Any) -> Any:
    """Parse JSON that a log wrote as text; return other values unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and not has_too_many_values(value):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def write_json(value: Any, key: str) -> str:
    """Write JSON as chat templates do: keys in order, a space after each separator."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        raise BadRow(f"`{key}` is nested too deeply") from None


def first_of(row: dict[str, Any], *keys: str) -> Any:
    """Return the value of the first of these keys that the row has."""
    for key in keys:
        value = row.get(key)
        if value is not None:
            return value
    return None


def parse_object(data: bytes) -> dict[str, Any] | None:
    """Parse a JSON object; None for anything else."""
    if has_too_many_values(data):
        return None
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def name_type(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | dict) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


_STAGE = re.compile(
    r"\s*(?:(?:tank|training|curriculum)?[ _-]*stage[ _-]*)?(\d{1,4})\s*", re.IGNORECASE | re.ASCII
)
_HTTP = re.compile(
    r"\s*(HTTP(?:/[\d.]{1,3})?\s{1,2})?([1-5]\d\d)(?:\s([\w '-]{0,40}))?", re.IGNORECASE | re.ASCII
)
_PHRASES = frozenset(("", "success", "error", "failed", *(code.phrase.casefold() for code in HTTPStatus)))
_SUCCESS = frozenset(("done", "finished", "complete", "passed", "pass", "resolved", "true", "yes"))
_FAILED = frozenset(("false", "no"))
_NO_ERROR = frozenset(("", "0", "none", "null", "nil", "no", "false", "n/a", "-", "ok", "[]", "{}"))
_LONGEST_EXTRA = 200
_MOST_NESTED = 30
# Objects that the formats read themselves.
_READ_ELSEWHERE = frozenset(
    (
        *("execution", "llm", "task", "request", "response", "body", "conversation", "exchanges"),
        *("interactions", "episodes", "decisions", "code_patterns", "patterns"),
    )
)
SCORES = ("reward", "score")
_TAKEN = frozenset(
    (
        *("id", "uid", "uuid", "status", "success", "ok", "finish_reason", "stop_reason", "agent"),
        *("agent_role", "role", "group", "domain", "category", "topic", "session", "session_id"),
        *("conversation_id", "thread_id", "stage", "model", "model_name", "duration_ms"),
        *("latency_ms", "max_tokens", "reward", "score", "split", "messages", "prompt", "completion"),
        *("response", "question", "answer", "instruction", "input", "output", "system", "history"),
        *("chosen", "rejected", "conversations", "tools", "functions", "errors", "text", "content"),
        *("reply", "reasoning_content", "reasoning", "thinking", "system_prompt"),
    )
)


def take_facts(row: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Return the keyword arguments of an `Interaction` except `messages`, `reply` and `rejected`."""
    return {
        "id": take_fact(first_of(row, "id", "uid", "uuid")) or str(origin),
        "origin": origin,
        "status": take_status(row),
        "finish_reason": take_fact(first_of(row, "finish_reason", "stop_reason")),
        "group": take_group(row),
        "domain": _take_name(first_of(row, "domain", "category", "topic")),
        "session": take_session(row),
        "stage": take_stage(row.get("stage")),
        "model": take_fact(first_of(row, "model", "model_name")),
        "duration_ms": take_duration(first_of(row, "duration_ms", "latency_ms")),
        **take_usage(row),
        "max_tokens": take_count(row.get("max_tokens")),
        "reward": take_reward(row),
        "split": _take_name(row.get("split")),
        "extra": take_extra(row),
    }


_PROMPT_TOKENS = (
    *("prompt_tokens", "input_tokens", "promptTokens", "inputTokens", "promptTokenCount"),
    "input",
)
_REPLY_TOKENS = (
    *("completion_tokens", "output_tokens", "reply_tokens", "completionTokens", "outputTokens"),
    *("candidatesTokenCount", "output"),
)
_COSTS = ("cost_usd", "total_cost", "cost")
_CACHE_TOKENS = ("cache_read_input_tokens", "cache_creation_input_tokens")
_DETAILS = ("prompt_tokens_details", "input_tokens_details", "input_token_details")
_USAGE_KEYS = frozenset(
    (
        *(*_DETAILS, "cached_tokens", "cache_read_input_tokens"),
        *(*_PROMPT_TOKENS[:-1], *_REPLY_TOKENS[:-1], *_COSTS),
    )
)


def take_usage(row: dict[str, Any]) -> dict[str, Any]:
    """Return the tokens and the cost of a call, from the row or from its `usage`."""
    usage_facts: dict[str, Any] = {}
    usage = first_of(row, "usage", "usageMetadata")
    sources = [usage] if isinstance(usage, dict) and usage else []
    if not _USAGE_KEYS.isdisjoint(row):
        sources.append(row)
    for source in sources:
        # Only inside of `usage` are `input` and `output` counts.
        last = None if source is usage else -1
        prompt = take_tokens(first_of(source, *_PROMPT_TOKENS[:last]))
        if prompt is not None and "total_tokens" not in source:
            # Anthropic counts what it reads from the cache and writes to it apart from the input.
            prompt += sum(take_tokens(source.get(name)) or 0 for name in _CACHE_TOKENS)
        details = next((source[name] for name in _DETAILS if isinstance(source.get(name), dict)), None)
        if details is None:
            cached = first_of(source, "cached_tokens", "cache_read_input_tokens", "cachedContentTokenCount")
        else:
            cached = first_of(details, "cached_tokens", "cache_read")
        counts = {
            "prompt_tokens": prompt,
            "reply_tokens": take_tokens(first_of(source, *_REPLY_TOKENS[:last])),
            "cached_tokens": take_tokens(cached),
            "cost": take_cost(first_of(source, *_COSTS)),
        }
        for key, value in counts.items():
            if value is not None:
                usage_facts.setdefault(key, value)
    return usage_facts


def take_tokens(value: Any) -> int | None:
    """Return a number of tokens: a count that is not negative."""
    if value is None or (type(value) is int and 0 <= value <= _LARGEST_COUNT):
        return value  # as nearly all are
    count = take_count(value)
    return count if count is not None and count >= 0 else None


def take_cost(value: Any) -> float | None:
    """Return an amount of dollars that is not negative; of an object its total."""
    if isinstance(value, dict):
        value = first_of(value, "total", "total_cost")
    if value is None:
        return None
    figure = take_figure(value)
    return figure if figure is not None and figure >= 0 else None


def rate_call(scores: Iterable[Any]) -> dict[str, Any]:
    """Return the mean of the numbers among the scores of a call, as facts of its row."""
    numbers = [number for score in scores if (number := take_figure(score)) is not None]
    return {"reward": sum(numbers) / len(numbers), "reward_level": "call"} if numbers else {}


def take_status(row: dict[str, Any]) -> str | None:
    """Return the outcome. Without a status, an error or `ok: false` means `failed`."""
    stated = say_status(row.get("status"))
    if stated is not None:
        return stated
    if says_error(row):
        return "failed"
    claimed = say_status(first_of(row, "success", "ok"))
    return claimed if claimed in ("success", "failed") else None


def say_status(value: Any) -> str | None:
    """Normalize a status: booleans, HTTP codes and common words become `success` or `failed`."""
    if isinstance(value, bool):
        return "success" if value else "failed"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    word = take_fact(value)
    if word is None or not word.strip():
        return None
    code = _HTTP.fullmatch(word)
    if code and (code[1] or (code[3] or "").strip().casefold() in _PHRASES):
        return "success" if code[2].startswith("2") else "failed"
    folded = word.strip().casefold()
    return "success" if folded in _SUCCESS else "failed" if folded in _FAILED else word


def says_error(row: dict[str, Any]) -> bool:
    """Whether the log states an error for the row. A fraction is a metric, not an error."""
    for key in ("error", "exception"):
        value = row.get(key)
        if isinstance(value, str):
            if value.strip().casefold() not in _NO_ERROR:
                return True
        elif value and not isinstance(value, float):
            return True
    return False


def take_group(row: dict[str, Any]) -> str | None:
    """Return the role of the agent, which some logs name and others describe."""
    agent = row.get("agent")
    if agent is None:
        return _take_name(first_of(row, "agent_role", "role", "group"))
    return take_fact(first_of(agent, "role", "name", "id") if isinstance(agent, dict) else agent)


def take_session(row: dict[str, Any]) -> str | None:
    session = first_of(row, "session", "session_id", "conversation_id", "thread_id")
    if isinstance(session, dict):
        session = first_of(session, "id", "session_id")
    return take_fact(session)


def take_stage(value: Any) -> int | None:
    """Return the stage of a curriculum: 2, "2", "stage 2". A named stage has no number."""
    if isinstance(value, str):
        match = _STAGE.fullmatch(value)
        return int(match.group(1)) if match else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 9999:
        return None
    return int(value)


def take_reward(row: dict[str, Any]) -> float | None:
    """Return the judgment of the reply: a number, or 1 and 0 for the labels of KTO datasets."""
    stated = first_of(row, *SCORES)
    if stated is not None and (score := take_score(stated)) is not None:
        return score
    label = first_of(row, "label", "kto_tag")
    # A number here is the class of a classification dataset.
    return take_score(label) if isinstance(label, bool | str) and take_figure(label) is None else None


def take_extra(row: dict[str, Any]) -> dict[str, Any]:
    """Return short values under unknown keys; nested ones under dotted names."""
    extra: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    for key, value in row.items():
        if key in _TAKEN:
            continue
        if isinstance(value, str | int | float):
            _keep(extra, key, value)
        elif isinstance(value, dict) and key not in _READ_ELSEWHERE:
            _keep_nested(nested, key, value, depth=2)
    extra = {**nested, **extra}  # a key may have dots in it
    stage = row.get("stage")
    if isinstance(stage, str) and take_stage(stage) is None:
        _keep(extra, "stage", stage)
    for name in SCORES:
        # A score that is text stays a field of its own, so that it can be named in an error.
        if isinstance(row.get(name), str) and row[name] and take_score(row[name]) is None:
            _keep(extra, name, row[name])
    errors = row.get("errors")
    if isinstance(errors, list) and errors:
        extra["errors"] = len(errors)
    return extra


def _keep(extra: dict[str, Any], key: str, value: str | float) -> None:
    if not isinstance(value, str) or (len(value) <= _LONGEST_EXTRA and "\0" not in value):
        extra[key] = value


def _keep_nested(extra: dict[str, Any], name: str, value: dict[str, Any], *, depth: int) -> None:
    """Keep the values of an object, down to `depth`, as long as there is room."""
    for key, inner in value.items():
        if len(extra) >= _MOST_NESTED:
            return
        dotted = f"{name}.{key}"
        if isinstance(inner, str | int | float) and len(dotted) <= _LONGEST_EXTRA:
            _keep(extra, dotted, inner)
        elif isinstance(inner, dict) and depth > 1:
            _keep_nested(extra, dotted, inner, depth=depth - 1)


def _take_name(value: Any) -> str | None:
    """Return a name if there is one; other values under such common keys are ignored."""
    if isinstance(value, str) and value and len(value) <= _LONGEST_EXTRA and "\0" not in value:
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


NO_DAY = -1
FIRST_DAY = date(1970, 1, 1)
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
    times = [row.capture.at] if row.capture is not None else []
    times += [row.extra[name] for name in TIME_FIELDS if name in row.extra]
    return next((day for value in times if (day := read_day(value)) is not None), NO_DAY)


def read_day(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            return None
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        days = (moment.date() - FIRST_DAY).days
        return days if days >= 0 else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e8 < value < 1e20:
        return None
    seconds = float(value)
    while seconds > _LATEST:
        seconds /= 1000
    return int(seconds // 86400)
