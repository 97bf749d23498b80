"""Which system calls the code may not make: a filter that the kernel applies to it and all its children.

In: the machine's architecture. Out: the filter in place, or False where the architecture is not known
here. It refuses what the box's walls do not cover (sockets of a kind that no namespace holds, memory
that no limit counts), and what has harmed kernels before.
"""

import ctypes
import errno
import os
import struct

from graftwork.process.sandbox.inside import kernel

# Name: the number on x86_64, on aarch64; None where it does not exist.
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
"""A second numbering of the calls on x86_64; nobody uses it but to get past filters."""

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
    """From here on and for ever. `no_new_privileges` must come first."""
    program = build_filter(os.uname().machine)
    if program is None:
        return False
    steps = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps))
    kernel.check(kernel.libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0), "seccomp")
    return True


def _step(code: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    """One instruction; `yes` and `no` say how many to skip after a comparison."""
    return struct.pack("HBBI", code, yes, no, value)


def _refuse_if(comparison: bytes, error: int) -> tuple[bytes, bytes]:
    return comparison, _step(_RETURN, _ERRNO | error)
