"""Chooses the format of a row: the one that the settings name, their mapping, or the first that fits.

In: a parsed row. Out: its interactions, usually one. Raises `BadRow` with what was expected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from graftwork.data.formats.alpaca import ALPACA_EXPECTS, fits_alpaca, read_alpaca
from graftwork.data.formats.captured import CAPTURED_EXPECTS, fits_captured, read_captured
from graftwork.data.formats.chat import CHAT_EXPECTS, fits_chat, read_chat
from graftwork.data.formats.completion import COMPLETION_EXPECTS, fits_completion, read_completion
from graftwork.data.formats.execution import EXECUTION_EXPECTS, fits_execution, read_execution
from graftwork.data.formats.fields import BadRow
from graftwork.data.formats.mapped import read_mapped
from graftwork.data.formats.openai_log import OPENAI_EXPECTS, fits_openai_log, read_openai_log
from graftwork.data.formats.preference import PREFERENCE_EXPECTS, fits_preference, read_preference
from graftwork.data.formats.session import SESSION_EXPECTS, fits_session, read_session
from graftwork.data.formats.sharegpt import SHAREGPT_EXPECTS, fits_sharegpt, read_sharegpt
from graftwork.data.formats.turns import drop_reasoning
from graftwork.data.settings import DataSettings, FormatName
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact


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
