"""The limits of one run in a sandbox, the mechanisms that keep them, and how a run ended."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from graftwork.records.base import MIB, Record


class Limits(Record):
    """Resource limits of one run. A run that exceeds one is ended."""

    wall_seconds: float = Field(default=10.0, gt=0, le=3600)
    """Wall-clock time, including sleep."""
    cpu_seconds: int = Field(default=10, ge=1, le=3600)
    """Per process."""
    memory_bytes: int = Field(default=512 * MIB, ge=48 * MIB)
    """Address space per process, and resident memory of all together."""
    processes: int = Field(default=16, ge=1, le=4096)
    """Processes and threads together, the first included."""
    open_files: int = Field(default=64, ge=16, le=4096)
    """Per process."""
    disk_bytes: int = Field(default=16 * MIB, ge=4096)
    """All files together, and each one."""
    files: int = Field(default=4096, ge=16, le=2**20)
    """Files, folders and links that exist at a time: each takes memory of the kernel, even an empty one."""
    output_bytes: int = Field(default=256 * 1024, ge=1)
    """Per stream: standard output and standard error."""


Reason = Literal[
    "",
    "exit",
    "signal",
    "wall_clock",
    "cpu",
    "memory",
    "disk",
    "output",
    "messages",
    "no_nonce",
    "unsupported",
]


class SandboxKind(StrEnum):
    """Isolation mechanisms, the strongest first; docs/sandbox.md says what each guarantees."""

    BUBBLEWRAP = "bubblewrap"
    NAMESPACES = "namespaces"
    USER_NAMESPACES = "user_namespaces"
    LANDLOCK = "landlock"
    OFF = "off"
    """Limits only. Used only if the user explicitly requests it."""


class SandboxResult(Record):
    """How a run ended. `ok` summarizes it; the rest explains it."""

    ok: bool
    exit_code: int | None
    """None if it was ended from outside; negative for the signal that ended it."""
    stdout: str
    stderr: str
    reason: Reason
    """Empty if all went well."""
    seconds: float
    peak_bytes: int
    """Memory of the largest process, as far as observed."""
