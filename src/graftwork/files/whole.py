"""Files and folders appear whole or not at all.

In: a path and its bytes. Out: the file, on disk for good, or no trace of it. Does not know what
the bytes mean.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.private import close_to_others, create_file, is_private, make_folder
from graftwork.records.errors import EnvironmentLacks, GraftError, UserMistake


def write_whole(path: Path, content: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write beside the target, sync, then rename: a reader sees the old file or the new one.

    `durable=False` leaves out the sync, for what is of no use after a power cut anyway. `private` is for its
    owner alone wherever it lies; other files are as private as their folder.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        make_folder(path.parent)
        with create_file(temporary, private=private) as handle:
            handle.write(data)
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explain_os_error(error, path) from error


@contextmanager
def folder_made_whole(path: Path) -> Iterator[Path]:
    """Give a temporary folder to fill; it takes the name `path` only when the block succeeds.

    Where `path` exists already the new folder is dropped: such folders are named by content.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        make_folder(temporary)
        yield temporary
        # Before it has its name: other libraries wrote in it, too.
        if is_private(path.parent):
            close_to_others(temporary)
        for entry in (*sorted(temporary.rglob("*")), temporary):
            if entry.is_dir():
                sync_folder(entry)  # the names in it, too
            elif entry.is_file():
                with entry.open("rb") as handle:
                    os.fsync(handle.fileno())
        _take_name(temporary, path)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _take_name(temporary: Path, path: Path) -> None:
    """Of several who make the same folder at once, the first gives it its content."""
    try:
        temporary.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def explain_os_error(error: OSError, path: Path) -> GraftError:
    """An operating system error as what, why and fix."""
    where = str(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentLacks(
            "the disk is full",
            why=f"{path.name} could not be written; nothing half-written was left behind",
            fix="free some space (old runs lie in .graft/runs) and run the same command again",
            where=where,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentLacks(
            f"no permission: {error.strerror}",
            why="the file cannot be read or written by this user",
            fix="change its owner or mode, or work in another folder",
            where=where,
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return EnvironmentLacks(
            "a file stands where a folder should be", fix="move it out of the way", where=where
        )
    if isinstance(error, IsADirectoryError):
        return UserMistake("this is a folder, not a file", fix="name a file", where=where)
    if isinstance(error, FileNotFoundError):
        return UserMistake("there is no such file", fix="check the path", where=where)
    return EnvironmentLacks(
        f"the system says: {error.strerror or error}", fix="see whether the path can be used", where=where
    )
