"""GGUF files of bases and adapters, converted once and named by the content that they are made of.

In: a base or an adapter of it. Out: the path of its GGUF file. The cache is shared by all projects of a user,
next to converted base models. A file appears whole or not at all.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from graftwork.files.disk import explain_os_error, file_digest, make_folder, sync_folder
from graftwork.model.base import find_base, models_folder
from graftwork.model.gguf.writer import WRITER, write_adapter, write_base
from graftwork.records.base import fingerprint
from graftwork.records.release import GgufPrecision

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_SHOWN = 24


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
        return path
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
    except OSError as error:
        raise explain_os_error(error, path) from error
    finally:
        os.close(descriptor)
        Path(temporary).unlink(missing_ok=True)
    return path
