"""Which shape a row has: the one that the settings name, the mapping they give, or by looking.

In: a parsed row. Out: its interactions, most often one. Raises `BadRow` with what was expected.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from graftwork.data.formats import (
    alpaca,
    captured,
    chat,
    completion,
    execution,
    mapped,
    openai_log,
    preference,
    session,
    sharegpt,
)
from graftwork.data.formats.fields import BadRow
from graftwork.data.formats.turns import drop_reasoning
from graftwork.data.settings import DataSettings, FormatName
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact

# In the order of looking: what would also fit a later one stands before it.
FORMATS: dict[FormatName, ModuleType] = {
    "captured": captured,
    "execution": execution,
    "openai_log": openai_log,
    "session": session,
    "preference": preference,
    "chat": chat,
    "sharegpt": sharegpt,
    "alpaca": alpaca,
    "completion": completion,
}
_LOOKS: tuple[tuple[Callable[[dict[str, Any]], bool], ModuleType], ...]
_LOOKS = tuple((shape.fits, shape) for shape in FORMATS.values())
_EXPECTED = "; ".join(shape.EXPECTS for shape in FORMATS.values())


def find_format(row: dict[str, Any]) -> FormatName | None:
    """The name of the shape that a row has; None where it has no known one."""
    return next((name for name, shape in FORMATS.items() if shape.fits(row)), None)


def to_interactions(row: dict[str, Any], origin: Origin, *, settings: DataSettings) -> list[Interaction]:
    found = _read(row, origin, settings)
    if settings.reasoning == "keep":
        return found
    return [_without_reasoning(interaction) for interaction in found]


def _read(row: dict[str, Any], origin: Origin, settings: DataSettings) -> list[Interaction]:
    if settings.format:
        shape = FORMATS[settings.format]
        if not shape.fits(row):
            raise BadRow(
                f"no row of the format {settings.format} {_name_keys(row)}; expected {shape.EXPECTS}"
            )
        return _apply(shape, row, origin)
    if settings.mapping:
        return [mapped.to_interaction(row, origin, mapping=settings.mapping)]
    for fits, shape in _LOOKS:
        if fits(row):
            return _apply(shape, row, origin)
    raise BadRow(
        f"no known shape {_name_keys(row)}; expected one of: {_EXPECTED}; or a mapping in graft.yaml"
    )


def _apply(shape: ModuleType, row: dict[str, Any], origin: Origin) -> list[Interaction]:
    several: Callable[[dict[str, Any], Origin], list[Interaction]] | None
    several = vars(shape).get("to_interactions")
    return several(row, origin) if several else [shape.to_interaction(row, origin)]


def _name_keys(row: dict[str, Any]) -> str:
    # Redacted before it is cut: half a secret is not seen as one.
    keys = redact(", ".join(sorted(row)[:8])).text
    return f"(keys: {keys[:120] or 'none'})"


def _without_reasoning(found: Interaction) -> Interaction:
    kept = {"reply": drop_reasoning(found.reply)}
    if found.rejected is not None:
        kept["rejected"] = drop_reasoning(found.rejected)
    return found.model_copy(update=kept)
