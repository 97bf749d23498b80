"""A job as a folder that any place can run: `bundle.json` names every file by its hash.

In: the job of a worker, its dataset, where its base is, a checkpoint to go on from. Out: the folder, named by
its content. This installation travels in it as a wheel with fixed times and order: the same sources give the
same bytes. What is secret never enters it: settings are published without secrets, and the login of a
mirror travels apart (`Place.submit`).
"""

import base64
import csv
import hashlib
import io
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graftwork.files.dataset import MANIFEST, read_manifest
from graftwork.files.disk import atomic_folder, file_digest, make_folder, require_digest, write_atomic
from graftwork.process.clock import WAITED
from graftwork.records.base import hide_login
from graftwork.records.errors import Damaged
from graftwork.records.fleet import Bundle, BundleBase, BundleFile
from graftwork.version import __version__

PACKAGE = Path(__file__).parents[1]
NAME = f"graftwork-{__version__}-py3-none-any.whl"
_INFO = f"graftwork-{__version__}.dist-info"
_TIME = (1980, 1, 1, 0, 0, 0)
_WHEEL = b"Wheel-Version: 1.0\nGenerator: graftwork\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_LEFT_OUT = {"__pycache__", ".DS_Store"}


def build_wheel(target: Path) -> Path:
    """Write the wheel into the folder `target`."""
    path = target / NAME
    path.write_bytes(_wheel())
    return path


@cache
def _wheel() -> bytes:
    """Built once a process."""
    content = {
        f"graftwork/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and not _LEFT_OUT.intersection(path.parts)
    }
    content |= {
        f"{_INFO}/METADATA": _metadata().encode(),
        f"{_INFO}/WHEEL": _WHEEL,
        f"{_INFO}/entry_points.txt": b"[console_scripts]\ngraft = graftwork.cli.main:main\n",
    }
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    for name, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow((name, f"sha256={digest}", len(data)))
    writer.writerow((f"{_INFO}/RECORD", "", ""))
    content[f"{_INFO}/RECORD"] = record.getvalue().encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _TIME)
            entry.external_attr = 0o644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return buffer.getvalue()


def _metadata() -> str:
    """With the dependencies of the installed package; only the name where it was never installed."""
    try:
        installed = metadata.distribution("graftwork").read_text("METADATA")
    except metadata.PackageNotFoundError:
        installed = None
    lines = (installed or "Metadata-Version: 2.1\nName: graftwork\n").splitlines()
    head = lines[: lines.index("")] if "" in lines else lines
    kept = [line for line in head if not line.startswith("Version:")]
    return "\n".join([*kept, f"Version: {__version__}", ""])


BUNDLE_FILE = "bundle.json"
JOB_FILE = "job.json"
BOOTSTRAP = "bootstrap.py"
DATASET = "dataset"
BASE = "base"
START_ADAPTER = "start_adapter"
RESUME = "resume"
TRAVELLING_SPLITS = ("train", "validation")
"""Held-out cases stay here: a place that trains does not need them."""


@dataclass(frozen=True)
class BundleParts:
    """What a bundle is made of. Folders are on this machine."""

    run_id: str
    module: str
    job: dict[str, Any]
    """The worker's job without secrets. The place fills in its folders."""
    base: BundleBase
    base_folder: Path | None = None
    """Copied into the bundle for a base of the kind `bundled`."""
    dataset_folder: Path | None = None
    dataset_there: str = ""
    splits: tuple[str, ...] = TRAVELLING_SPLITS
    start_adapter: Path | None = None
    checkpoint: Path | None = None
    """The folder of the checkpoint to go on from."""
    seconds: float | None = None
    max_usd: float | None = None
    mirror: str | None = None


def build_bundle(parts: BundleParts, root: Path) -> tuple[Path, Bundle]:
    """Write the bundle to `root/<id>`; one that exists already is the same."""
    make_folder(root)
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        folder = Path(scratch)
        build_wheel(folder)
        shutil.copyfile(Path(__file__).with_name(BOOTSTRAP), folder / BOOTSTRAP)
        (folder / JOB_FILE).write_text(json.dumps({**parts.job, "run_id": parts.run_id}, indent=2))
        for name, source in _travelling(parts):
            _link(source, folder / name)
        files = {
            path.relative_to(folder).as_posix(): BundleFile(
                sha256=file_digest(path), size=path.stat().st_size
            )
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        bundle = Bundle(
            run_id=parts.run_id,
            module=parts.module,
            graftwork=__version__,
            files=files,
            base=parts.base,
            dataset=parts.dataset_there,
            resume_step=int(parts.checkpoint.name.rpartition("-")[2]) if parts.checkpoint else None,
            seconds=parts.seconds,
            max_usd=parts.max_usd,
            mirror=hide_login(parts.mirror) if parts.mirror else None,
        )
        final = root / bundle.id
        with atomic_folder(final) as named:
            for name in files:
                _link(folder / name, named / name)
            write_atomic(named / BUNDLE_FILE, bundle.to_json())
    return final, bundle


def _travelling(parts: BundleParts) -> Iterator[tuple[str, Path]]:
    """Names in the bundle, and where the files are now."""
    if parts.dataset_folder is not None and not parts.dataset_there:
        dataset = read_manifest(parts.dataset_folder)
        names = [MANIFEST]
        for split, rows in dataset.splits.items():
            names += [shard.file for shard in rows.shards] if split in parts.splits else []
        names += [dataset.packing.file] if dataset.packing is not None else []
        yield from ((f"{DATASET}/{name}", parts.dataset_folder / name) for name in names)
    folders = {
        BASE: parts.base_folder,
        START_ADAPTER: parts.start_adapter,
        f"{RESUME}/{parts.checkpoint.name}" if parts.checkpoint else RESUME: parts.checkpoint,
    }
    for name, folder in folders.items():
        if folder is None:
            continue
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield f"{name}/{path.relative_to(folder).as_posix()}", path
    # How long the run has taken goes on with it.
    if parts.checkpoint is not None and (waited := parts.checkpoint.parent.parent / WAITED).exists():
        yield f"{RESUME}/{WAITED}", waited


def _link(source: Path, target: Path) -> None:
    """One copy on disk where the file system allows it: files of datasets and checkpoints never change."""
    make_folder(target.parent)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def read_bundle(folder: Path) -> Bundle:
    """The manifest, with every file checked against it."""
    try:
        bundle = Bundle.from_json((folder / BUNDLE_FILE).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise Damaged(
            "this is no bundle of a job",
            why=f"{BUNDLE_FILE} is missing or cannot be read",
            fix="make it again: `graft fleet bundle`",
            where=str(folder),
        ) from error
    for name, file in bundle.files.items():
        require_digest(folder / name, file.sha256)
    return bundle
