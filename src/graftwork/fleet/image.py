"""A Docker image for places that run containers: Dockerfile, pinned requirements and the wheel of graftwork.

In: a folder, an image to build on, extras. Out: what `docker build` needs. The versions are those of this
environment, packages of packages included. Builds nothing.
"""

import re
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from graftwork.files.disk import atomic_folder, write_atomic
from graftwork.fleet.bundle import build_wheel
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake

PACKAGE = "graftwork"
BASE_IMAGE = "python:3.12-slim"
EXTRAS = ("train", "mirror")
"""What a job needs; the clients of places are needed here, not there."""
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
    """What `docker build` gets."""

    folder: str
    image: str
    """Built on."""
    packages: int
    command: str


def write_image(target: Path, *, image: str = BASE_IMAGE, extras: Iterable[str] = ()) -> ImageFiles:
    """Write the folder; it must not exist yet."""
    if target.exists():
        raise UserMistake("the folder exists already", fix="name a new one", where=str(target))
    pins = pin_packages((*EXTRAS, *extras), installed_package)
    with atomic_folder(target) as folder:
        wheel = build_wheel(folder)
        lines = [f"{name}=={version}" for name, version in sorted(pins.items())]
        write_atomic(folder / "requirements.txt", "\n".join(lines) + "\n")
        write_atomic(folder / "Dockerfile", _DOCKERFILE.format(image=image, wheel=wheel.name))
    name = f"docker build -t {PACKAGE}-job {target}"
    return ImageFiles(folder=str(target), image=image, packages=len(pins), command=name)


def pin_packages(extras: Iterable[str], requirements: Requirements) -> dict[str, str]:
    """Everything that graftwork with these extras needs, as it is installed here."""
    pins: dict[str, str] = {}
    open_ends: list[tuple[str, frozenset[str]]] = [(PACKAGE, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while open_ends:
        entry = open_ends.pop()
        if entry in seen:
            continue
        seen.add(entry)
        name, wanted = entry
        found = requirements(name)
        if found is None:
            # For another system, or optional here.
            continue
        version, lines = found
        if name != PACKAGE:
            # The image gets the build for its own device, not this one's.
            pins[name] = version.partition("+")[0]
        for line in lines:
            requirement, _, marker = line.partition(";")
            needing = _EXTRA.findall(marker)
            package = _NAME.match(requirement.strip())
            if package is None or (needing and not wanted.intersection(needing)):
                continue
            inside = re.search(r"\[([^\]]*)\]", requirement)
            parts = frozenset(part.strip() for part in inside[1].split(",")) if inside else frozenset()
            open_ends.append((re.sub(r"[-_.]+", "-", package[0]).lower(), parts))
    return pins


def installed_package(name: str) -> tuple[str, list[str]] | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found.version, list(found.requires or ())
