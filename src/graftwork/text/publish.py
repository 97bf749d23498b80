"""Settings and words in the form that may be stored, printed or sent: without secrets.

In: a record, or a text. Out: the record as JSON with every marked field hidden (`records.secret`) and every
known form of a secret in its other texts replaced, as `text.redact` does it; or the text so. Whatever writes
settings down goes through here. The same settings always give the same form, and settings without secrets
stay as they are. Pure.
"""

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from graftwork.records.base import NotSecret, Record, Secret, secret_of
from graftwork.text.confirm import looks_random
from graftwork.text.locate import is_secret_name, may_name_secret
from graftwork.text.redact import Redactor
from graftwork.text.unsaid import hide

LONGEST_WORD = 20
"""A longer part of a name, letters and digits mixed, is no word."""
SHORTEST_KNOWN = 8
"""A shorter value of a variable may be a part of any word."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def publishable(record: Record) -> dict[str, Any]:
    """`record.model_dump(mode="json")` without secrets."""
    shown: dict[str, Any] = _publish(record, record.model_dump(mode="json"), None, Redactor())
    return shown


def publish_text(text: str) -> str:
    """The text with every known form of a secret replaced."""
    return Redactor().redact_secrets(text)


def hide_in_tracebacks() -> None:
    """From here on no traceback of this process shows a known form of a secret.

    Nor the value of a variable of the environment whose name says that it holds one: libraries put
    addresses, headers and whole requests into the words of their errors.
    """
    sys.excepthook = _show_error
    threading.excepthook = lambda found: _show_error(found.exc_type, found.exc_value, found.exc_traceback)


def _show_error(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if issubclass(kind, SystemExit):
        # A thread that ends so has nothing to say.
        return
    words = "".join(traceback.format_exception(kind, error, trace))
    known = (value for name, value in os.environ.items() if is_secret_name(name) or may_name_secret(name))
    sys.stderr.write(publish_text(hide(words, [value for value in known if len(value) >= SHORTEST_KNOWN])))


def secrets_in(record: Record) -> Iterator[str]:
    """The values of all marked fields."""
    for name in type(record).model_fields:
        yield from _secrets_in(getattr(record, name), secret_of(type(record), name))


def _publish(value: Any, shown: Any, secret: Secret | None, redactor: Redactor) -> Any:
    """`shown` is the JSON of `value`; the record behind it tells which fields are marked."""
    if isinstance(shown, str):
        return secret.hide(shown) if secret is not None else redactor.redact_secrets(shown)
    if isinstance(shown, dict):
        kind = type(value) if isinstance(value, Record) else None
        return {
            name: _publish(
                _part(value, name), part, secret if kind is None else secret_of(kind, name), redactor
            )
            for name, part in shown.items()
        }
    if isinstance(shown, list):
        parts = list(value) if isinstance(value, list | tuple | set | frozenset) else [None] * len(shown)
        return [_publish(part, one, secret, redactor) for part, one in zip(parts, shown, strict=True)]
    return shown


def _part(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _secrets_in(value: Any, secret: Secret | None) -> Iterator[str]:
    if isinstance(value, Record):
        yield from secrets_in(value)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _secrets_in(part, secret)
    elif isinstance(value, list | tuple | set | frozenset):
        for part in value:
            yield from _secrets_in(part, secret)
    elif isinstance(value, str) and secret is not None and secret.hide(value) != value:
        yield value


def is_variable_name(name: str) -> bool:
    """Whether this can be the name of an environment variable, and is not a key written in its place."""
    longest = max(name.split("_"), key=len)
    is_key = publish_text(name) != name or (len(longest) >= LONGEST_WORD and looks_random(longest))
    return _VARIABLE.fullmatch(name) is not None and not is_key


def _require_name(name: str) -> str:
    if not is_variable_name(name):
        raise ValueError(
            "this is no name of an environment variable; the key itself must not stand here, for settings "
            "are written into every report"
        )
    return name


VariableName = Annotated[
    str,
    AfterValidator(_require_name),
    Field(json_schema_extra={"pattern": f"^{_VARIABLE.pattern}$"}),
    NotSecret("the name of the environment variable that holds the secret"),
]
"""The name of an environment variable; a key in its place is refused."""
