"""Settings that may hold a secret: marked in the type of the field, once.

In: an annotation such as `webhook: SecretLink | None`. Out: the form of the value that may be written
anywhere. `Record` uses it when it is printed; `text.publish` uses it for settings that are stored or sent.
Pure.

A new field: give it one of the types below. Where its name suggests a secret and it never holds one, mark it
with `NotSecret` and say why. A test refuses a field that sounds secret and has neither mark.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel

HIDDEN = "…"


@dataclass(frozen=True)
class Secret:
    """Marks text that may hold a secret. `hide` gives the form that may be published."""

    hide: Callable[[str], str]


@dataclass(frozen=True)
class NotSecret:
    """Marks text whose name suggests a secret and which never holds one."""

    why: str


_LOGIN = re.compile(r"(?<=://).*@", re.DOTALL)
_BEHIND_THE_PATH = re.compile(r"(?<=[?#]).+", re.DOTALL)
_SCHEME_AND_HOST = re.compile(r"(?:https?)://[\w.-]+(?::\d+)?(?=/|$)")


def hide_all(_value: str) -> str:
    return HIDDEN


def hide_login(address: str) -> str:
    """The address without login, query and fragment. `cached::s3://…` is a chain of several addresses."""
    return "::".join(_hide_login(part) for part in address.split("::"))


def hide_path(address: str) -> str:
    """Scheme and host: whoever knows the path of a webhook may use it."""
    found = _SCHEME_AND_HOST.match(address)
    # With an @ anywhere it is not certain which part is the host.
    return HIDDEN if found is None or "@" in address else f"{found[0]}/{HIDDEN}"


def _hide_login(address: str) -> str:
    # Up to the last @: a password may hold any character, even where it should not.
    return _BEHIND_THE_PATH.sub(HIDDEN, _LOGIN.sub(f"{HIDDEN}@", address), count=1)


SecretText = Annotated[str, Secret(hide_all)]
"""Secret as a whole, such as a command with a token in it."""
SecretLink = Annotated[str, Secret(hide_path)]
"""An address that gives access to whoever knows it; only its host may be published."""
SecretAddress = Annotated[str, Secret(hide_login)]
"""An address that may hold a login or a signed query; host and path may be published."""


@cache
def marks_of(kind: type[BaseModel]) -> dict[str, Secret | NotSecret]:
    """The mark of each field that has one."""
    found = {name: _mark_in(field.annotation, field.metadata) for name, field in kind.model_fields.items()}
    return {name: mark for name, mark in found.items() if mark is not None}


def secret_of(kind: type[BaseModel], name: str) -> Secret | None:
    mark = marks_of(kind).get(name)
    return mark if isinstance(mark, Secret) else None


def _mark_in(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> Secret | NotSecret | None:
    """The mark, at the top of the annotation or anywhere in it: `tuple[SecretText, ...] | None`."""
    for mark in (*metadata, *getattr(annotation, "__metadata__", ())):
        if isinstance(mark, Secret | NotSecret):
            return mark
    return next((mark for part in get_args(annotation) if (mark := _mark_in(part)) is not None), None)
