"""Namespaces of its own, and a root that holds what an interpreter needs and nothing else.

In: what shall be seen. Out: a process whose `/` is an empty, read-only file system with libraries bound
into it and one small writable folder; no network, no processes of others, no /proc. The real root is
gone from it, not hidden.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH102, PTH103, PTH106, PTH120, PTH211

import os

from graftwork.process.sandbox.inside import kernel

_PLACE = "/tmp"
"""Where the new root is put together; seen by this process alone."""
_OLD = "/.old"


def leave_namespaces(*, user: bool) -> None:
    """New ones of every kind; the next child is the first process of its own world."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET
    flags |= kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
    if not user:
        kernel.unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {uid} 1")
    _write("/proc/self/gid_map", f"65534 {gid} 1")


def build_root(views: list[list[str]], *, folder: str, owner: int | None, size: int, files: int) -> None:
    """From here on there is nothing but this. The working folder is `folder`, empty."""
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    fixed = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", _PLACE, kind="tmpfs", flags=fixed, options="mode=0755,size=1m")
    os.mkdir(_PLACE + _OLD)
    kernel.pivot_root(_PLACE, _PLACE + _OLD)
    os.chdir("/")
    for kind, source, target in views:
        _add_view(kind, source, target)
    os.makedirs(folder, exist_ok=True)
    owned = f",uid={owner},gid={owner}" if owner is not None else ""
    room = f"mode=0700,size={size},nr_inodes={files}{owned}"
    kernel.mount("tmpfs", folder, kind="tmpfs", flags=fixed, options=room)
    kernel.unmount(_OLD)
    os.rmdir(_OLD)
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | fixed)
    os.chdir(folder)


def bound_folder(folder: str, *, size: int, files: int) -> None:
    """A file system that somebody else has mounted there, held to so many files."""
    flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, flags=flags, options=f"size={size},nr_inodes={files}")


def hide_host_name() -> None:
    """In a host name space of its own, which begins with the names of the machine."""
    kernel.set_host_name("box")


def _add_view(kind: str, source: str, target: str) -> None:
    if kind == "link":
        _make_folder(os.path.dirname(target))
        os.symlink(source, target)
        return
    if kind == "empty":
        options = "mode=0755,size=4k,nr_inodes=2"
        kernel.mount("tmpfs", target, kind="tmpfs", flags=kernel.MS_RDONLY, options=options)
        return
    if kind == "folder":
        _make_folder(target)
    else:
        _make_folder(os.path.dirname(target))
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    if kind == "device":
        kernel.mount(_OLD + source, target, flags=kernel.MS_BIND)
    else:
        kernel.bind_read_only(_OLD + source, target)


def _make_folder(path: str) -> None:
    """Readable by whoever the code runs as, whatever the umask says."""
    os.makedirs(path, mode=0o755, exist_ok=True)


def _write(path: str, text: str) -> None:
    opened = os.open(path, os.O_WRONLY)
    try:
        os.write(opened, text.encode())
    finally:
        os.close(opened)
