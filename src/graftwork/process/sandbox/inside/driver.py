"""Runs the code, in a process that can no longer do harm.

In, over a socket: one message with the source, its files and what to do with it. Then, for code that
is tested, a second message once the code has been loaded: the tests and a nonce. Out: the exit code, and
the nonce sent back when every test has run. Until the code has been loaded the nonce is not in the box at
all: whoever leaves early, however cleanly, has not got it.
"""

# pathlib takes longer to load than everything else here together.
# ruff: noqa: PTH103, PTH118, PTH120, PTH123

from __future__ import annotations

import marshal
import os
import struct
import sys
import types

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_HEAD = struct.Struct("!I")
READY = b"ready"
COMPILED = b"compiled"


def run_code(channel: int, *, folder: str, search: list[str]) -> int:
    """The exit code. Leaves through an exception where the code raises one."""
    task = marshal.loads(_receive(channel))
    _write_files(task["files"], folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "graftwork"]:
        del sys.modules[name]
    sys.path[:] = [folder, *sys.path, *search]
    sys.argv[:] = [task["name"]]
    if task["action"] == "compile":
        compile(task["source"], task["name"], "exec", dont_inherit=True)
        _send(channel, COMPILED)
        return 0
    if task["action"] == "test":
        _run_tested(channel, task)
    os.close(channel)
    exec(compile(task["source"], task["name"], "exec", dont_inherit=True), _module("__main__"))
    return 0


def _run_tested(channel: int, task: dict[str, Any]) -> NoReturn:
    """Load the answer, then fetch the tests, run them in its names, and send the nonce back."""
    # The code may put its own functions in the place of anything: what is needed later is held now.
    receive, send, leave = _bind(_receive), _bind(_send), os._exit
    load, translate, run = marshal.loads, compile, exec
    names = _module("answer")
    run(translate(task["source"], "answer.py", "exec", dont_inherit=True), names)
    sys.settrace(None)
    sys.setprofile(None)
    send(channel, READY)
    second = load(receive(channel))
    run(translate(second["tests"], "tests.py", "exec", dont_inherit=True), names)
    send(channel, second["nonce"].encode())
    sys.stdout.flush()
    leave(0)


def _bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with globals of its own, which the code does not reach by importing a module."""
    frozen = {"os": types.SimpleNamespace(**vars(os)), "_HEAD": _HEAD, "EOFError": EOFError, "len": len}
    return types.FunctionType(function.__code__, frozen, function.__name__)


def _module(name: str) -> dict[str, Any]:
    """A module that the code runs in, so that dataclasses and the like find it by its name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return vars(module)


def _write_files(files: dict[str, str], folder: str) -> None:
    for name, text in files.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)


def _receive(channel: int) -> bytes:
    wanted, parts = 4, b""
    while len(parts) < wanted:
        piece = os.read(channel, wanted - len(parts))
        if not piece:
            raise EOFError
        parts += piece
    wanted, parts = _HEAD.unpack(parts)[0], b""
    while len(parts) < wanted:
        piece = os.read(channel, wanted - len(parts))
        if not piece:
            raise EOFError
        parts += piece
    return parts


def _send(channel: int, message: bytes) -> None:
    os.write(channel, _HEAD.pack(len(message)) + message)
