"""How long a run was waited for, over all attempts and places: seconds in a file of its folder.

In: how long an attempt took, by whoever watched the worker. Out: the sum, which goes on where the run does.
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
