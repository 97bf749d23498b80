"""What was read of each log last time: a log that has only grown since is cut from its last block on.

In: the blocks that were cut from a file. Out: those of a file that still begins with the same bytes, by their
hash. Only plain JSON lines are kept. A missing or damaged file only costs time.
"""

import hashlib
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from graftwork.data.ingest.blocks import CHUNK, LogBlock
from graftwork.files.disk import write_atomic
from graftwork.records.base import fingerprint

KNOWN_LOGS = "logs.json"
LEAST_BYTES = 1 << 16
"""The format of a file is recognized by this many of its first bytes: a smaller file is read as a whole."""


class KnownBlock(NamedTuple):
    """The name of its features, its first line, and its first byte in the file."""

    features: str
    first_line: int
    start: int


class KnownLog(NamedTuple):
    size: int
    sha256: str
    blocks: list[KnownBlock]

    @property
    def last_bytes(self) -> int:
        return self.size - self.blocks[-1].start


class GrownLog(NamedTuple):
    """A log as it was, and the hash of its file as it is now."""

    before: KnownLog
    sha256: str


class KnownLogs:
    """The logs of the last run. `inputs` is everything else that blocks and features depend on."""

    def __init__(self, folder: Path, *, inputs: Sequence[Any]) -> None:
        self._path = folder / KNOWN_LOGS
        self._inputs = fingerprint(list(inputs))
        self._read = _read_known(self._path, self._inputs)
        self._next: dict[str, KnownLog] = {}

    def find_grown(self, name: str, path: Path) -> GrownLog | None:
        """The log of this name, if its file still begins with what was read last time."""
        known = self._read.get(name)
        if known is None or not path.is_file():
            return None
        try:
            with path.open("rb") as file:
                digest = hashlib.sha256()
                _update(digest, file, known.size)
                if digest.hexdigest() != known.sha256:
                    return None
                _update(digest, file, None)
        except OSError:
            # Reading it as a whole explains why that is not possible.
            return None
        return GrownLog(known, digest.hexdigest())

    def add(self, name: str, *, sha256: str, blocks: Iterable[KnownBlock], size: int) -> None:
        """Remember a log of plain lines for the next run."""
        if size >= LEAST_BYTES:
            self._next[name] = KnownLog(size, sha256, list(blocks))

    def save(self) -> None:
        logs = {
            name: [log.size, log.sha256, *chain.from_iterable(log.blocks)] for name, log in self._next.items()
        }
        body = {"inputs": self._inputs, "logs": logs, "check": fingerprint([self._inputs, logs])}
        write_atomic(self._path, orjson.dumps(body), durable=False)


def _update(digest: "hashlib._Hash", file: IO[bytes], size: int | None) -> None:
    """Hash so many bytes of the file, or all that are left."""
    while chunk := file.read(CHUNK if size is None else min(CHUNK, size)):
        digest.update(chunk)
        size = None if size is None else size - len(chunk)


def is_plain(block: LogBlock) -> bool:
    """Whether the block may be a part of the file, byte by byte."""
    return block.offsets is None and not block.faults and block.transcript is None


def _read_known(path: Path, inputs: str) -> dict[str, KnownLog]:
    try:
        body = orjson.loads(path.read_bytes())
        logs = body["logs"]
        if body["inputs"] != inputs or body["check"] != fingerprint([inputs, logs]):
            return {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {
        name: KnownLog(size, sha256, [KnownBlock(*parts[at : at + 3]) for at in range(0, len(parts), 3)])
        for name, (size, sha256, *parts) in logs.items()
    }
