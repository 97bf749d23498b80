"""Who may read what is written: the project's state is for its owner alone.

In: a path. Out: folders and files that are as private as the folder they lie in, whatever the umask allows.
The state folder of a project is private by its name, and with it all that is made below. Folders and files
elsewhere, such as reports and exports, get the modes that the user's umask gives them.
"""

import os
import stat
from pathlib import Path
from typing import IO

STATE_FOLDER = ".graft"
"""Where a project keeps its captures, datasets, runs and releases."""
PRIVATE_UMASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(folder: Path) -> bool:
    """Whether nobody but the owner can get into this folder."""
    try:
        return not folder.stat().st_mode & _OTHERS
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Make it and what is missing above it; one that is there stays as it is."""
    private = folder.name == STATE_FOLDER or is_private(folder.parent)
    try:
        folder.mkdir(0o700 if private else 0o777)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_folder(folder.parent)
        make_folder(folder)
    except FileExistsError:
        if not folder.is_dir():
            raise


def file_mode(folder: Path) -> int:
    """The mode to make a file with in this folder; the umask may take more away."""
    return 0o600 if is_private(folder) else 0o666


def read_only_mode(folder: Path) -> int:
    """The mode of a file in this folder that nobody is to change."""
    return 0o400 if is_private(folder) else 0o444


def create_file(path: Path, *, private: bool = False) -> IO[bytes]:
    """Open a file that must not be there yet, for writing; `private` whatever its folder is."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600 if private else file_mode(path.parent)), "wb")


def append_to(path: Path) -> IO[bytes]:
    """Open a file for writing at its end; it is made where it is missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, file_mode(path.parent)), "ab")


def close_to_others(folder: Path) -> None:
    """Take the rights of others off everything below a folder, then off the folder itself.

    Links are not followed. What belongs to somebody else, or lies on a disk that cannot be written, stays as
    it is.
    """
    for here, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            _close(Path(here) / name)
    _close(folder, follow=True)


def _close(path: Path, *, follow: bool = False) -> None:
    try:
        found = path.stat(follow_symlinks=follow)
        if not stat.S_ISLNK(found.st_mode) and found.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~_OTHERS)
    except OSError:
        # It belongs to another user, or it is gone: only its owner can close it.
        return
