"""How long a run was waited for, over all attempts and places: seconds in a file of its folder.

In: how long an attempt took, measured by the process that watched it. Out: the sum, which moves with the run.
"""

from pathlib import Path

from graftwork.files.disk import write_atomic

WAITED = "waited"


def read_waited(folder: Path) -> float:
    path = folder / WAITED
    return float(path.read_text()) if path.exists() else 0.0


def add_waited(folder: Path, seconds: float) -> float:
    """The seconds of all attempts, this one included."""
    total = read_waited(folder) + seconds
    write_atomic(folder / WAITED, repr(total))
    return total
