"""What the readers share: values by any of their names, turned into plain types.

In: a written file and, for each field, the names that it goes by. Out: values and the places they were
found at. `auto` and what cannot be read as the type is left out: nothing is guessed in its place.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from graftwork.plan.lint.facts import ConfigLocation, Configuration, Kind
from graftwork.plan.lint.written import WrittenConfig, placeholders, texts_for_numbers

Convert = Callable[[Any], Any]

DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float32": "float32",
    "no": "float32",
}
WHEN = {"steps": "steps", "epoch": "epoch", "no": "no", "best": "best"}


class Names(NamedTuple):
    """How a field is called, the usual name first, and how its value is read."""

    names: tuple[str, ...]
    read: Convert


class FoundValue(NamedTuple):
    values: dict[str, Any]
    places: dict[str, ConfigLocation]


def number(value: Any) -> float | None:
    """A number, also where YAML made a text of it."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        read = float(value)
    except (TypeError, ValueError):
        return None
    return read if math.isfinite(read) else None


def whole(value: Any) -> int | None:
    read = number(value)
    return int(read) if read is not None and read == int(read) else None


def positive(value: Any) -> int | None:
    read = whole(value)
    return read if read is not None and read > 0 else None


def yes(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}.get(
            value.lower()
        )
    return bool(value) if isinstance(value, bool | int) else None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def dtype(value: Any) -> str | None:
    if value is False:
        return "float32"
    return DTYPES.get(str(value).removeprefix("torch.").lower())


def when(value: Any) -> str | None:
    # `no` without quotes is False to YAML 1.1.
    return "no" if value is False else WHEN.get(str(value).lower())


def names_list(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value else None
    return tuple(str(part) for part in value) if isinstance(value, list) and value else None


def gather(written: WrittenConfig, fields: Mapping[str, Names]) -> FoundValue:
    values: dict[str, Any] = {}
    places: dict[str, ConfigLocation] = {}
    for field, names in fields.items():
        for name in names.names:
            found = written.named(name)
            read = names.read(found[1].value) if found else None
            if found is not None and read is not None:
                values[field] = read
                places[field] = ConfigLocation(key=found[0], line=found[1].line)
                break
    return FoundValue(values, places)


def move(found: FoundValue, field: str, to: str, value: Any) -> None:
    """What was read as `field` is meant as `to`."""
    found.values.pop(field, None)
    found.values[to] = value
    found.places[to] = found.places.pop(field)


def settle_halves(found: FoundValue) -> None:
    """The switches `bf16` and `fp16` become one precision; both at once are remembered as such."""
    on = [field for field in ("bf16", "fp16") if found.values.pop(field, None)]
    if len(on) == 2:
        found.values["both_halves"] = True
        found.places["both_halves"] = found.places["fp16"]
    for field in on:
        move(found, field, "precision", DTYPES[field])


def configure(written: WrittenConfig, kind: Kind, found: FoundValue) -> Configuration:
    unfilled = placeholders(written)
    texts = {} if written.file.endswith(".json") else texts_for_numbers(written)
    by_key = {
        key: ConfigLocation(key=key, line=written.leaves[tuple(key.split("."))].line)
        for key in (*unfilled, *texts)
        if tuple(key.split(".")) in written.leaves
    }
    return Configuration.model_validate(
        {
            **found.values,
            "file": written.file,
            "kind": kind,
            "places": {**by_key, **found.places},
            "unfilled": unfilled,
            "texts_for_numbers": texts,
        }
    )
