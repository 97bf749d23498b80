"""What one run of generated code may use.

In: figures. Out: a record that is checked when it is made. `inside/limits.py` puts it into force.
"""

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.units import MIB


class Limits(Record):
    """What one run may use. Whatever goes beyond ends it."""

    wall_seconds: float = Field(default=10.0, gt=0, le=3600)
    """From the start to the end, sleeping counts."""
    cpu_seconds: int = Field(default=10, ge=1, le=3600)
    """Of one process."""
    memory_bytes: int = Field(default=512 * MIB, ge=48 * MIB)
    """Of one process, as addresses; of all together, as memory that is really used."""
    processes: int = Field(default=16, ge=1, le=4096)
    """Processes and threads together, the first included."""
    open_files: int = Field(default=64, ge=16, le=4096)
    """Of one process."""
    disk_bytes: int = Field(default=16 * MIB, ge=4096)
    """All files together, and each one."""
    files: int = Field(default=4096, ge=16, le=2**20)
    """Files, folders and links that exist at a time: each takes memory of the kernel, even an empty one."""
    output_bytes: int = Field(default=256 * 1024, ge=1)
    """Of each of standard output and standard error."""
