"""The system calls that Python does not offer, by ctypes. Linux only.

In: plain values. Out: nothing, or OSError with the name of the call. Does not know what they are for.
"""

import ctypes
import os

SIGKILL, SIGTERM, SIGINT = 9, 15, 2
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_CAPBSET_DROP = 1, 4, 8, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID, CAP_SETPCAP = 2, 6, 7, 8
CAPS_TO_CHANGE_USER = (CAP_SETGID, CAP_SETUID, CAP_SETPCAP)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 1, 2, 4

libc = ctypes.CDLL(None, use_errno=True)


def check(outcome: int, name: str) -> int:
    if outcome < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return outcome


def unshare(flags: int) -> None:
    check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    parts = (source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode())
    check(libc.mount(*parts), f"mount {target}")


def bind_read_only(source: str, target: str) -> None:
    """The source as it is, with what is mounted below it, and nothing of it can be changed."""
    mount(source, target, flags=MS_BIND | MS_REC)
    wanted = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    path = target.encode()
    if libc.syscall(_MOUNT_SETATTR, -100, path, _AT_RECURSIVE, wanted, ctypes.c_size_t(32)) < 0:
        # Before Linux 5.12. What the mount forbids already must be named again within a user namespace.
        kept = os.statvfs(target).f_flag & 0xF
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept
        mount("", target, flags=flags)


def set_host_name(name: str) -> None:
    check(libc.sethostname(name.encode(), len(name)), "sethostname")
    check(libc.setdomainname(b"(none)", 6), "setdomainname")


def unmount(target: str) -> None:
    check(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: not known on {os.uname().machine}")
    check(libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def die_with_parent(parent: int | None = None, *, by: int = SIGKILL) -> None:
    """A signal when the parent ends, however it ends. A change of user undoes it: call it again."""
    check(libc.prctl(_PR_SET_PDEATHSIG, by), "prctl")
    if parent is not None and os.getppid() != parent:
        os._exit(125)


def adopt_orphans() -> None:
    check(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1), "prctl")


def set_dumpable(yes: bool) -> None:
    check(libc.prctl(_PR_SET_DUMPABLE, int(yes)), "prctl")


def no_new_privileges() -> None:
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def shut_capabilities() -> None:
    """None can be had again, not even by a program with such a bit. Needs a capability itself."""
    for capability in range(_LAST_CAPABILITY + 1):
        # Fails beyond the last one that this kernel knows, and where nothing may be dropped: then
        # `no_new_privileges` alone keeps them away.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def keep_capabilities() -> None:
    """Over the next change of user, so that some can be chosen after it."""
    check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")


def drop_capabilities(*, but: tuple[int, ...] = ()) -> None:
    """All of them, `but` for these."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    kept = sum(1 << capability for capability in but)
    check(libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)), "capset")
