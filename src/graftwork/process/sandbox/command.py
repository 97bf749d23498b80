"""What the code sees of the machine: the interpreter, its libraries, four devices. Nothing else.

Input: this interpreter. Output: a list of what is shown where, for every mechanism: `folder` and `file` are
read-only, `device`, `link`, and `empty` for a folder whose content is withheld (packages that happen to be
installed next to the interpreter).
"""

import marshal
import os
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from graftwork.process.sandbox.limits import Limits, SandboxKind

FOLDER = "/box"
"""The code's own folder: its working directory, its home and its temporary folder."""
_SYSTEM = ("/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


class View(NamedTuple):
    kind: str
    source: str
    target: str


def interpreter() -> str:
    """The interpreter itself, not the link that a virtual environment has to it."""
    return str(Path(getattr(sys, "_base_executable", None) or sys.executable).resolve())


@lru_cache(maxsize=8)
def list_views(packages: tuple[str, ...] = ()) -> tuple[View, ...]:
    views = []
    for name in _SYSTEM:
        path = Path(name)
        if path.is_symlink():
            views.append(View("link", str(path.readlink()), name))
        elif path.is_dir():
            views.append(View("folder", name, name))
    folders = [Path(sys.base_prefix) / "lib", Path(sys.base_exec_prefix) / "lib"]
    folders.append(Path(sysconfig.get_path("stdlib")))
    for path in (folder.resolve() for folder in folders):
        if path.is_dir() and not any(
            view.kind == "folder" and path.is_relative_to(view.target) for view in views
        ):
            views.append(View("folder", str(path), str(path)))
    # Packages that happen to be installed anywhere below a mounted folder are withheld.
    for view in [view for view in views if view.kind == "folder"]:
        for pattern in ("python*/site-packages", "python*/dist-packages", "site-packages"):
            installed = sorted(Path(view.source).glob(pattern))
            views += [View("empty", "", str(path)) for path in installed if not path.is_symlink()]
    views.append(View("file", interpreter(), interpreter()))
    if Path("/etc/ld.so.cache").is_file():
        views.append(View("file", "/etc/ld.so.cache", "/etc/ld.so.cache"))
    views += [View("device", name, name) for name in _DEVICES if Path(name).exists()]
    views += [View("folder", source, target) for source, target in places_of(packages).items()]
    for folder_name in ("/tmp", "/dev/shm"):
        # An interpreter may be installed in the temporary folder.
        if not any(Path(view.target).is_relative_to(folder_name) for view in views):
            views.append(View("link", FOLDER, folder_name))
    return tuple(dict.fromkeys(views))


def places_of(packages: tuple[str, ...]) -> dict[str, str]:
    """Where a folder of packages is, and where it is mounted: inside, its name reveals nothing."""
    sources = dict.fromkeys(str(Path(package).resolve()) for package in packages)
    return {source: f"/packages/{number}" for number, source in enumerate(sources)}


def shut_by_bubblewrap(
    views: Sequence[View],
    *,
    disk_bytes: int,
    as_root: bool,
    environment: Mapping[str, str],
    extra_folders: Mapping[str, str],
) -> list[str]:
    """Everything up to the command that it runs. `extra_folders` are added to the views, read-only."""
    command = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--new-session", "--as-pid-1"]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if not as_root:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    # What the first process needs to bound the number of files, which bubblewrap has no option for; as root
    # also to become the run's own user. The code has none of it.
    command += ["--cap-drop", "ALL"]
    for capability in ("CAP_SYS_ADMIN", *(("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP") if as_root else ())):
        command += ["--cap-add", capability]
    command += ["--clearenv"]
    for name, value in environment.items():
        command += ["--setenv", name, value]
    targets = {*(view.target for view in views), *extra_folders.values()}
    above = {str(folder) for path in targets for folder in PurePosixPath(path).parents}
    for folder in sorted(above - {"/"} - targets):
        # Bubblewrap would shut those for others whose originals are shut: /root above an interpreter.
        command += ["--perms", "0755", "--dir", folder]
    for kind, source, target in views:
        if kind == "empty":
            command += ["--perms", "0755", "--size", "4096", "--tmpfs", target, "--remount-ro", target]
        else:
            option = {"link": "--symlink", "device": "--dev-bind"}.get(kind, "--ro-bind")
            command += [option, source, target]
    for source, target in extra_folders.items():
        command += ["--ro-bind", source, target]
    command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", FOLDER]
    return [*command, "--remount-ro", "/", "--chdir", FOLDER, "--"]


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
"""User ids that no distribution assigns; one per run, so that nothing is shared or counted together."""
_FREE_UIDS_OF_CONTAINER = range(61_000, 65_000)
"""The same for a container that maps 65,536 numbers, as many do."""


MOST_JOBS = 256
"""Jobs of one sandbox: each has the next user id."""


def command_for(
    kind: SandboxKind,
    pipes: tuple[int, int],
    *,
    limits: Limits,
    folder: str,
    packages: tuple[str, ...] = (),
    jobs: int = 0,
    job_limits: Limits | None = None,
) -> list[str]:
    """Build the command. `pipes` are the far ends of channel and status, as the child knows them. `folder` is
    the code's own: a folder on this machine for mechanisms without a file system of their own. With
    `job_limits` the sandbox runs this many jobs, each within these limits.
    """
    views, mounts = list_views(packages), places_of(packages)
    described = {
        "way": str(kind.value),
        "parent": os.getpid(),
        "channel": pipes[0],
        "status": pipes[1],
        "uid": choose_uid() if kind is not SandboxKind.OFF else None,
        "limits": limits.model_dump(),
        "job_limits": job_limits.model_dump() if job_limits is not None else None,
        "batch": jobs,
        "folder": folder,
        "search": list(mounts.values() if folder == FOLDER else mounts),
        "views": [tuple(view) for view in views] if kind is not SandboxKind.BUBBLEWRAP else [],
    }
    if kind is not SandboxKind.BUBBLEWRAP:
        return _interpret(str(INSIDE.parent), described)
    walls = shut_by_bubblewrap(
        views,
        disk_bytes=limits.disk_bytes,
        as_root=described["uid"] is not None,
        environment=scrubbed_environment(FOLDER),
        extra_folders={str(INSIDE): f"{_BOX_FILES}/{INSIDE.name}"},
    )
    return [*walls, *_interpret(_BOX_FILES, described)]


def choose_uid() -> int | None:
    """An unused user id; None if we are not root, or this user namespace maps none."""
    if os.geteuid() != 0:
        return None
    free_uids = _free_uids()
    return None if free_uids is None else free_uids.start + secrets.randbelow(len(free_uids) - MOST_JOBS)


def uid_of(command: list[str]) -> int | None:
    uid: int | None = marshal.loads(bytes.fromhex(command[-1]))["uid"]
    return uid


@lru_cache(maxsize=1)
def _free_uids() -> range | None:
    maps = [_mapped_numbers(Path(f"/proc/self/{kind}_map")) for kind in ("uid", "gid")]
    for uids in (_FREE_UIDS, _FREE_UIDS_OF_CONTAINER):
        if all(any(uids[0] in line and uids[-1] in line for line in mapped) for mapped in maps):
            return uids
    return None


def _mapped_numbers(path: Path) -> list[range]:
    """The user or group numbers that exist in this user namespace; a rootless container may have one."""
    try:
        lines = [line.split() for line in path.read_text().splitlines() if line.strip()]
    except OSError:
        return [range(2**32 - 1)]
    return [range(int(first), int(first) + int(count)) for first, _, count in lines]


def _interpret(packages: str, described: dict[str, Any]) -> list[str]:
    """Isolated, without site-packages, always in UTF-8."""
    return [interpreter(), "-I", "-S", "-X", "utf8", "-c", _START, packages, marshal.dumps(described).hex()]


def scrubbed_environment(folder: str) -> dict[str, str]:
    """The complete environment of the code: no keys, no proxy, no home folder."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        # Every thread would set 64 MiB of addresses aside, and addresses are what is limited.
        "MALLOC_ARENA_MAX": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
