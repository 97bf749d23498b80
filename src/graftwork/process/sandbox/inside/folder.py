"""The code's folder where it is on this machine instead of a file system of its own: measured and removed.

In: the path of the folder, whose content is hostile. Out: how much it holds; or nothing, once it is removed.
No link is followed and no file is opened, and neither depth nor number nor modes of its folders matter.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH101, PTH104, PTH106, PTH108, PTH112, PTH114, PTH116, PTH118, PTH208

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_BLOCK = 512


def measure_folder(folder: str, *, most_files: int) -> tuple[int, int]:
    """The number of files, folders and links below it, and the bytes that they occupy.

    Stops counting beyond `most_files`. A folder nested deeper than a path can name counts as beyond it, for
    whatever is below it could not be seen.
    """
    files = size = 0
    waiting = [folder]
    while waiting and files <= most_files:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > most_files:
                        break
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            # Removed or replaced since it was listed; or shut for us, who are the same user (`off`).
            continue
        except OSError:
            return most_files + 1, size
    return files, size


def measure_deleted(processes: Iterable[int]) -> int:
    """The bytes of files that were deleted while one of these processes has them open."""
    found: dict[tuple[int, int], int] = {}
    for process in processes:
        opened = f"/proc/{process}/fd"
        try:
            numbers = os.listdir(opened)
        except OSError:
            continue
        for number in numbers:
            try:
                state = os.stat(f"{opened}/{number}")
            except OSError:
                continue
            if state.st_nlink == 0:
                found[state.st_dev, state.st_ino] = state.st_blocks * _BLOCK
    return sum(found.values())


def remove_folder(folder: str) -> None:
    """All of it. What is nested is moved up first, so that no path grows long and nothing recurses."""
    moved = 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if not _is_folder(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                below = os.path.join(path, inner)
                if _is_folder(below):
                    # A folder that moves is written to: its entry `..` changes.
                    os.chmod(below, 0o700)
                moved += 1
                while os.path.lexists(target := os.path.join(folder, f"{moved:x}")):
                    moved += 1
                os.rename(below, target)
            os.rmdir(path)
    os.rmdir(folder)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
