"""Rows of any other shape, by the paths that the `mapping` of graft.yaml gives.

A path is dotted; a number in it is a place in a list (`turns.0.say`), counted from the end if
negative. JSON that a log wrote as text is opened on the way.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from graftwork.data.ingest.dataset_formats import (
    ALPACA_EXPECTS,
    CHAT_EXPECTS,
    COMPLETION_EXPECTS,
    PREFERENCE_EXPECTS,
    SHAREGPT_EXPECTS,
    fits_alpaca,
    fits_chat,
    fits_completion,
    fits_preference,
    fits_sharegpt,
    read_alpaca,
    read_chat,
    read_completion,
    read_preference,
    read_sharegpt,
    take_prompt,
)
from graftwork.data.ingest.fields import (
    BadRow,
    open_json,
    say_status,
    says_error,
    take_extra,
    take_fact,
    take_figure,
    take_optional_text,
    take_stage,
    take_text,
    write_json,
)
from graftwork.data.ingest.log_formats import (
    CAPTURED_EXPECTS,
    EXECUTION_EXPECTS,
    OPENAI_EXPECTS,
    SESSION_EXPECTS,
    fits_captured,
    fits_execution,
    fits_openai_log,
    fits_session,
    read_captured,
    read_execution,
    read_openai_log,
    read_session,
)
from graftwork.data.ingest.turns import (
    Turn,
    drop_reasoning,
    require_user,
    take_turns,
    to_messages,
    write_reply,
)
from graftwork.data.settings import DataSettings, FormatName, Mapping
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact


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


class RowFormat(Protocol):
    """What a format provides. To add one, name such an object in the entry points `graftwork.formats`."""

    @property
    def expects(self) -> str:
        """The keys that such a row holds, for error messages."""

    def fits(self, row: dict[str, Any], /) -> bool:
        """Whether the keys of the row are those of this format."""

    def read(self, row: dict[str, Any], origin: Origin, /) -> list[Interaction]:
        """Read a row that fits. Raises `BadRow`, naming the key that is wrong and never its value."""


class _BuiltIn(NamedTuple):
    expects: str
    fits: Callable[[dict[str, Any]], bool]
    read: Callable[[dict[str, Any], Origin], list[Interaction]]


def _one(read: Callable[[dict[str, Any], Origin], Interaction]) -> Any:
    return lambda row, origin: [read(row, origin)]


# Tried in this order: a format whose rows would also fit a later one comes before it.
FORMATS: dict[FormatName, RowFormat] = {
    "captured": _BuiltIn(CAPTURED_EXPECTS, fits_captured, _one(read_captured)),
    "execution": _BuiltIn(EXECUTION_EXPECTS, fits_execution, _one(read_execution)),
    "openai_log": _BuiltIn(OPENAI_EXPECTS, fits_openai_log, _one(read_openai_log)),
    "session": _BuiltIn(SESSION_EXPECTS, fits_session, read_session),
    "preference": _BuiltIn(PREFERENCE_EXPECTS, fits_preference, _one(read_preference)),
    "chat": _BuiltIn(CHAT_EXPECTS, fits_chat, _one(read_chat)),
    "sharegpt": _BuiltIn(SHAREGPT_EXPECTS, fits_sharegpt, _one(read_sharegpt)),
    "alpaca": _BuiltIn(ALPACA_EXPECTS, fits_alpaca, _one(read_alpaca)),
    "completion": _BuiltIn(COMPLETION_EXPECTS, fits_completion, _one(read_completion)),
}
_EXPECTED = "; ".join(form.expects for form in FORMATS.values())


def find_format(row: dict[str, Any]) -> FormatName | None:
    """Return the name of the first built-in format that fits the row."""
    return next((name for name, form in FORMATS.items() if form.fits(row)), None)


def to_interactions(row: dict[str, Any], origin: Origin, *, settings: DataSettings) -> list[Interaction]:
    found = _read(row, origin, settings)
    if settings.reasoning == "keep":
        return found
    return [_without_reasoning(interaction) for interaction in found]


def _read(row: dict[str, Any], origin: Origin, settings: DataSettings) -> list[Interaction]:
    if settings.format:
        form = FORMATS[settings.format]
        if not form.fits(row):
            raise BadRow(f"no row of the format {settings.format} {_name_keys(row)}; expected {form.expects}")
        return form.read(row, origin)
    if settings.mapping:
        return [read_mapped(row, origin, mapping=settings.mapping)]
    for form in FORMATS.values():
        if form.fits(row):
            return form.read(row, origin)
    raise BadRow(
        f"no known shape {_name_keys(row)}; expected one of: {_EXPECTED}; or a mapping in graft.yaml"
    )


def _name_keys(row: dict[str, Any]) -> str:
    # Redacted before it is cut: half a secret is not recognized as one.
    keys = redact(", ".join(sorted(row)[:8])).text
    return f"(keys: {keys[:120] or 'none'})"


def _without_reasoning(found: Interaction) -> Interaction:
    kept = {"reply": drop_reasoning(found.reply)}
    if found.rejected is not None:
        kept["rejected"] = drop_reasoning(found.rejected)
    return found.model_copy(update=kept)
