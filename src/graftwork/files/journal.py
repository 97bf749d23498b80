"""An append-only file of JSON lines that survives a kill in the middle of a line.

In: JSON values. Out: the same values, in order, without the torn last line that a killed writer
may have left. One writer at a time; any number of readers.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graftwork.files.private import append_to, make_folder
from graftwork.files.whole import explain_os_error


class Journal:
    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, value: Any, *, durable: bool = False) -> None:
        """Add one line. `durable` waits until it is on the disk."""
        line = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            make_folder(self.path.parent)
            with append_to(self.path) as handle:
                if handle.tell() and not self._ends_whole():
                    handle.write(b"\n")
                handle.write(line)
                if durable:
                    handle.flush()
                    os.fsync(handle.fileno())
        except OSError as error:
            raise explain_os_error(error, self.path) from error

    def read(self) -> list[Any]:
        return [value for value, _ in self.follow(0)]

    def follow(self, offset: int) -> Iterator[tuple[Any, int]]:
        """Yield the whole lines from `offset` on, each with the offset behind it."""
        if not self.path.exists():
            return
        with self.path.open("rb") as handle:
            handle.seek(offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                try:
                    yield json.loads(line), offset
                except ValueError:
                    # A torn line that a killed writer left and a later one closed.
                    continue

    def _ends_whole(self) -> bool:
        with self.path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) == b"\n"
