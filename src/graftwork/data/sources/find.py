"""Which files the user means: files, globs, folders, standard input.

In: paths as they stand in graft.yaml or on the command line. Out: names as the user would write
them, each once, in the order in which they were named and sorted within a glob or folder. Does not
open anything.
"""

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from graftwork.files.whole import explain_os_error
from graftwork.records.errors import UserMistake

STANDARD_INPUT = "-"
_CONTAINERS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
ENDINGS = tuple(ending + packing for ending in _CONTAINERS for packing in ("", ".gz", ".zst"))


def find_sources(paths: Iterable[str], *, root: Path) -> tuple[str, ...]:
    """Every file that `paths` name. What names nothing is the user's mistake, said by name."""
    found: dict[str, None] = {}
    for path in paths:
        found.update(dict.fromkeys(_find(path, root=root)))
    if not found:
        raise UserMistake(
            "no log file is named",
            why="a dataset is made from logs",
            fix="name files, folders or globs under data.logs in graft.yaml, or give a path",
        )
    return tuple(found)


def _find(path: str, *, root: Path) -> list[str]:
    if path == STANDARD_INPUT:
        return [path]
    whole = root / path
    try:
        is_folder = stat.S_ISDIR(whole.stat().st_mode)
    except OSError as error:
        if any(mark in path for mark in "*?[") and error.errno != errno.ELOOP:
            return _find_by_pattern(path, root=root)
        raise _explain(error, whole) from error
    except ValueError:
        raise UserMistake("this is no path", why="it holds a NUL character", fix="check data.logs") from None
    return _walk(path, root=root) if is_folder else [path]


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
        logs = [Path(parent, name) for name in files if _is_log(name)]
        for link in (log for log in logs if log.is_symlink()):
            _require_end(link)
        names += map(str, logs)
    if not names:
        raise UserMistake(
            "the folder holds no log",
            why=f"none of its files ends in {', '.join(_CONTAINERS)}, packed with gzip or zstd or not",
            fix="name another folder, or its files one by one",
            where=folder,
        )
    return sorted(_name_as_user(name, folder=folder, root=root) for name in names)


def _require_end(link: Path) -> None:
    try:
        link.stat()
    except OSError as error:
        raise _explain(error, link) from error


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
