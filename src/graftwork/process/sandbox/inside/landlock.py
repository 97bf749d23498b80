"""Files shut by rules of the kernel (Landlock), for containers that may make no namespaces.

In: the folders that may be read, the one that may be written. Out: the rules in place, for this process
and all its children. Needs Linux 5.13 and no privilege. Covers files alone: sockets are refused by the
filter, other processes by a user number that nobody else has.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH112

import ctypes
import os
import struct

from graftwork.process.sandbox.inside import kernel

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_ALL_BY_VERSION = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF}
_ALL_NOW = 0xFFFF
"""From version 5 on also ioctl on devices."""


def write_rules(*, readable: list[str], devices: list[str], writable: str) -> int:
    """The rules, opened and not yet in force: who has given up root may not find all these paths."""
    version = kernel.check(kernel.libc.syscall(_CREATE, None, ctypes.c_size_t(0), 1), "landlock")
    everything = _ALL_BY_VERSION.get(version, _ALL_NOW)
    handled = struct.pack("Q", everything)
    rules = kernel.check(kernel.libc.syscall(_CREATE, handled, ctypes.c_size_t(8), 0), "landlock")
    for path in readable:
        rights = _READ_FILE | _EXECUTE | (_READ_DIR if os.path.isdir(path) else 0)
        _allow(rules, path, rights)
    for path in devices:
        _allow(rules, path, _READ_FILE | _WRITE_FILE)
    _allow(rules, writable, everything & ~_EXECUTE)
    return rules


def shut_files(rules: int) -> None:
    """From here on and for ever. `no_new_privileges` must come first."""
    kernel.check(kernel.libc.syscall(_RESTRICT, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, opened)
        kernel.check(kernel.libc.syscall(_ADD, rules, _PATH_BENEATH, rule, 0), f"landlock {path}")
    finally:
        os.close(opened)
