"""Extensions: objects that installed packages add through entry points.

A package that declares `[project.entry-points."graftwork.formats"]` adds a format; the other groups work
the same way. An extension is imported only when its name is used: listing names runs none of its code.
Built-in names win, so that an installed package cannot replace what graftwork ships.
"""

from collections.abc import Iterable
from importlib import metadata
from typing import Any, Literal

from graftwork.records.errors import EnvironmentFailure, UserError

Group = Literal[
    "graftwork.formats",
    "graftwork.metrics",
    "graftwork.trackers",
    "graftwork.places",
    "graftwork.engines",
    "graftwork.exporters",
]


def extension_names(group: Group) -> list[str]:
    """Return the names that installed packages declare in this group, sorted, without importing them."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def load_extension(group: Group, name: str, *, attributes: Iterable[str] = ()) -> Any:
    """Import the extension of this name and check that it has the attributes its group requires.

    Raises UserError if no installed package declares the name or two of them do, and EnvironmentFailure
    if its package cannot be imported or does not provide what the group requires.
    """
    entries = list(metadata.entry_points(group=group, name=name))
    kind = group.removeprefix("graftwork.").removesuffix("s")
    if not entries:
        installed = ", ".join(extension_names(group)) or "none"
        raise UserError(
            f"unknown {kind}: {name!r}",
            why=f"no installed package adds it (entry points in {group}: {installed})",
            fix="check the spelling, or install the package that provides it",
        )
    packages = sorted({entry.dist.name if entry.dist else entry.value for entry in entries})
    if len(entries) > 1:
        raise UserError(
            f"{kind} {name!r} is provided by several packages: {', '.join(packages)}",
            why="each name must belong to one package",
            fix="uninstall all but one of them",
        )
    entry = entries[0]
    try:
        extension = entry.load()
    except Exception as error:  # code of another package: whatever it raises, the fix is the same
        raise EnvironmentFailure(
            f"{kind} {name!r} cannot be imported: {type(error).__name__}: {error}",
            why=f"package {packages[0]} declares it as {entry.value}",
            fix=f"repair or uninstall {packages[0]}",
        ) from error
    missing = [attribute for attribute in attributes if not hasattr(extension, attribute)]
    if missing:
        raise EnvironmentFailure(
            f"{kind} {name!r} has no {', '.join(missing)}",
            why=f"package {packages[0]} declares {entry.value} in {group}, which requires it",
            fix=f"update {packages[0]}; docs/extending.md lists what each group requires",
        )
    return extension
