"""A job as a folder that any place can run, its results, and an image to run it in.

Input: the job of a worker, its dataset, where its base is, a checkpoint to continue from. Output: the folder,
named by its content; `bundle.json` names every file by its hash. This installation travels in it as a wheel
with fixed times and order: the same sources give the same bytes. What is secret never enters it: settings are
published without secrets, and the login of a mirror travels apart (`Place.submit`). Results are taken into
the folder of the run file by file, and only under names that a run has.
"""

import base64
import csv
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic import ValidationError

from graftwork.files.dataset import MANIFEST, read_manifest
from graftwork.files.disk import (
    atomic_file,
    atomic_folder,
    file_digest,
    folder_digest,
    make_folder,
    require_digest,
    write_atomic,
)
from graftwork.fleet.place import NotThere
from graftwork.process.clock import WAITED
from graftwork.records.base import Record, hide_login
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.fleet import Bundle, BundleBase, BundleFile, JobPoll
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
    """Built once per process."""
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
    headers = [line for line in head if not line.startswith("Version:")]
    return "\n".join([*headers, f"Version: {__version__}", ""])


BUNDLE_FILE = "bundle.json"
JOB_FILE = "job.json"
BOOTSTRAP = "bootstrap.py"
DATASET = "dataset"
BASE = "base"
START_ADAPTER = "start_adapter"
RESUME = "resume"
TRAVELING_SPLITS = ("train", "validation")
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
    splits: tuple[str, ...] = TRAVELING_SPLITS
    start_adapter: Path | None = None
    checkpoint: Path | None = None
    """The folder of the checkpoint to continue from."""
    seconds: float | None = None
    max_usd: float | None = None
    mirror: str | None = None


def build_bundle(parts: BundleParts, root: Path) -> tuple[Path, Bundle]:
    """Write the bundle to `root/<id>`; one that already exists is the same."""
    make_folder(root)
    with tempfile.TemporaryDirectory(dir=root, prefix=".part-") as scratch:
        folder = Path(scratch)
        build_wheel(folder)
        shutil.copyfile(Path(__file__).with_name(BOOTSTRAP), folder / BOOTSTRAP)
        (folder / JOB_FILE).write_text(json.dumps({**parts.job, "run_id": parts.run_id}, indent=2))
        for name, source in _list_files(parts):
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


def _list_files(parts: BundleParts) -> Iterator[tuple[str, Path]]:
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
    # How long the run has taken continues with it.
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
        raise Corrupted(
            "this is not the bundle of a job",
            why=f"{BUNDLE_FILE} is missing or cannot be read",
            fix="make it again: `graft fleet bundle`",
            where=str(folder),
        ) from error
    for name, file in bundle.files.items():
        require_digest(folder / name, file.sha256)
    return bundle


OUTCOME = "outcome.json"
ADAPTER = "adapter"
LONGEST_NAME = 200
"""Bytes of a name; file systems allow 255, of which a file that is being written needs some more."""
MOST_FOLDERS = 32
CopyFile = Callable[[IO[bytes]], object]
"""Writes the content of a file, or raises `NotThere`."""
_KEPT_HERE = {"lock", "job.json"}


def take_packed(pack: Callable[[IO[bytes]], object], folder: Path) -> None:
    """Unpack the tar file that `pack` writes, once it is complete."""
    with tempfile.TemporaryFile() as packed:
        pack(packed)
        packed.seek(0)
        take_results(packed, folder)


def take_results(stream: IO[bytes], folder: Path) -> None:
    """Extract the files of a tar file."""

    def files() -> Iterator[tuple[str, CopyFile]]:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                # The holes of a sparse file are not in the archive: it may claim to have any size.
                plain = entry.isreg() and not entry.issparse()
                source = archive.extractfile(entry) if plain else None
                if source is None:
                    raise Corrupted(
                        "the results contain something that is not a file", where=entry.name[:100]
                    )
                yield entry.name, partial(shutil.copyfileobj, source)

    try:
        take_files(files(), folder)
    except tarfile.TarError as error:
        raise Corrupted(
            "the results cannot be unpacked",
            why=f"not all of them have arrived, or they are not an archive: {error}"[:200],
            fix="fetch them again",
            where=str(folder),
        ) from error


def take_folder(source: Path, folder: Path) -> None:
    """Import the files of a folder: the `run` of a work folder, as a person copied it."""
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
            raise Corrupted("the results name a file outside of the run", where=name[:100])
        plain = path.as_posix()
        if len(path.parts) > 1 and path.parts[0] in {OUTCOME, *_KEPT_HERE}:
            raise Corrupted("the results have a folder where the run has a file", where=name[:100])
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
        raise Corrupted(
            "the results name a file that cannot be created",
            why=f"names have up to {LONGEST_NAME} bytes and {MOST_FOLDERS} levels, in UTF-8",
            where=where,
        )
    if (folder / path).is_dir() or any((folder / above).is_file() for above in path.parents):
        raise Corrupted("the results have a file and a folder of the same name", where=where)


def _with_adapter_here(outcome: bytes, folder: Path) -> str:
    """The outcome with the adapter's folder here, once the adapter matches the hash in it."""
    try:
        content = json.loads(outcome)
        stated = content["adapter_hash"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Corrupted("the outcome of the run cannot be read", where=str(folder)) from error
    if not (folder / ADAPTER).is_dir() or folder_digest(folder / ADAPTER) != stated:
        raise Corrupted(
            "the adapter does not match the hash in the outcome of the run",
            why="it was damaged in transit, or is incomplete",
            fix="fetch it again",
            where=str(folder / ADAPTER),
        )
    return json.dumps({**content, "adapter_folder": str(folder / ADAPTER)}, indent=2)


def parse_exit(content: bytes | None) -> JobPoll | None:
    """Parse how a job ended from its `exit.json`; None if there is none, or it cannot be read."""
    if content is None:
        return None
    try:
        exit_report = json.loads(content)
        return JobPoll(phase="ended", exit_code=int(exit_report["code"]), message=str(exit_report["reason"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


DISTRIBUTION = "graftwork"
BASE_IMAGE = "python:3.12-slim"
EXTRAS = ("train", "mirror")
"""Extras that a job needs; the clients of places are needed here, not there."""
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w.-]+)['\"]")
_DOCKERFILE = """\
# Runs the jobs of graftwork: a place brings the bundle and its own command.
FROM {image}
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1
COPY requirements.txt {wheel} /opt/graftwork/
RUN python3 -m pip install -r /opt/graftwork/requirements.txt \\
 && python3 -m pip install --no-deps /opt/graftwork/{wheel} \\
 && python3 -c "import graftwork.fleet.runner, torch, transformers"
WORKDIR /work
"""

Requirements = Callable[[str], tuple[str, list[str]] | None]
"""The version of an installed package and its requirement lines; None: not installed."""


class ImageFiles(Record):
    """The inputs of `docker build`."""

    folder: str
    image: str
    """Base image."""
    packages: int
    command: str


def write_image(target: Path, *, image: str = BASE_IMAGE, extras: Iterable[str] = ()) -> ImageFiles:
    """Write the folder; it must not exist yet."""
    if target.exists():
        raise UserError("the folder already exists", fix="specify a new one", where=str(target))
    pins = pin_packages((*EXTRAS, *extras), installed_package)
    with atomic_folder(target) as folder:
        wheel = build_wheel(folder)
        lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
        write_atomic(folder / "requirements.txt", "\n".join(lines) + "\n")
        write_atomic(folder / "Dockerfile", _DOCKERFILE.format(image=image, wheel=wheel.name))
    name = f"docker build -t {DISTRIBUTION}-job {target}"
    return ImageFiles(folder=str(target), image=image, packages=len(pins), command=name)


def pin_packages(extras: Iterable[str], requirements: Requirements) -> dict[str, str]:
    """All packages that graftwork with these extras needs, in the versions installed here."""
    pins: dict[str, str] = {}
    open_ends: list[tuple[str, frozenset[str]]] = [(DISTRIBUTION, frozenset(extras))]
    visited: set[tuple[str, frozenset[str]]] = set()
    while open_ends:
        entry = open_ends.pop()
        if entry in visited:
            continue
        visited.add(entry)
        name, extras_named = entry
        pin = requirements(name)
        if pin is None:
            # For another system, or optional here.
            continue
        version, lines = pin
        if name != DISTRIBUTION:
            # The image gets the build for its own device, not this one's.
            pins[name] = version.partition("+")[0]
        for line in lines:
            requirement, _, marker = line.partition(";")
            needing = _EXTRA.findall(marker)
            package = _NAME.match(requirement.strip())
            if package is None or (needing and not extras_named.intersection(needing)):
                continue
            inside = re.search(r"\[([^\]]*)\]", requirement)
            parts = frozenset(part.strip() for part in inside[1].split(",")) if inside else frozenset()
            open_ends.append((re.sub(r"[-_.]+", "-", package[0]).lower(), parts))
    return pins


def installed_package(name: str) -> tuple[str, list[str]] | None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return distribution.version, list(distribution.requires or ())
