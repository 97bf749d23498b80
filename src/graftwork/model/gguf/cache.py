"""GGUF files of bases and adapters, converted once and named by the content that they are made of.

In: a base or an adapter of it. Out: the path of its GGUF file. The cache is shared by all projects of a user,
next to converted base models. A file appears whole or not at all. A new one removes those that were not used
for longest, until all of them together are below a limit: each can be converted again.
"""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from graftwork.files.disk import explain_os_error, file_digest, make_folder, sync_folder
from graftwork.model.base import find_base, models_folder
from graftwork.model.gguf.writer import WRITER, write_adapter, write_base
from graftwork.records.base import GIB, fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.release import GgufPrecision

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
LIMIT_VARIABLE = "GRAFT_GGUF_CACHE_GIB"
DEFAULT_LIMIT_GIB = 20.0
_SHOWN = 24
_IN_USE_SECONDS = 3600.0
"""A file that was asked for so recently may be about to be opened."""


def base_file(folder: Path, *, precision: GgufPrecision) -> Path:
    """The base in this folder as GGUF."""
    name = f"{base_revision(folder)[:_SHOWN]}-{precision}-{WRITER}.gguf"
    return _converted(name, lambda path: write_base(folder, path, precision=precision))


def adapter_file(folder: Path, *, base: Path) -> Path:
    """The PEFT adapter in `folder` as a GGUF adapter of `base`."""
    name = f"{adapter_content(folder)[:_SHOWN]}-{base_revision(base)[:_SHOWN]}-{WRITER}.lora.gguf"
    return _converted(name, lambda path: write_adapter(folder, path, base=base))


def base_revision(folder: Path) -> str:
    return find_base(str(folder), project_folder=Path()).revision


def adapter_content(folder: Path) -> str:
    """The hash of what an adapter computes: its weights and its shape."""
    return fingerprint([file_digest(folder / name) for name in ADAPTER_FILES if (folder / name).exists()])


def _converted(name: str, write: Callable[[Path], None]) -> Path:
    folder = models_folder() / "gguf"
    path = folder / name
    if path.is_file():
        with suppress(OSError):
            os.utime(path)  # when it was last used
        return path
    try:
        most_bytes = float(os.environ.get(LIMIT_VARIABLE, DEFAULT_LIMIT_GIB)) * GIB
    except ValueError as error:
        raise UserMistake(
            f"{LIMIT_VARIABLE} is no number",
            why="it limits the converted files that are kept, in GiB",
            fix=f"export {LIMIT_VARIABLE}={DEFAULT_LIMIT_GIB:g}",
        ) from error
    try:
        make_folder(folder)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".gguf")
    except OSError as error:
        raise explain_os_error(error, folder) from error
    try:
        write(Path(temporary))
        os.fsync(descriptor)
        # Of several processes that convert the same model, each puts the same content here.
        Path(temporary).replace(path)
        sync_folder(folder)
        remove_unused(folder, most_bytes=most_bytes)
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    return path


def remove_unused(folder: Path, *, most_bytes: float, now: float | None = None) -> list[Path]:
    """Remove the files that were not used for longest until the rest is below the limit; what was removed.

    A server that has a file open keeps reading it.
    """
    now = time.time() if now is None else now
    found = []
    for path in folder.glob("*.gguf"):
        with suppress(OSError):  # another process removed it
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    total, removed = sum(size for _, size, _ in found), []
    for used, size, path in sorted(found):
        unfinished = path.name.startswith(".")
        if now - used < _IN_USE_SECONDS or (total <= most_bytes and not unfinished):
            continue
        with suppress(OSError):
            path.unlink(missing_ok=True)
            removed.append(path)
            total -= size
    return removed
