"""How a run ended, and in which way it was shut in."""

from enum import StrEnum
from typing import Literal

from graftwork.records.base import Record

Reason = Literal[
    "", "exit", "signal", "wall_clock", "cpu", "memory", "disk", "output", "messages", "no_nonce"
]


class SandboxKind(StrEnum):
    """The ways to shut code in, the strongest first; docs/sandbox.md says what each guarantees."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    USER_NAMESPACES = "user_namespaces"
    LANDLOCK = "landlock"
    OFF = "off"
    """Limits alone. Only where the user has asked for it by name."""


class SandboxResult(Record):
    """How a run ended. `ok` is the one answer; the rest explains it."""

    ok: bool
    exit_code: int | None
    """None where it was ended from outside; negative for the signal that ended it."""
    stdout: str
    stderr: str
    reason: Reason
    """Empty where all went well."""
    seconds: float
    peak_bytes: int
    """The largest process, as far as it was seen."""
