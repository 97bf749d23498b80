"""Isolation by the kernel: namespaces and a root of its own, a system call filter, Landlock, resource limits;
and the code's folder where it is on this machine instead of a file system of its own: measured and removed.

Input: plain values. Output: nothing, or OSError with the name of the call. Linux only, but for the folder;
the system calls that Python does not offer are made through ctypes. The content of the folder is hostile: no
link is followed and no file is opened, and neither depth nor number nor modes of its folders matter. Loaded
for every run, so it imports little.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH101, PTH102, PTH103, PTH104, PTH106, PTH108, PTH112, PTH114, PTH116, PTH118
# ruff: noqa: PTH120, PTH208, PTH211

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

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
    """Bind the source with everything mounted below it, all of it read-only."""
    mount(source, target, flags=MS_BIND | MS_REC)
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV, 0, 0, 0)
    path = target.encode()
    if libc.syscall(_MOUNT_SETATTR, -100, path, _AT_RECURSIVE, attributes, ctypes.c_size_t(32)) < 0:
        # Before Linux 5.12. What the mount forbids already must be named again within a user namespace.
        mounted_flags = os.statvfs(target).f_flag & 0xF
        flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | mounted_flags
        mount("", target, flags=flags)


def unmount(target: str) -> None:
    check(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: not known on {os.uname().machine}")
    check(libc.syscall(number, new.encode(), old.encode()), "pivot_root")


def die_with_parent(parent: int | None = None, *, by: int = SIGKILL) -> None:
    """Request a signal when the parent ends. A change of user resets it: call it again."""
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
    """None can be regained, not even by a program with file capabilities. Needs a capability itself."""
    for capability in range(_LAST_CAPABILITY + 1):
        # Fails beyond the last one that this kernel knows, and where nothing may be dropped: then
        # `no_new_privileges` alone keeps them away.
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)


def keep_capabilities() -> None:
    """Keep capabilities over the next change of user, so that some can be chosen after it."""
    check(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0), "prctl")


def drop_capabilities(*, but: tuple[int, ...] = ()) -> None:
    """Drop all of them, except these."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    mask = sum(1 << capability for capability in but)
    check(libc.capset(header, (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)), "capset")


# Name: the number on x86_64, on aarch64; None if it does not exist.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "setsockopt": (54, 208),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "personality": (135, 92),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "landlock_create_ruleset": (444, 444),
    "landlock_add_rule": (445, 445),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
}
_CLONE = (56, 220)
_CLONE3 = 435
_IOCTL = (16, 29)
_SOCKETPAIR = (53, 199)
_AF_UNIX, _SOCK_STREAM, _SOCK_KINDS = 1, 1, 0xF
_TIOCSTI = 0x5412
_NEW_NAMESPACES = 0x7E020000
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
"""A second numbering of the calls on x86_64; it is only used to bypass filters."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2


def build_filter(machine: str) -> bytes | None:
    """The program as the kernel reads it; None for a machine whose numbers are not known."""
    if machine not in _ARCHITECTURES:
        return None
    column, audit = _ARCHITECTURES[machine]
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, audit, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        *_refuse_if(_step(_AT_LEAST, _X32, no=1), errno.ENOSYS),
        # Without clone3, whose arguments no filter can see, libraries fall back to clone.
        *_refuse_if(_step(_EQUAL, _CLONE3, no=1), errno.ENOSYS),
    ]
    for numbers in REFUSED.values():
        number = numbers[column]
        if number is not None:
            steps += _refuse_if(_step(_EQUAL, number, no=1), errno.EPERM)
    steps += [
        _step(_EQUAL, _CLONE[column], no=4),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_refuse_if(_step(_ANY_BIT, _NEW_NAMESPACES, no=1), errno.EPERM),
        _step(_RETURN, _ALLOW),
        # Two ends of one stream, as asyncio needs them. Ends of any other kind can be given an address later.
        _step(_EQUAL, _SOCKETPAIR[column], no=8),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_refuse_if(_step(_EQUAL, _AF_UNIX, yes=1), errno.EPERM),
        _step(_LOAD, _SECOND_ARGUMENT),
        _step(_AND, _SOCK_KINDS),
        *_refuse_if(_step(_EQUAL, _SOCK_STREAM, yes=1), errno.EPERM),
        _step(_RETURN, _ALLOW),
        _step(_EQUAL, _IOCTL[column], no=3),
        _step(_LOAD, _SECOND_ARGUMENT),
        *_refuse_if(_step(_EQUAL, _TIOCSTI, no=1), errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(steps)


def install_filter() -> bool:
    """Install the filter permanently. `no_new_privileges` must come first."""
    program = build_filter(os.uname().machine)
    if program is None:
        return False
    steps = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps))
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")
    return True


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` say how many to skip after a comparison."""
    return struct.pack("HBBI", code, yes, no, value)


def _refuse_if(comparison: bytes, error: int) -> tuple[bytes, bytes]:
    return comparison, _step(_RETURN, _ERRNO | error)


_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_BY_VERSION = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_NOW = 0xFFFF
"""From version 5 on also ioctl on devices."""


def write_rules(*, readable: list[str], devices: list[str], writable: str) -> int:
    """Open the rules without enforcing them: a process that has given up root may not find all these
    paths.
    """
    version = check(libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1), "landlock")
    everything = _ALL_BY_VERSION.get(version, _ALL_NOW)
    handled = struct.pack("Q", everything)
    rules = check(libc.syscall(_CREATE, handled, ctypes.c_size_t(8), 0), "landlock")
    for path in readable:
        rights = _READ_FILE | _EXECUTE | (_READ_DIR if os.path.isdir(path) else 0)
        _allow(rules, path, rights)
    for path in devices:
        _allow(rules, path, _READ_FILE | _WRITE_FILE)
    _allow(rules, writable, everything & ~_EXECUTE)
    return rules


def shut_files(rules: int) -> None:
    """Enforce the rules permanently. `no_new_privileges` must come first."""
    check(libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, opened)
        check(libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0), f"landlock {path}")
    finally:
        os.close(opened)


def set_limits(limits: dict[str, Any], *, processes: int | None) -> None:
    """Set limits; `processes` is None if other processes of the same user would count."""
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        *(((resource.RLIMIT_NPROC, processes),) if processes is not None else ()),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
    ):
        _, allowed = resource.getrlimit(kind)
        least = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        # Both alike, so that nothing can be raised again. But of CPU time: the first figure ends by
        # a signal that names the reason; a process that ignores it is killed a second later.
        later = kind == resource.RLIMIT_CPU and (allowed == resource.RLIM_INFINITY or least < allowed)
        last = least + 1 if later else least
        resource.setrlimit(kind, (least, last))


_PLACE = "/tmp"
"""Where the new root is assembled; visible only to this process."""
_OLD = "/.old"


def leave_namespaces(*, user: bool) -> None:
    """Create new ones of every kind; the next child is the first process in its PID namespace."""
    flags = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET
    flags |= CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    if not user:
        unshare(flags)
        return
    uid, gid = os.geteuid(), os.getegid()
    unshare(flags | CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"65534 {uid} 1")
    _write("/proc/self/gid_map", f"65534 {gid} 1")


def build_root(
    views: list[list[str]], *, folder: str, owner: int | None, size: int, files: int, shared: bool = False
) -> None:
    """Switch to the new root. The working folder is `folder`, empty. `shared` lets several users create their
    own folders in it.
    """
    mount("", "/", flags=MS_REC | MS_PRIVATE)
    fixed = MS_NOSUID | MS_NODEV
    mount("tmpfs", _PLACE, kind="tmpfs", flags=fixed, options="mode=0755,size=1m")
    os.mkdir(_PLACE + _OLD)
    pivot_root(_PLACE, _PLACE + _OLD)
    os.chdir("/")
    for kind, source, target in views:
        _add_view(kind, source, target)
    os.makedirs(folder, exist_ok=True)
    owned = f",uid={owner},gid={owner}" if owner is not None else ""
    room = f"mode={'1777' if shared else '0700'},size={size},nr_inodes={files}{owned}"
    mount("tmpfs", folder, kind="tmpfs", flags=fixed, options=room)
    unmount(_OLD)
    os.rmdir(_OLD)
    mount("", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | fixed)
    os.chdir(folder)


def bound_folder(folder: str, *, size: int, files: int) -> None:
    """A file system mounted by another process, limited to this many files."""
    flags = MS_REMOUNT | MS_NOSUID | MS_NODEV
    mount("tmpfs", folder, flags=flags, options=f"size={size},nr_inodes={files}")


def hide_host_name() -> None:
    """Use a separate UTS namespace, which starts with the names of the machine."""
    check(libc.sethostname(b"box", 3), "sethostname")
    check(libc.setdomainname(b"(none)", 6), "setdomainname")


def _add_view(kind: str, source: str, target: str) -> None:
    if kind == "link":
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source, target)
        return
    if kind == "empty":
        options = "mode=0755,size=4k,nr_inodes=2"
        mount("tmpfs", target, kind="tmpfs", flags=MS_RDONLY, options=options)
        return
    if kind == "folder":
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
    if kind == "device":
        mount(_OLD + source, target, flags=MS_BIND)
    else:
        bind_read_only(_OLD + source, target)


def _write(path: str, text: str) -> None:
    opened = os.open(path, os.O_WRONLY)
    try:
        os.write(opened, text.encode())
    finally:
        os.close(opened)


_BLOCK = 512


def measure_folder(folder: str, *, most_files: int) -> tuple[int, int]:
    """The number of files, folders and links below it, and the bytes that they occupy. Stops counting beyond
    `most_files`. A folder nested deeper than a path can name counts as beyond it, since its content could not
    be seen.
    """
    files = size = 0
    waiting = [folder]
    while waiting and files <= most_files:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > most_files:
                        break
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            # Removed or replaced since it was listed; or shut for us, who are the same user (`off`).
            continue
        except OSError:
            return most_files + 1, size
    return files, size


def measure_deleted(processes: Iterable[int]) -> int:
    """The bytes of files that were deleted while one of these processes has them open."""
    sizes: dict[tuple[int, int], int] = {}
    for process in processes:
        opened = f"/proc/{process}/fd"
        try:
            numbers = os.listdir(opened)
        except OSError:
            continue
        for number in numbers:
            try:
                state = os.stat(f"{opened}/{number}")
            except OSError:
                continue
            if state.st_nlink == 0:
                sizes[state.st_dev, state.st_ino] = state.st_blocks * _BLOCK
    return sum(sizes.values())


def remove_folder(folder: str) -> None:
    """Remove all of it. Nested content is moved up first, so that no path grows long and nothing recurses."""
    moved = 0
    while names := os.listdir(folder):
        for name in names:
            path = os.path.join(folder, name)
            if not _is_folder(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for inner in os.listdir(path):
                below = os.path.join(path, inner)
                if _is_folder(below):
                    # A folder that moves is written to: its entry `..` changes.
                    os.chmod(below, 0o700)
                moved += 1
                while os.path.lexists(target := os.path.join(folder, f"{moved:x}")):
                    moved += 1
                os.rename(below, target)
            os.rmdir(path)
    os.rmdir(folder)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)
