"""Settings of which only some are given: the same keys, the same checks, none of them needed.

In: a settings class. Out: a class that takes any part of it, as strictly, and remembers which keys
were given; and the merging of such a part over whole settings. Knows no stage.
"""

from copy import copy
from typing import Any, TypeVar

from pydantic import ConfigDict, create_model, model_serializer
from pydantic.fields import FieldInfo

from graftwork.records.base import Record

R = TypeVar("R", bound=Record)


class Part(Record):
    """Only what was given is shown: an unset key is none, whatever its class would have made of it."""

    @model_serializer(mode="plain")
    def _given(self) -> dict[str, Any]:
        return {
            name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set
        }


def part_of(kind: type[Record]) -> type[Part]:
    """A class that takes some of the keys of `kind`, and of the settings within it."""
    fields: dict[str, Any] = {
        name: _unneeded(info) for name, info in kind.model_fields.items() if info.annotation is not None
    }
    made = create_model(f"Part{kind.__name__}", __base__=Part, __doc__=kind.__doc__, **fields)
    made.model_config = ConfigDict(**{**made.model_config, "title": kind.__name__})
    return made


def merge(whole: R, part: Record) -> R:
    """`whole` with what `part` gives in its place, checked as if it had been written out."""
    merged = _over(whole.model_dump(mode="json"), part.model_dump(mode="json"))
    return type(whole).model_validate(merged)


def _unneeded(info: FieldInfo) -> tuple[Any, FieldInfo]:
    inner = info.annotation
    field = copy(info)
    field.default, field.default_factory = None, None
    # An editor must not offer the class's own default here: what is not given is the project's.
    field.json_schema_extra = _drop_default
    if isinstance(inner, type) and issubclass(inner, Record):
        return part_of(inner), field
    return inner, field


def _drop_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


def _over(whole: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    merged = dict(whole)
    for key, value in part.items():
        below = merged.get(key)
        merged[key] = _over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
