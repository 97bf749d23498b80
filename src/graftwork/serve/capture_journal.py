"""What outlives a killed endpoint: redacted captures that the store has not taken yet, and counts of all.

In: captures, when the store is slow or fails. Out: the same captures page by page, when it works again, also
for the next process. The counts are in a small file that is mapped into memory: the kernel keeps it when the
process is killed, so the next one knows how many exchanges were lost. A power cut may cost both.
"""

import logging
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import make_folder, require_lock
from graftwork.records.base import Record
from graftwork.records.interaction import Capture

log = logging.getLogger(__name__)

JOURNAL_FILE, COUNTS_FILE = "captures.journal", "captures.counts"
_MAGIC = b"graftcc1"
_FIELDS = ("expected", "offered", "kept", "dropped", "lost", "journaled", "killed")
_NUMBER = struct.Struct("<Q")
_PAGE_BYTES = 1 << 20
_PLACES = {field: len(_MAGIC) + _NUMBER.size * place for place, field in enumerate(_FIELDS)}
_SIZE = len(_MAGIC) + _NUMBER.size * len(_FIELDS)


class CaptureTotals(Record):
    """What became of all exchanges that this project's endpoints were to capture."""

    expected: int = 0
    """Those whose answer has begun."""
    offered: int = 0
    """Those whose answer has ended."""
    kept: int = 0
    dropped: int = 0
    """The queue was full."""
    lost: int = 0
    """The store and the journal failed, or the endpoint was killed."""
    journaled: int = 0
    """On disk, waiting for the store."""
    killed: int = 0
    """Those of the lost ones that a killed endpoint had not written yet."""

    @property
    def under_way(self) -> int:
        return self.expected - self.kept - self.dropped - self.lost - self.journaled


class CaptureCounts:
    """The counts of this process, and the totals in a file. Each field has one thread that writes it."""

    def __init__(self, folder: Path | None = None) -> None:
        self._values = dict.fromkeys(_FIELDS, 0)
        self._start = dict.fromkeys(_FIELDS, 0)
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        self._file: int | None = None
        if folder is None:
            return
        make_folder(folder)
        file = os.open(folder / COUNTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            require_lock(file, "another endpoint of the project counts here")
            data = os.pread(file, _SIZE, 0)
            totals = _parse(data) or CaptureTotals()
            if _parse(data) is None:
                # Written and synced before it is mapped: the disk has the room then, whatever fills it later.
                os.pwrite(file, _MAGIC + bytes(_SIZE - len(_MAGIC)), 0)
                os.fsync(file)
            self._memory = mmap.mmap(file, _SIZE)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._start = totals.model_dump()

    def __getitem__(self, field: str) -> int:
        return self._values[field]

    def add(self, field: str, count: int = 1) -> None:
        value = self._values[field] = self._values[field] + count
        _NUMBER.pack_into(self._memory, _PLACES[field], self._start[field] + value)

    def settle_past(self, *, journaled: int) -> int:
        """Count what the last process had not written when it ended as lost; returns how many."""
        self.add("journaled", journaled - self._start["journaled"])
        missing = CaptureTotals(**{**self._start, "journaled": journaled}).under_way
        if missing > 0:
            self.add("killed", missing)
            self._start["lost"] += missing  # not a loss of this process
            self.add("lost", 0)
        return max(missing, 0)

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
            self._memory = bytearray(_SIZE)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_totals(folder: Path) -> CaptureTotals | None:
    """The totals as any process may read them; None where no endpoint has counted yet."""
    try:
        data = (folder / COUNTS_FILE).read_bytes()
    except OSError:
        return None
    return _parse(data)


def _parse(data: bytes) -> CaptureTotals | None:
    if len(data) < _SIZE or not data.startswith(_MAGIC):
        return None
    numbers = struct.unpack_from(f"<{len(_FIELDS)}Q", data, len(_MAGIC))
    return CaptureTotals(**dict(zip(_FIELDS, numbers, strict=True)))


class CaptureJournal:
    """A file of captures, one a line. Used by one thread."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._path = folder / JOURNAL_FILE
        self._most_bytes = most_bytes
        self._page = 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        data = b"" if size == 0 else os.pread(self._file, size, 0)
        self._end = data.rfind(b"\n") + 1
        # What the last process had taken out was blanked: counting it again would hide a loss.
        self._read_to = self._end - len(data[: self._end].lstrip(b" "))
        self.waiting = data.count(b"\n")
        """Lines that were not read yet."""
        if self._end != len(data):
            os.ftruncate(self._file, self._end)  # the last line was cut off when the process was killed

    def append(self, captures: Iterable[Capture]) -> bool:
        """False, and nothing is written, where the journal or the disk is full."""
        data = "".join(capture.to_journal() + "\n" for capture in captures).encode(errors="replace")
        if self._end - self._read_to + len(data) > self._most_bytes:
            return False
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError as error:
            log.warning("captures: the journal cannot be written: %s", error.strerror)
            self._cut()
            return False
        self._end += len(data)
        self.waiting += data.count(b"\n")
        return True

    def read(self, most: int) -> tuple[list[Capture], int]:
        """The next captures and how many lines they took, at most `most`; `advance` takes them out."""
        size, data = _PAGE_BYTES, b""
        while b"\n" not in data and self.waiting:
            data = os.pread(self._file, min(size, self._end - self._read_to), self._read_to)
            size *= 2
        lines = data.split(b"\n")[:-1][:most]
        self._page = sum(len(line) + 1 for line in lines)
        captures = []
        for line in lines:
            try:
                captures.append(Capture.model_validate_json(line))
            except ValidationError:
                log.warning("captures: a line of the journal cannot be read")
        return captures, len(lines)

    def advance(self, lines: int) -> None:
        """Take out what `read` gave last."""
        try:
            os.pwrite(self._file, b" " * self._page, self._read_to)
        except OSError as error:
            log.warning("captures: the journal cannot be written: %s", error.strerror)
        self._read_to += self._page
        self.waiting -= lines
        if self.waiting == 0:
            self._read_to = self._end = 0
            self._cut()

    def _cut(self) -> None:
        try:
            os.ftruncate(self._file, self._end)
        except OSError as error:
            log.warning("captures: the journal cannot be shortened: %s", error.strerror)

    def close(self) -> None:
        os.close(self._file)
