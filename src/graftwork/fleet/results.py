"""What a run leaves at a place, brought into its folder here.

In: a tar file from another machine, or a folder that a person brought. Out: the files below the run's folder,
the outcome last and with the paths of this machine. Names that lead elsewhere are refused.
"""

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

from graftwork.files.disk import atomic_file, folder_digest, write_atomic
from graftwork.fleet.place import NotThere
from graftwork.records.errors import Damaged
from graftwork.records.fleet import JobPoll

OUTCOME = "outcome.json"
ADAPTER = "adapter"
LONGEST_NAME = 200
"""Bytes of a name; file systems allow 255, of which a file that is being written needs some more."""
MOST_FOLDERS = 32
CopyFile = Callable[[IO[bytes]], object]
"""Writes the content of a file, or raises `NotThere`."""
_KEPT_HERE = {"lock", "job.json"}


def take_packed(pack: Callable[[IO[bytes]], object], folder: Path) -> None:
    """Take what `pack` writes, a tar file, once all of it has arrived."""
    with tempfile.TemporaryFile() as packed:
        pack(packed)
        packed.seek(0)
        take_results(packed, folder)


def take_results(stream: IO[bytes], folder: Path) -> None:
    """Take the files of a tar file."""

    def files() -> Iterator[tuple[str, CopyFile]]:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                # The holes of a sparse file are not in the archive: it may claim to have any size.
                plain = entry.isreg() and not entry.issparse()
                source = archive.extractfile(entry) if plain else None
                if source is None:
                    raise Damaged("the results hold something that is no file", where=entry.name[:100])
                yield entry.name, partial(shutil.copyfileobj, source)

    try:
        take_files(files(), folder)
    except tarfile.TarError as error:
        raise Damaged(
            "the results cannot be unpacked",
            why=f"not all of them have arrived, or they are no archive: {error}"[:200],
            fix="fetch them again",
            where=str(folder),
        ) from error


def take_folder(source: Path, folder: Path) -> None:
    """Take the files of a folder: the `run` of a work folder, as a person copied it."""
    paths = [path for path in sorted(source.rglob("*")) if path.is_file() and not path.is_symlink()]

    def copy(path: Path, target: IO[bytes]) -> None:
        with path.open("rb") as content:
            shutil.copyfileobj(content, target)

    take_files(((path.relative_to(source).as_posix(), partial(copy, path)) for path in paths), folder)


def take_files(files: Iterable[tuple[str, CopyFile]], folder: Path) -> None:
    """Take each file piece by piece: it may be larger than the memory."""
    outcome: bytes | None = None
    for name, copy in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise Damaged("the results name a file outside of the run", where=name[:100])
        plain = path.as_posix()
        if len(path.parts) > 1 and path.parts[0] in {OUTCOME, *_KEPT_HERE}:
            raise Damaged("the results have a folder where the run has a file", where=name[:100])
        _require_possible(path, folder)
        # A job that still runs may have removed it since it was listed.
        with suppress(NotThere):
            if plain == OUTCOME:
                read = io.BytesIO()
                copy(read)
                outcome = read.getvalue()
            elif plain not in _KEPT_HERE:
                with atomic_file(folder / path, durable=False) as target:
                    copy(target)
    if outcome is not None:
        write_atomic(folder / OUTCOME, _with_adapter_here(outcome, folder))


def _require_possible(path: PurePosixPath, folder: Path) -> None:
    """Refuse a name that no file can have here, or that another file or folder has."""
    where = ascii(str(path))[:100]
    try:
        lengths = [len(os.fsencode(part)) for part in path.parts]
        possible = max(lengths) <= LONGEST_NAME and len(lengths) <= MOST_FOLDERS and "\0" not in str(path)
    except ValueError:
        possible = False
    if not possible:
        raise Damaged(
            "the results name a file that cannot be",
            why=f"names have up to {LONGEST_NAME} bytes and {MOST_FOLDERS} levels, in UTF-8",
            where=where,
        )
    if (folder / path).is_dir() or any((folder / above).is_file() for above in path.parents):
        raise Damaged("the results have a file and a folder of the same name", where=where)


def _with_adapter_here(outcome: bytes, folder: Path) -> str:
    """The outcome with the adapter's folder here, once the adapter has the bytes that it names."""
    try:
        content = json.loads(outcome)
        stated = content["adapter_hash"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged("the outcome of the run cannot be read", where=str(folder)) from error
    if not (folder / ADAPTER).is_dir() or folder_digest(folder / ADAPTER) != stated:
        raise Damaged(
            "the adapter has other bytes than the outcome of the run says",
            why="it was damaged on the way, or not all of it has arrived",
            fix="fetch it again",
            where=str(folder / ADAPTER),
        )
    return json.dumps({**content, "adapter_folder": str(folder / ADAPTER)}, indent=2)


def parse_exit(content: bytes | None) -> JobPoll | None:
    """How a job ended, from its `exit.json`; None: there is none, or it cannot be read."""
    if content is None:
        return None
    try:
        found = json.loads(content)
        return JobPoll(phase="ended", exit_code=int(found["code"]), message=str(found["reason"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
