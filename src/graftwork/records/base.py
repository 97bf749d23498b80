"""What every record shares: frozen, typed, strict about unknown keys, hashable by content; and units.

Input: values. Output: immutable records that the stages pass to each other. Knows nothing of files,
databases, models or clocks.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import VERSION, BaseModel, ConfigDict, model_validator

MIB = 2**20
GIB = 2**30

NF4_BYTES = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in NF4: its code, its share of the byte that scales 64 weights, and of the scale of 256 of
these.
"""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number, by the type of the weights."""

HIDDEN = "…"
_SAFE_TO_DEFER = tuple(map(int, VERSION.split(".")[:2])) >= (2, 14)
"""Older versions of pydantic may fail if two threads build a deferred record."""


@dataclass(frozen=True)
class Secret:
    """Marks text that may contain a secret. `hide` returns the form that may be published."""

    hide: Callable[[str], str]


@dataclass(frozen=True)
class NotSecret:
    """Marks text whose name suggests a secret but which never contains one."""

    why: str


_LOGIN = re.compile(r"(?<=://).*@", re.DOTALL)
_QUERY = re.compile(r"(?<=[?#]).+", re.DOTALL)
_SCHEME_AND_HOST = re.compile(r"(?:https?)://[\w.-]+(?::\d+)?(?=/|$)")


def hide_all(_value: str) -> str:
    return HIDDEN


def hide_login(address: str) -> str:
    """The address without login, query and fragment. `cached::s3://…` is a chain of several addresses."""
    return "::".join(
        _QUERY.sub(HIDDEN, _LOGIN.sub(f"{HIDDEN}@", part), count=1) for part in address.split("::")
    )


def hide_path(address: str) -> str:
    """Scheme and host: the path of a webhook is a secret."""
    match = _SCHEME_AND_HOST.match(address)
    # With an @ anywhere it is not certain which part is the host.
    return HIDDEN if match is None or "@" in address else f"{match[0]}/{HIDDEN}"


SecretText = Annotated[str, Secret(hide_all)]
"""Secret as a whole, such as a command with a token in it."""
SecretLink = Annotated[str, Secret(hide_path)]
"""An address that grants access to anyone who knows it; only its host may be published."""
SecretAddress = Annotated[str, Secret(hide_login)]
"""An address that may hold a login or a signed query; host and path may be published."""


@cache
def marks_of(kind: type[BaseModel]) -> dict[str, Secret | NotSecret]:
    """The mark of each field that has one."""
    marks = {name: _mark_in(field.annotation, field.metadata) for name, field in kind.model_fields.items()}
    return {name: mark for name, mark in marks.items() if mark is not None}


def secret_of(kind: type[BaseModel], name: str) -> Secret | None:
    mark = marks_of(kind).get(name)
    return mark if isinstance(mark, Secret) else None


def _mark_in(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> Secret | NotSecret | None:
    """The mark, at the top of the annotation or anywhere in it: `tuple[SecretText, ...] | None`."""
    for mark in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(mark, Secret | NotSecret):
            return mark
    return next((mark for part in get_args(annotation) if (mark := _mark_in(part)) is not None), None)


class Record(BaseModel):
    """An immutable value object. Unknown keys are errors."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        # What a record holds may be a capture: an error that is logged does not quote it.
        hide_input_in_errors=True,
        # Most commands use a few of the records that they import.
        defer_build=_SAFE_TO_DEFER,
    )

    notebook_renderer: ClassVar["Callable[[Record], str] | None"] = None
    """Set by the public API: records know no HTML."""

    def _repr_html_(self) -> str | None:
        """How a notebook shows the record."""
        return Record.notebook_renderer(self) if Record.notebook_renderer is not None else None

    def to_json(self) -> str:
        """The record as readable JSON, keys in the order of their definition."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """A printed record, in a traceback or a log, shows no field that may contain a secret."""
        for name, value in super().__repr_args__():
            secret = secret_of(type(self), name) if name and isinstance(value, str) else None
            yield name, secret.hide(value) if secret is not None else value

    def fingerprint(self) -> str:
        """The same content has the same fingerprint on every machine."""
        return fingerprint(self.model_dump(mode="json"))


def fingerprint(value: Any) -> str:
    """SHA-256 over canonical JSON: sorted keys, no spaces, plain UTF-8."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


class Figure(Record):
    """A computed or measured number with its expected range."""

    value: float
    low: float
    high: float
    unit: str = ""

    @model_validator(mode="after")
    def _range_holds_value(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ValueError(f"the range {self.low}..{self.high} must hold the value {self.value}")
        return self

    @classmethod
    def exact(cls, value: float, unit: str = "") -> Self:
        return cls(value=value, low=value, high=value, unit=unit)

    @classmethod
    def about(cls, value: float, *, down: float, up: float, unit: str = "") -> Self:
        """`value` with a range of `value * down` to `value * up`."""
        return cls(value=value, low=value * down, high=value * up, unit=unit)

    @classmethod
    def total(cls, figures: Iterable[Self], unit: str = "") -> Self:
        """Sum of figures that vary together: the ends of their ranges add up too."""
        parts = tuple(figures)
        return cls(
            value=sum(part.value for part in parts),
            low=sum(part.low for part in parts),
            high=sum(part.high for part in parts),
            unit=unit,
        )

    def times(self, factor: float, unit: str) -> Self:
        return self.model_copy(
            update={
                "value": self.value * factor,
                "low": self.low * factor,
                "high": self.high * factor,
                "unit": unit,
            }
        )

    def holds(self, actual: float) -> bool:
        return self.low <= actual <= self.high
