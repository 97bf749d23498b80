"""Python and packages: are they there, and are they the versions that we ask for?

In: whether a project is to be worked on. Out: checks. Imports none of the packages.
"""

import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata

from graftwork.pipeline.doctor.check import Check, decide
from graftwork.records.errors import pip_install

NEEDED_EXTRAS = ("train", "serve")
OTHER_EXTRAS = ("deepspeed", "postgres", "mirror", "tensorboard", "wandb", "mlflow", "trackio")
REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*(?:>=\s*([0-9.]+))?")


def look_at_software(*, needed: bool) -> Iterator[Check]:
    yield decide(
        "python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later"
    )
    yield _packages("core", requirements(None), needed=True)
    for extra in NEEDED_EXTRAS:
        yield _packages(extra, requirements(extra), needed=needed)
    others = {extra: requirements(extra) for extra in OTHER_EXTRAS}
    there = [extra for extra, wanted in others.items() if wanted and not _lacking(wanted)]
    yield Check(name="other extras", result="note", found=", ".join(there) or "none of them is installed")


def requirements(extra: str | None, listed: list[str] | None = None) -> dict[str, str]:
    """Packages of the extra, or of the core, with the least version of each, as our metadata states them."""
    found: dict[str, str] = {}
    for line in listed if listed is not None else metadata.requires("graftwork") or []:
        requirement, _, marker = line.partition(";")
        match = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        named = REQUIREMENT.match(requirement.strip())
        if named is None or (match.group(1) if match else None) != extra or "platform" in marker:
            continue
        name, least = named.group(1), named.group(2) or "0"
        if name.lower() != "graftwork":
            found[name] = least
    return found


def _packages(extra: str, wanted: dict[str, str], *, needed: bool) -> Check:
    lacking = _lacking(wanted)
    if not lacking:
        told = ", ".join(f"{name} {metadata.version(name)}" for name in wanted)
        return Check(name=f"packages [{extra}]", result="ok", found=told)
    return Check(
        name=f"packages [{extra}]",
        result="missing" if needed else "note",
        found=f"lacking: {', '.join(lacking)}",
        fix=pip_install("" if extra == "core" else extra),
    )


def _lacking(wanted: dict[str, str]) -> list[str]:
    lacking = []
    for name, least in wanted.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            lacking.append(name)
            continue
        if _parts(version) < _parts(least):
            lacking.append(f"{name} {version}, wanted {least} or later")
    return lacking


def _parts(version: str) -> tuple[int, ...]:
    """The numbers of a release; what follows them (rc1, +cu128) does not matter here."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match.group().split(".")] if match else [0]
    return tuple(numbers + [0] * (4 - len(numbers)))
