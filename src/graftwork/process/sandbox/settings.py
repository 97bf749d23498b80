"""What graft.yaml says about running generated code, checked when it is read."""

from typing import Literal

from pydantic import Field

from graftwork.process.sandbox.limits import Limits
from graftwork.records.base import Record
from graftwork.records.units import MIB


class SandboxSettings(Record):
    """How generated code is shut in, and what it may use."""

    mode: Literal["require", "off"] = "require"
    """`require` refuses where the code cannot be shut in; `off` runs it with limits alone, at your risk."""
    seconds: float = Field(default=10.0, gt=0, le=3600)
    """What one answer's tests may take, wall-clock."""
    memory_mib: int = Field(default=512, ge=48)
    """What all its processes may use together."""
    processes: int = Field(default=16, ge=1, le=4096)
    """Processes and threads together."""
    disk_mib: int = Field(default=16, ge=1)
    """What it may write."""
    packages: tuple[str, ...] = ()
    """Folders with packages that the code may import, read-only. Without it: the standard library."""

    @property
    def limits(self) -> Limits:
        return Limits(
            wall_seconds=self.seconds,
            cpu_seconds=max(1, round(self.seconds)),
            memory_bytes=self.memory_mib * MIB,
            processes=self.processes,
            disk_bytes=self.disk_mib * MIB,
        )
