"""How much memory a process and everything below it use now.

In: the number of a process. Out: bytes. Processes forked from one another share pages: those are counted
once where that would change the answer. Linux; elsewhere, and where a process has just ended, 0.
"""

import os
import re
import selectors
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from graftwork.files.disk import read_or_empty
from graftwork.process.sandbox.inside.folder import measure_deleted, measure_folder
from graftwork.process.sandbox.settings import Limits, Reason

_PAGE = 4096
_PROC = Path("/proc")


def memory_of_tree(root: int, *, most: int) -> int:
    """At most a quick look; only when it seems to be more than `most`, the exact one."""
    tree = processes_below(root)
    resident = sum(_resident(number) for number in tree)
    return resident if resident <= most else sum(_proportional(number) for number in tree)


def processes_below(root: int) -> list[int]:
    """Orphans included: the first process of a box adopts them."""
    found: list[int] = []
    waiting = [root]
    while waiting:
        number = waiting.pop()
        found.append(number)
        for thread in _threads(number):
            waiting += [int(child) for child in read_or_empty(thread / "children").split()]
    return found[1:]


def _threads(number: int) -> list[Path]:
    try:
        return list((_PROC / str(number) / "task").iterdir())
    except OSError:
        return []


def _resident(number: int) -> int:
    parts = read_or_empty(_PROC / str(number) / "statm").split()
    return int(parts[1]) * _PAGE if len(parts) > 1 else 0


def _proportional(number: int) -> int:
    """Shared pages divided by those who share them; everything where that may not be read."""
    found = re.search(r"^Pss:\s+(\d+) kB", read_or_empty(_PROC / str(number) / "smaps_rollup"), re.M)
    return int(found[1]) * 1024 if found else _resident(number)


_HEAD = struct.Struct("!I")
_LONGEST_REPLY = 256
"""What the sandbox may send over the channel: a keyword or a nonce."""
_MOST_MESSAGES = 8
"""The protocol has two. A far side that sends more than these floods us, and is ended."""
_LONGEST_STATUS = 65536
_LOOK_EVERY = 0.05


@dataclass
class Talk:
    """The messages so far. `asked` is called with each message of the sandbox and may return an answer."""

    channel: socket.socket
    asked: Callable[[bytes], bytes | None]
    outgoing: bytearray = field(default_factory=bytearray)
    incoming: bytearray = field(default_factory=bytearray)
    heard: dict[str, bytearray] = field(default_factory=dict)
    messages: int = 0
    reason: Reason = ""
    peak_bytes: int = 0


def frame(message: bytes) -> bytes:
    return _HEAD.pack(len(message)) + message


def follow(
    talk: Talk,
    process: int,
    *,
    pipes: dict[str, int],
    deadline: float,
    limits: Limits,
    folder: str | None = None,
) -> None:
    """Until every pipe has ended, or a limit is reached: then `talk.reason` says which.

    `folder` is the code's own where no file system bounds it: it is measured from out here.
    """
    talk.heard = {name: bytearray() for name in pipes}
    talk.channel.setblocking(False)
    with selectors.DefaultSelector() as selector:
        for name, number in pipes.items():
            selector.register(number, selectors.EVENT_READ, name)
        selector.register(talk.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, "channel")
        next_look = time.monotonic() + _LOOK_EVERY
        while any(key.data != "channel" for key in selector.get_map().values()):
            now = time.monotonic()
            if now >= deadline:
                talk.reason = "wall_clock"
                return
            if now >= next_look:
                _look(talk, process, limits=limits, folder=folder)
                if talk.reason:
                    return
                next_look = time.monotonic() + _LOOK_EVERY
            for key, events in selector.select(timeout=max(0.0, min(deadline, next_look) - now)):
                if key.data == "channel":
                    _converse(talk, selector, events)
                elif not _read_pipe(talk, key, limits.output_bytes):
                    selector.unregister(key.fileobj)
            if talk.reason:
                return


def _look(talk: Talk, process: int, *, limits: Limits, folder: str | None) -> None:
    """What no limit of the kernel counts: memory of all processes together, files without a file system."""
    used = memory_of_tree(process, most=limits.memory_bytes)
    talk.peak_bytes = max(talk.peak_bytes, used)
    if used > limits.memory_bytes:
        talk.reason = "memory"
    elif folder is not None:
        files, size = measure_folder(folder, most_files=limits.files)
        if files > limits.files or size + measure_deleted(processes_below(process)) > limits.disk_bytes:
            talk.reason = "disk"


def _read_pipe(talk: Talk, key: selectors.SelectorKey, most: int) -> bool:
    heard = talk.heard[key.data]
    if key.data == "status":
        # Written by ours alone, and short.
        most = _LONGEST_STATUS
    piece = os.read(key.fd, 65536)
    heard += piece
    if len(heard) > most:
        del heard[most:]
        talk.reason = "output"
    return bool(piece)


def _converse(talk: Talk, selector: selectors.BaseSelector, events: int) -> None:
    try:
        if events & selectors.EVENT_WRITE and talk.outgoing:
            del talk.outgoing[: talk.channel.send(talk.outgoing)]
        if events & selectors.EVENT_READ:
            piece = talk.channel.recv(4096)
            talk.incoming += piece
            if not piece or not _take_messages(talk):
                selector.unregister(talk.channel)
                return
    except (ConnectionError, BrokenPipeError):
        selector.unregister(talk.channel)
        return
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if talk.outgoing else 0)
    selector.modify(talk.channel, wanted, "channel")


def _take_messages(talk: Talk) -> bool:
    """False where the far side does not keep to the form: it is not listened to any more."""
    while len(talk.incoming) >= _HEAD.size:
        if talk.messages == _MOST_MESSAGES:
            talk.reason = "messages"
            return False
        length = _HEAD.unpack_from(talk.incoming)[0]
        if length > _LONGEST_REPLY:
            return False
        if len(talk.incoming) < _HEAD.size + length:
            return True
        message = bytes(talk.incoming[_HEAD.size : _HEAD.size + length])
        del talk.incoming[: _HEAD.size + length]
        talk.messages += 1
        answer = talk.asked(message)
        if answer is not None:
            talk.outgoing += frame(answer)
    return True
