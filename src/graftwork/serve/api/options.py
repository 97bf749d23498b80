"""What few chat requests ask for: several choices, log-probabilities, tools, and answers in JSON."""

from typing import Any

from graftwork.serve.api.call import MOST_CHOICES, ChatLimits, GenerationOptions
from graftwork.serve.api.fields import take, take_integer, unsupported, wrong
from graftwork.serve.api.tools import parse_tools, require_small

FIELDS = frozenset(
    {"n", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
)
MOST_LOGPROBS = 20
_ANY_OBJECT = {"type": "object"}


def parse_options(body: dict[str, Any], limits: ChatLimits) -> GenerationOptions | None:
    """The options of a chat request; None if it has none that change the answer."""
    used = parse_tools(body, max_bytes=limits.max_schema_bytes)
    options = GenerationOptions(
        n=take_integer(body, "n", default=1, low=1, high=MOST_CHOICES) or 1,
        logprobs=_parse_logprobs(body),
        tools=used.tools,
        tool_choice=used.choice,
        parallel_tool_calls=used.parallel,
        strict_tools=used.strict,
        schema=_parse_format(body, limits),
    )
    return None if options == GenerationOptions() else options


def _parse_logprobs(body: dict[str, Any]) -> int | None:
    wanted = take(body, "logprobs", bool, False)
    most = take_integer(body, "top_logprobs", default=0, low=0, high=MOST_LOGPROBS) or 0
    if most and not wanted:
        raise wrong("top_logprobs", "needs logprobs: true")
    return most if wanted else None


def _parse_format(body: dict[str, Any], limits: ChatLimits) -> dict[str, Any] | None:
    wanted = take(body, "response_format", dict, {"type": "text"})
    kind = wanted.get("type")
    if kind == "text" and wanted.keys() == {"type"}:
        return None
    if kind == "json_object" and wanted.keys() == {"type"}:
        return _ANY_OBJECT
    if kind != "json_schema" or wanted.keys() != {"type", "json_schema"}:
        raise wrong("response_format", "must have the type text, json_object or json_schema")
    return check_schema(wanted["json_schema"], "response_format.json_schema", limits)


def check_schema(named: Any, where: str, limits: ChatLimits) -> dict[str, Any]:
    """The schema of `{"name": …, "schema": {…}}`."""
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise wrong(f"{where}.schema", "must be a JSON Schema object")
    for key in named.keys() - {"name", "schema", "strict", "description", "type"}:
        raise unsupported(f"{where}.{key[:80]}")
    schema: dict[str, Any] = named["schema"]
    require_small(schema, f"{where}.schema", max_bytes=limits.max_schema_bytes)
    return schema
