"""Progress of long transfers in bytes: files that are read, copied or hashed report what is done."""

import hashlib
import io
import threading
from collections.abc import Callable
from pathlib import Path

from graftwork.files.disk import create_file
from graftwork.records.units import MIB

ProgressCallback = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the total."""

CHUNK_BYTES = MIB


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """Report nothing."""


class ProgressCounter:
    """The bytes of one phase. Thread-safe. Never reports more than the total."""

    def __init__(self, report: ProgressCallback, phase: str, total: int) -> None:
        self._report, self._phase, self._total = report, phase, total
        self._done = 0
        self._lock = threading.Lock()
        report(phase, 0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            self._report(self._phase, self._done, self._total)

    def reach(self, done: int) -> None:
        """Set the number of bytes done. It never goes back."""
        with self._lock:
            self._done = min(max(self._done, done), self._total)
            self._report(self._phase, self._done, self._total)

    def finish(self) -> None:
        """Count what did not have to be done as done."""
        self.reach(self._total)


class ProgressReader(io.BufferedReader):
    """A file that counts the bytes read from `begin` on, each byte once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("rb", buffering=0), CHUNK_BYTES)
        self._counter: ProgressCounter | None = None
        self._furthest = 0

    def begin(self, counter: ProgressCounter) -> None:
        self._counter = counter

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._counter is not None and (here := self.tell()) > self._furthest:
            self._counter.add(here - self._furthest)
            self._furthest = here
        return data


def digest_with_progress(path: Path, counter: ProgressCounter) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
            counter.add(len(chunk))
    return digest.hexdigest()


def copy_with_progress(source: Path, target: Path, counter: ProgressCounter) -> None:
    with source.open("rb", buffering=0) as original, create_file(target) as copy:
        while chunk := original.read(CHUNK_BYTES):
            copy.write(chunk)
            counter.add(len(chunk))
