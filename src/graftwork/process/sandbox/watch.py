"""How much memory a process and everything below it use now.

In: the number of a process. Out: bytes. Processes forked from one another share pages: those are counted
once where that would change the answer. Linux; elsewhere, and where a process has just ended, 0.
"""

import re
from pathlib import Path

_PAGE = 4096
_PROC = Path("/proc")


def memory_of_tree(root: int, *, most: int) -> int:
    """At most a quick look; only when it seems to be more than `most`, the exact one."""
    tree = processes_below(root)
    resident = sum(_resident(number) for number in tree)
    return resident if resident <= most else sum(_proportional(number) for number in tree)


def processes_below(root: int) -> list[int]:
    """Orphans included: the first process of a box adopts them."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        number = waiting.pop()
        found.append(number)
        for thread in _threads(number):
            waiting += [int(child) for child in _read(thread / "children").split()]
    return found[1:]


def _threads(number: int) -> list[Path]:
    try:
        return list((_PROC / str(number) / "task").iterdir())
    except OSError:
        return []


def _resident(number: int) -> int:
    parts = _read(_PROC / str(number) / "statm").split()
    return int(parts[1]) * _PAGE if len(parts) > 1 else 0


def _proportional(number: int) -> int:
    """Shared pages divided by those who share them; everything where that may not be read."""
    found = re.search(r"^Pss:\s+(\d+) kB", _read(_PROC / str(number) / "smaps_rollup"), re.M)
    return int(found[1]) * 1024 if found else _resident(number)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
