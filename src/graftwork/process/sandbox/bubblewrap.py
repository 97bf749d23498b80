"""The walls that bubblewrap makes: the same views as every other way, by its options.

In: what is seen, the size of the writable folder. Out: the beginning of a command line. Bubblewrap 0.8 or
later (`--size`, `--perms`); an older one is refused by the trial run in `available.py`.
"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from graftwork.process.sandbox.views import FOLDER, View


def shut_by_bubblewrap(
    views: Sequence[View],
    *,
    disk_bytes: int,
    as_root: bool,
    environment: Mapping[str, str],
    shown: Mapping[str, str],
) -> list[str]:
    """Everything up to the command that it runs. `shown` are folders besides the views, read-only."""
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
    for folder in _folders_above([view.target for view in views] + list(shown.values())):
        # Bubblewrap would shut those for others whose originals are shut: /root above an interpreter.
        command += ["--perms", "0755", "--dir", folder]
    for view in views:
        command += _as_option(view)
    for source, target in shown.items():
        command += ["--ro-bind", source, target]
    command += ["--perms", "1777", "--size", str(disk_bytes), "--tmpfs", FOLDER]
    return [*command, "--remount-ro", "/", "--chdir", FOLDER, "--"]


def _as_option(view: View) -> list[str]:
    if view.kind == "link":
        return ["--symlink", view.source, view.target]
    if view.kind == "empty":
        return ["--perms", "0755", "--size", "4096", "--tmpfs", view.target, "--remount-ro", view.target]
    if view.kind == "device":
        return ["--dev-bind", view.source, view.target]
    return ["--ro-bind", view.source, view.target]


def _folders_above(paths: Sequence[str]) -> list[str]:
    """The outermost first."""
    above = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    return sorted(above - {"/"} - set(paths))
