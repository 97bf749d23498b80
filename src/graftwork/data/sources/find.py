"""Which files the user means: files, globs, folders, standard input.

In: paths as they stand in graft.yaml or on the command line. Out: names as the user would write
them, each once, in the order in which they were named and sorted within a glob or folder. Within
those only files count: a pipe or a socket is passed over, and a link that leads nowhere is said to be.
Does not open anything.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import UserMistake

log = logging.getLogger(__name__)

STANDARD_INPUT = "-"
# Where the shell puts the output of a command that is given as a file: `<(zcat old.gz)`.
_SHELL_PIPES = ("/dev/", "/proc/")
_CONTAINERS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
ENDINGS = tuple(ending + packing for ending in _CONTAINERS for packing in ("", ".gz", ".zst"))


def find_sources(paths: Iterable[str], *, root: Path) -> tuple[str, ...]:
    """Every file that `paths` name. What names nothing is the user's mistake, said by name."""
    # `./log.jsonl` is the file that `log.jsonl` is: the name that came first stays.
    found: dict[str, str] = {}
    for path in paths:
        for name in _find(path, root=root):
            found.setdefault(os.path.normpath(root / name), name)
    if not found:
        raise UserMistake(
            "no log file is named",
            why="a dataset is made from logs",
            fix="name files, folders or globs under data.logs in graft.yaml, or give a path",
        )
    return tuple(found.values())


def _find(path: str, *, root: Path) -> list[str]:
    if path == STANDARD_INPUT:
        return [path]
    whole = root / path
    try:
        mode = whole.stat().st_mode
    except OSError as error:
        if any(mark in path for mark in "*?[") and error.errno != errno.ELOOP:
            return _find_by_pattern(path, root=root)
        raise _explain(error, whole) from error
    except ValueError:
        raise UserMistake("this is no path", why="it holds a NUL character", fix="check data.logs") from None
    if stat.S_ISDIR(mode):
        return _walk(path, root=root)
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and path.startswith(_SHELL_PIPES)):
        raise UserMistake(
            "this is no file",
            why="it is a pipe, a socket or a device, and logs are read more than once",
            fix="write it to a file first, or give it to standard input and name `-`",
            where=path,
        )
    return [path]


def _find_by_pattern(pattern: str, *, root: Path) -> list[str]:
    # `**` at the end means folders to Python before 3.13, and everything below to everybody else.
    wanted = f"{pattern}/*" if pattern.endswith("**") else pattern
    path = Path(wanted)
    base = Path(path.anchor) if path.is_absolute() else root
    try:
        matches = list(base.glob(str(path.relative_to(path.anchor)) if path.is_absolute() else wanted))
    except (ValueError, NotImplementedError, re.error) as error:
        raise UserMistake(
            f"this pattern cannot be read: {error}", fix="check data.logs", where=pattern
        ) from None
    files = [match for match in matches if match.is_file()]
    names = [str(file if path.is_absolute() else file.relative_to(root)) for file in files]
    hidden_wanted = "/." in f"/{pattern}"
    names = sorted(name for name in names if hidden_wanted or "/." not in f"/{name}")
    if not names:
        raise UserMistake("no file matches this pattern", fix="check data.logs", where=pattern)
    return names


def _walk(folder: str, *, root: Path) -> list[str]:
    """The logs below a folder. Links to folders are not followed, so no loop can hold us."""
    names: list[str] = []

    def refuse(error: OSError) -> None:
        raise _explain(error, Path(error.filename or root / folder)) from error

    for parent, folders, files in os.walk(root / folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [str(Path(parent, name)) for name in files if _is_log(name) and _is_file(Path(parent, name))]
    if not names:
        raise UserMistake(
            "the folder holds no log",
            why=f"no file in it ends in {', '.join(_CONTAINERS)}, packed with gzip or zstd or not",
            fix="name another folder, or its files one by one",
            where=folder,
        )
    return sorted(_name_as_user(name, folder=folder, root=root) for name in names)


def _is_file(path: Path) -> bool:
    """Whether a file is there, or at the end of a link. One bad link is no reason to read nothing."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise _explain(error, path) from error
        log.warning("%s is passed over: the link leads to no file", path)
        return False


def _is_log(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(ENDINGS)


def _name_as_user(path: str, *, folder: str, root: Path) -> str:
    return str(Path(folder) / Path(path).relative_to(root / folder))


def _explain(error: OSError, path: Path) -> Exception:
    if error.errno == errno.ELOOP:
        return UserMistake(
            "this is a symbolic link that leads to itself",
            why="there is no file at its end",
            fix="mend the link or take it out of data.logs",
            where=str(path),
        )
    return explain_os_error(error, path)
