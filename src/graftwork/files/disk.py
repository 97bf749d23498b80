"""Files on disk: private to their owner, written atomically, compared by digest, locked.

Input: a path. Output: folders and files that are as private as their folder, whatever the umask allows. The
state folder of a project is private by its name, and with it all that is made below. Folders and files
elsewhere, such as reports and exports, get the modes that the user's umask gives them.

The kernel frees a lock when the last process that has the file open dies. A process that only asks shares the
lock for a moment, so two that ask do not take each other for a holder.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError

if TYPE_CHECKING:
    from graftwork.records.base import Record

SomeRecord = TypeVar("SomeRecord", bound="Record")

STATE_FOLDER = ".graft"
"""Where a project keeps its captures, datasets, runs and releases."""
PRIVATE_UMASK = 0o077
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(folder: Path) -> bool:
    """Whether only the owner can enter this folder."""
    try:
        return not folder.stat().st_mode & _OTHERS
    except OSError:
        return False


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents; an existing one stays unchanged."""
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
    """Return the mode for a new file in this folder; the umask may restrict it further."""
    return 0o600 if is_private(folder) else 0o666


def read_only_mode(folder: Path) -> int:
    """The mode of a read-only file in this folder."""
    return 0o400 if is_private(folder) else 0o444


def create_file(path: Path, *, private: bool = False) -> IO[bytes]:
    """Open a new file for writing; `private` regardless of its folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600 if private else file_mode(path.parent)), "wb")


def append_to(path: Path) -> IO[bytes]:
    """Open a file for appending; it is created if missing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, file_mode(path.parent)), "ab")


def close_to_others(folder: Path) -> None:
    """Remove the rights of others from everything below a folder, then from the folder itself. Links are not
    followed. Files that belong to another user, or are on a read-only disk, stay unchanged.
    """
    for directory, folders, files in os.walk(folder, topdown=False):
        for name in (*files, *folders):
            _close(Path(directory) / name)
    _close(folder, follow=True)


def _close(path: Path, *, follow: bool = False) -> None:
    try:
        status = path.stat(follow_symlinks=follow)
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & _OTHERS:
            path.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
    except OSError:
        # It belongs to another user, or it is gone: only its owner can close it.
        return


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True, private: bool = False) -> None:
    """Write next to the target, sync, then rename: a reader sees the old file or the new one.

    `durable=False` leaves out the sync, for what is of no use after a power cut anyway. `private` is for its
    owner only, wherever it is; other files are as private as their folder.
    """
    with atomic_file(path, durable=durable, private=private) as handle:
        handle.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path, *, durable: bool = True, private: bool = False) -> Iterator[IO[bytes]]:
    """As `write_atomic`, for content that comes piece by piece. A block that fails leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        make_folder(path.parent)
        with create_file(temporary, private=private) as handle:
            yield handle
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        # A path that cannot be made cannot be removed either.
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise explain_os_error(error, path) from error
        raise


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; it gets the name `path` only when the block succeeds. If `path`
    already exists the new folder is dropped: such folders are named by content.
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
        try:
            temporary.rename(path)
        except OSError as error:
            # Of several who make the same folder at once, the first gives it its content.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync_folder(path.parent)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_or_empty(path: Path) -> str:
    """The text of a file that may be missing or forbidden, as those below /proc."""
    try:
        return path.read_text()
    except OSError:
        return ""


def read_record(kind: type[SomeRecord], path: Path) -> SomeRecord | None:
    """None if there is no such file, or one that this version cannot read."""
    try:
        return kind.from_json(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def explain_os_error(error: OSError, path: Path) -> GraftError:
    """An operating system error as what, why and fix."""
    where = str(path)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return EnvironmentFailure(
            "the disk is full",
            why=f"{path.name} could not be written; no partial file was left behind",
            fix="free some space (old runs are in .graft/runs) and run the same command again",
            where=where,
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return EnvironmentFailure(
            f"no permission: {error.strerror}",
            why="the file cannot be read or written by this user",
            fix="change its owner or mode, or use another folder",
            where=where,
        )
    if isinstance(error, FileExistsError | NotADirectoryError):
        return EnvironmentFailure("a file is where a folder should be", fix="move it elsewhere", where=where)
    if isinstance(error, IsADirectoryError):
        return UserError("this is a folder, not a file", fix="specify a file", where=where)
    if isinstance(error, FileNotFoundError):
        return UserError("there is no such file", fix="check the path", where=where)
    return EnvironmentFailure(
        f"the operating system reports: {error.strerror or error}",
        fix="check that the path can be used",
        where=where,
    )


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def folder_digest(folder: Path) -> str:
    """One hash over the relative names and contents of all files below `folder`."""
    outer = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        outer.update(f"{path.relative_to(folder).as_posix()}\0{file_digest(path)}\n".encode())
    return outer.hexdigest()


def require_digest(path: Path, expected: str) -> None:
    """Refuse a file that is not the one its manifest names."""
    if not path.is_file():
        raise Corrupted(
            f"{path.name} is missing",
            why="its manifest lists it",
            fix="run the step that created it again",
            where=str(path),
        )
    actual = file_digest(path)
    if actual != expected:
        raise Corrupted(
            f"{path.name} does not match the hash in its manifest",
            why=f"expected sha256 {expected[:12]}…, found {actual[:12]}…",
            fix="restore it, or run the step that created it again",
            where=str(path),
        )


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, value: Any, *, durable: bool = False) -> None:
        """Add one line. `durable` waits until it is on the disk."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            make_folder(self.path.parent)
            with append_to(self.path) as handle:
                if handle.tell() and not self._ends_whole():
                    handle.write(b"\n")
                handle.write(line)
                if durable:
                    handle.flush()
                    os.fsync(handle.fileno())
        except OSError as error:
            raise explain_os_error(error, self.path) from error

    def read(self) -> list[Any]:
        return [value for value, _ in self.follow(0)]

    def follow(self, offset: int) -> Iterator[tuple[Any, int]]:
        """Yield the whole lines from `offset` on, each with the offset after it."""
        if not self.path.exists():
            return
        with self.path.open("rb") as handle:
            handle.seek(offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    yield json.loads(line), offset
                except ValueError:
                    # A torn line that a killed writer left and a later one closed.
                    continue

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) == b"\n"


_HELD_ELSEWHERE = (errno.EAGAIN, errno.EACCES)
"""Any other error does not show whether another process has the lock."""


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file unless another process has it. Raises if the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_ELSEWHERE:
            return False
        raise
    return True


def require_lock(descriptor: int, otherwise: str) -> None:
    """Lock the file, or raise with the meaning of another process holding it."""
    if not try_lock(descriptor):
        raise BlockingIOError(errno.EWOULDBLOCK, otherwise)


def is_held(descriptor: int) -> bool:
    """Whether another process has locked the file for itself."""
    if not try_lock(descriptor, shared=True):
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
