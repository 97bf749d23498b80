"""How many bytes of a long piece of work are done: told to whoever listens.

In: files that are read, copied or sent. Out: the same work, and `phase, done, total` in bytes after each
piece. Does not know how long it will take, nor who listens.
"""

import hashlib
import io
import threading
from collections.abc import Callable
from pathlib import Path

from graftwork.files.disk import create_file
from graftwork.records.units import MIB

ProgressCallback = Callable[[str, int, int], None]
"""Is told the phase, the bytes that are done, and all there are."""

CHUNK_BYTES = MIB


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """Listens to nothing."""


class ProgressCounter:
    """The bytes of one phase. Threads may share it. What is counted twice does not go beyond the total."""

    def __init__(self, tell: ProgressCallback, phase: str, total: int) -> None:
        self._tell, self._phase, self._total = tell, phase, total
        self._done = 0
        self._lock = threading.Lock()
        tell(phase, 0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            self._tell(self._phase, self._done, self._total)

    def reach(self, done: int) -> None:
        """So many are done in all; what was told before is not taken back."""
        with self._lock:
            self._done = min(max(self._done, done), self._total)
            self._tell(self._phase, self._done, self._total)

    def finish(self) -> None:
        """Also what did not have to be done counts as done."""
        self.reach(self._total)


class ProgressReader(io.BufferedReader):
    """A file whose reading is counted from `begin` on: each byte once, however often it is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("rb", buffering=0), CHUNK_BYTES)
        self._count: ProgressCounter | None = None
        self._furthest = 0

    def begin(self, count: ProgressCounter) -> None:
        self._count = count

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._count is not None and (here := self.tell()) > self._furthest:
            self._count.add(here - self._furthest)
            self._furthest = here
        return data


def digest_with_progress(path: Path, count: ProgressCounter) -> str:
    """The sha256 of a file, told piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        while piece := handle.read(CHUNK_BYTES):
            digest.update(piece)
            count.add(len(piece))
    return digest.hexdigest()


def copy_with_progress(source: Path, target: Path, count: ProgressCounter) -> None:
    """A new file with the same bytes, told piece by piece."""
    with source.open("rb", buffering=0) as original, create_file(target) as copy:
        while piece := original.read(CHUNK_BYTES):
            copy.write(piece)
            count.add(len(piece))
