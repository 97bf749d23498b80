"""How the far side is started: one command line for each way.

In: the way, the numbers of the pipes, limits. Out: a command line. Starts nothing.
"""

import marshal
import os
import secrets
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.process.sandbox.bubblewrap import shut_by_bubblewrap
from graftwork.process.sandbox.limits import Limits
from graftwork.process.sandbox.result import SandboxKind
from graftwork.process.sandbox.views import FOLDER, interpreter, list_views, places_of

INSIDE = Path(__file__).with_name("inside")
_BOX_FILES = "/.inside"
# Stand-ins for the packages above `inside`: the real ones load what the box does not have.
_START = """
import sys, types
for name in ("graftwork", "graftwork.process", "graftwork.process.sandbox"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = []
sys.modules[name].__path__ = [sys.argv.pop(1)]
from graftwork.process.sandbox.inside.init import main
main()
"""
_FREE_UIDS = range(1_879_048_192, 1_879_048_192 + 2**28 - 2)
"""User numbers that no distribution gives to anybody; one a run, so that nothing is shared or counted
together with others."""
_FREE_UIDS_OF_CONTAINER = range(61_000, 65_000)
"""The same for a container that maps 65,536 numbers, as many do."""


class Pipes(NamedTuple):
    """The far ends, as the child knows them."""

    channel: int
    status: int


def command_for(
    kind: SandboxKind, pipes: Pipes, *, limits: Limits, folder: str, packages: tuple[str, ...] = ()
) -> list[str]:
    """`folder` is the code's own: a place on this machine for those ways that can make none of their own."""
    views, places = list_views(packages), places_of(packages)
    described = {
        "way": str(kind.value),
        "parent": os.getpid(),
        "channel": pipes.channel,
        "status": pipes.status,
        "uid": choose_uid() if kind is not SandboxKind.OFF else None,
        "limits": limits.model_dump(),
        "folder": folder,
        "search": list(places.values() if folder == FOLDER else places),
        "views": [tuple(view) for view in views] if kind is not SandboxKind.BUBBLEWRAP else [],
    }
    if kind is not SandboxKind.BUBBLEWRAP:
        return _interpret(str(INSIDE.parent), described)
    walls = shut_by_bubblewrap(
        views,
        disk_bytes=limits.disk_bytes,
        as_root=described["uid"] is not None,
        environment=scrubbed_environment(FOLDER),
        shown={str(INSIDE): f"{_BOX_FILES}/{INSIDE.name}"},
    )
    return [*walls, *_interpret(_BOX_FILES, described)]


def choose_uid() -> int | None:
    """A user number that nobody has; None where we are not root, or this user namespace maps none."""
    if os.geteuid() != 0:
        return None
    found = _free_uids()
    return None if found is None else found.start + secrets.randbelow(len(found))


def uid_of(command: list[str]) -> int | None:
    uid: int | None = marshal.loads(bytes.fromhex(command[-1]))["uid"]
    return uid


@lru_cache(maxsize=1)
def _free_uids() -> range | None:
    maps = [_mapped_numbers(Path(f"/proc/self/{kind}_map")) for kind in ("uid", "gid")]
    for wanted in (_FREE_UIDS, _FREE_UIDS_OF_CONTAINER):
        if all(any(wanted[0] in one and wanted[-1] in one for one in mapped) for mapped in maps):
            return wanted
    return None


def _mapped_numbers(path: Path) -> list[range]:
    """The user or group numbers that exist in this user namespace; a rootless container may have one."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return [range(2**32 - 1)]
    return [range(int(first), int(first) + int(count)) for first, _, count in lines]


def _interpret(packages: str, described: dict[str, Any]) -> list[str]:
    """Isolated, without site-packages, in UTF-8 whatever the machine says."""
    return [interpreter(), "-I", "-S", "-X", "utf8", "-c", _START, packages, marshal.dumps(described).hex()]


def scrubbed_environment(folder: str) -> dict[str, str]:
    """All that the code finds: nothing of ours, no key, no proxy, no home of anybody."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        # Every thread would set 64 MiB of addresses aside, and addresses are what is limited.
        "MALLOC_ARENA_MAX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
