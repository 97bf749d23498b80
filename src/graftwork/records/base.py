"""What every record shares: frozen, typed, strict about unknown keys, hashable by content.

In: values. Out: immutable nouns that the stages pass to each other. Knows nothing of files,
databases, models or clocks.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from graftwork.records.secret import secret_of


class Record(BaseModel):
    """A frozen noun. Unknown keys are a mistake, not a surprise for later."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        ser_json_inf_nan="constants",
        # What a record holds may be a capture: an error that is logged does not quote it.
        hide_input_in_errors=True,
    )

    def to_json(self) -> str:
        """The record as readable JSON, keys in the order of their definition."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        return cls.model_validate_json(text)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """A record that is printed, in a traceback or a log, shows no field that may hold a secret."""
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
