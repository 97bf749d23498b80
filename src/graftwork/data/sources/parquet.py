"""Parquet: each row as a JSON object, its number as the line.

In: the path of a file, since the format is read from its end. Out: entries and flaws. Decoding happens in a
process of its own with bounded memory (`parquet_child`). Does not know what a column means.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from graftwork.data.sources import parquet_child as child
from graftwork.data.sources.block import Entry
from graftwork.data.sources.fault import FaultCode, Flaw, name_size, too_long
from graftwork.data.sources.stream import ALWAYS_UNPACKED, MOST_GROWTH
from graftwork.process.memory import machine_memory
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.units import GIB

MAGIC = b"PAR1"
_LEAST_MEMORY = 512 << 20
_MEMORY_A_BYTE = 64
"""Decoding may take so many times the size of the file on top, and half of the machine at most. A page must
be decoded whole, and writers put up to a thousand rows into one."""

_SAID: dict[bytes, tuple[FaultCode, str]] = {
    child.BAD_TEXT: ("encoding", "a value of the row is no UTF-8, or beyond what can be read"),
    child.BAD_VALUE: ("schema", "the row holds a value that is neither text, number, list nor object"),
    child.TOO_MUCH: ("parse_error", f"the file unpacks to more than {MOST_GROWTH:,} times its size"),
    child.DAMAGED: ("parse_error", "the file is no sound Parquet from here on"),
}


def split_parquet(path: Path, *, longest: int) -> Iterator[Entry | Flaw]:
    size = path.stat().st_size
    memory = _LEAST_MEMORY + _MEMORY_A_BYTE * size
    machine = machine_memory().get("limit")
    if machine is not None:
        memory = min(memory, max(_LEAST_MEMORY, int(machine * GIB / 2)))
    figures = (longest, memory, ALWAYS_UNPACKED + MOST_GROWTH * size)
    # -P: a module of that name in the working folder is not ours.
    command = [sys.executable, "-P", "-m", child.__name__, str(path), *map(str, figures)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            # The other allocators set more addresses aside than they use, and addresses are limited.
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MALLOC_ARENA_MAX": "1",
            # Large blocks go back to the system when they are freed, instead of into pieces.
            "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
            "OMP_NUM_THREADS": "1",
        },
    ) as process:
        assert process.stdout is not None
        try:
            yield from _read_frames(process.stdout, memory=memory, longest=longest)
        finally:
            process.kill()


def _read_frames(source: IO[bytes], *, memory: int, longest: int) -> Iterator[Entry | Flaw]:
    number = 0
    while len(head := source.read(child.HEAD.size)) == child.HEAD.size:
        kind, number, length = child.HEAD.unpack(head)
        if kind == child.END:
            return
        data = source.read(length)
        if kind == child.ROW and len(data) == length:
            yield Entry(number, data)
        elif len(data) == length:
            yield _explain(kind, number, data, memory=memory, longest=longest)
    yield Flaw(
        number + 1,
        "parse_error",
        f"the file cannot be decoded from here on: it is damaged, or takes more than {name_size(memory)}",
    )


def _explain(kind: bytes, number: int, data: bytes, *, memory: int, longest: int) -> Flaw:
    if kind in _SAID:
        return Flaw(number, *_SAID[kind])
    if kind == child.LONG_ROW:
        return too_long(number, int(data), longest=longest)
    if kind == child.TOO_MANY_ROWS:
        return Flaw(number, "parse_error", f"the file claims {int(data):,} rows, more than its size can hold")
    what = "row" if kind == child.LARGE_ROW else "file from here on"
    text = f"decoding the {what} takes more than {name_size(memory)}"
    return Flaw(number, "parse_error", f"{text}; write it with smaller rows, pages and row groups")
