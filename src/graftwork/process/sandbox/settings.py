"""The sandbox settings of graft.yaml, validated when they are read."""

from typing import Literal

from pydantic import Field

from graftwork.process.sandbox.limits import Limits
from graftwork.records.base import MIB, Record


class SandboxSettings(Record):
    """How generated code is isolated, and its resource limits."""

    mode: Literal["require", "off"] = "require"
    """`require` refuses if the code cannot be isolated; `off` runs it with limits only, at your own risk."""
    seconds: float = Field(default=10.0, gt=0, le=3600)
    """Wall-clock time limit of one answer's tests."""
    memory_mib: int = Field(default=512, ge=48)
    """Memory limit of all its processes together."""
    packages: tuple[str, ...] = ()
    """Folders with packages that the code may import, read-only. Default: the standard library only."""

    @property
    def limits(self) -> Limits:
        return Limits(
            wall_seconds=self.seconds,
            cpu_seconds=max(1, round(self.seconds)),
            memory_bytes=self.memory_mib * MIB,
        )
