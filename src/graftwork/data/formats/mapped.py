"""Rows of any other shape, by the paths that the `mapping` of graft.yaml gives.

A path is dotted; a number in it is a place in a list (`turns.0.say`), counted from the end if
negative. JSON that a log wrote as text is opened on the way.
"""

from typing import Any

from graftwork.data.formats.completion import take_prompt
from graftwork.data.formats.facts import say_status, says_error, take_extra, take_stage
from graftwork.data.formats.fields import (
    BadRow,
    open_json,
    take_fact,
    take_figure,
    take_optional_text,
    take_text,
    write_json,
)
from graftwork.data.formats.turns import Turn, require_user, take_turns, to_messages, write_reply
from graftwork.data.settings import Mapping
from graftwork.records.interaction import Interaction, Origin


def read_mapped(row: dict[str, Any], origin: Origin, *, mapping: Mapping) -> Interaction:
    turns = _take_question(row, mapping)
    return Interaction(
        id=_take(row, mapping.id) or str(origin),
        origin=origin,
        messages=to_messages(turns),
        reply=_take_reply(row, mapping.reply),
        group=_take(row, mapping.role),
        domain=_take(row, mapping.domain),
        session=_take(row, mapping.session),
        stage=take_stage(follow(row, mapping.stage)) if mapping.stage else None,
        status=_take_status(row, mapping.status),
        finish_reason=_take(row, mapping.finish_reason),
        model=_take(row, mapping.model),
        reward=take_figure(follow(row, mapping.reward)) if mapping.reward else None,
        split=_take(row, mapping.split),
        extra=_take_extra(row, mapping),
    )


def follow(row: Any, path: str) -> Any:
    """What stands at the end of a dotted path; None where it leads nowhere."""
    found = _walk(row, path)
    return None if found is _NOWHERE else found


_NOWHERE = object()


def _walk(row: Any, path: str) -> Any:
    """As `follow`, but None only where the log itself has a null at the end or on the way."""
    value = row
    parts = path.split(".")
    for place, part in enumerate(parts):
        value = open_json(value)
        if isinstance(value, dict):
            rest = ".".join(parts[place:])
            if rest in value:  # a key may have dots in it
                return value[rest]
            value = value.get(part, _NOWHERE)
        elif isinstance(value, list) and part.removeprefix("-").isdecimal():
            number = int(part) if len(part) < 10 else len(value)
            value = value[number] if -len(value) <= number < len(value) else _NOWHERE
        else:
            return None if value is None else _NOWHERE
    return value


def _take_question(row: dict[str, Any], mapping: Mapping) -> list[Turn]:
    system = follow(row, mapping.system) if mapping.system else None
    if mapping.question:
        asked = follow(row, mapping.question)
        if asked is None:
            raise BadRow(f"`{mapping.question}` is missing")
        return take_prompt(asked, mapping.question, system=system)
    path = mapping.messages or ""
    turns = take_turns(follow(row, path), path)
    spoken = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    if spoken and turns[spoken[-1]].content == follow(row, mapping.reply):
        turns = turns[: spoken[-1]]  # the reply may be one of the messages itself, with thanks behind it
    require_user(turns, path)
    led = take_optional_text(system, mapping.system or "")
    return [Turn("system", led), *turns] if led and turns[0].role != "system" else turns


def _take_reply(row: dict[str, Any], path: str) -> str:
    value = _walk(row, path)
    if value is None:
        return ""  # a failed call has no reply; that is seen by its rule
    if value is _NOWHERE:
        raise BadRow(f"`{path}` is missing")
    if isinstance(value, dict):
        if "role" in value and "content" in value:
            return write_reply(take_turns([value], path)[-1])
        return write_json(value, path)
    return take_text(value, path)


def _take_extra(row: dict[str, Any], mapping: Mapping) -> dict[str, Any]:
    texts = (mapping.question, mapping.messages, mapping.reply, mapping.system)
    return {key: value for key, value in take_extra(row).items() if key not in texts}


def _take_status(row: dict[str, Any], path: str | None) -> str | None:
    stated = say_status(follow(row, path)) if path else None
    return "failed" if stated is None and says_error(row) else stated


def _take(row: dict[str, Any], path: str | None) -> str | None:
    return take_fact(follow(row, path)) if path else None
