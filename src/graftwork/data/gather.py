"""Logs to a corpus: every block sifted, on all cores, or taken as it was sifted before.

In: the settings, what is known of the base model, and a folder to keep sifted blocks in. Out: the
corpus. An interrupted run loses only the blocks in work. Does not know what becomes of the rows.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from graftwork.data.captures import NEGATIVE
from graftwork.data.corpus import Corpus, read_head, read_table
from graftwork.data.ports import Progress
from graftwork.data.rules.note import Sight
from graftwork.data.sift import SiftTask, digest_file, is_sifted, name_sifted, sift_block
from graftwork.data.sight import BlockNow, Keys, arrange
from graftwork.data.sources.blocks import cut_blocks
from graftwork.data.sources.find import find_sources
from graftwork.files.disk import file_digest, make_folder, write_atomic
from graftwork.process.pool import work_in_order
from graftwork.records.dataset import InputFile
from graftwork.records.errors import UserMistake

ORDER = "order.bin"
"""The hash of every line, in the order of sight: 8 bytes a row."""

BLOCK_BYTES = 4 << 20

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """A block without its bytes."""

    file: str
    block: int
    first_line: int
    sifted: str


def gather(
    sight: Sight, *, folder: Path, root: Path = Path(), on_progress: Progress, processes: int | None = None
) -> Corpus:
    """Sift what is new and put all rows into their order of sight."""
    names = find_sources(sight.settings.logs, root=root)
    make_folder(folder)
    reading = _Reading(names, root=root, folder=folder, sight=sight, report=on_progress)
    for size in work_in_order(reading.new_tasks(), sift_block, processes=processes):
        reading.done(size)
    records: Counter[str] = Counter()
    for found in reading.found:
        # One by one: a head holds every line of its block that could not be read.
        records[found.file] += read_head(folder / found.sifted).records
    blocks = [
        BlockNow(
            file=found.file,
            block=found.block,
            first_line=found.first_line,
            sifted=found.sifted,
            keys=_read_keys(folder / found.sifted),
        )
        for found in reading.found
    ]
    seen = arrange(blocks, _read_order(folder / ORDER))
    write_atomic(folder / ORDER, seen.keys.tobytes())
    _forget_others(folder, keep={block.sifted for block in blocks})
    inputs = [
        InputFile(file=file, sha256=sha256, rows=records[file]) for file, sha256 in reading.hashes.items()
    ]
    corpus = Corpus(folder, segments=seen.segments, inputs=inputs)
    corpus.withdraw(_find_disputed(corpus))
    return corpus


def _find_disputed(corpus: Corpus) -> dict[int, str]:
    """Captures that were exported before users said that they are bad, and again after that."""
    captures = corpus.column("capture")
    if not captures.any():
        return {}
    faults = corpus.labels("fault")
    bad = np.isin(faults.numbers, [n for n, name in enumerate(faults.names) if name == NEGATIVE])
    again = np.isin(captures, captures[bad & (captures != 0)]) & corpus.column("passed").astype(bool)
    again &= corpus.column("unconfirmed") != 0
    reason = f"{NEGATIVE}: another row of the logs says that users called this reply bad"
    return dict.fromkeys(np.flatnonzero(again).tolist(), reason)


class _Reading:
    """Walks through the files once: hashes them, and hands out the blocks that were not sifted yet."""

    def __init__(
        self, names: tuple[str, ...], *, root: Path, folder: Path, sight: Sight, report: Progress
    ) -> None:
        self.found: list[_Found] = []
        self.hashes: dict[str, str] = {}
        self._names = _leave_out_empty(names, root=root)
        self._root, self._folder, self._sight = root, folder, sight
        self._report = report
        self._total = sum(_size_of(root / name) for name in names)
        self._done = 0

    def new_tasks(self) -> Iterator[SiftTask]:
        for name in self._names:
            keys = hashlib.sha256()
            for block in cut_blocks(name, root=self._root, size=BLOCK_BYTES):
                keys.update(block.key.encode())
                sifted = name_sifted(block, sight=self._sight)
                self.found.append(_Found(block.file, block.index, block.first_line, sifted))
                out = self._folder / sifted
                if is_sifted(out):
                    self.done(len(block.data))
                else:
                    yield SiftTask(block=block, out=out, sight=self._sight)
            # Standard input can be read only once: it goes by the hash of its blocks, and by their name.
            path = self._root / name
            known_as = self.found[-1].file if self.found else name
            self.hashes[known_as] = file_digest(path) if path.is_file() else keys.hexdigest()
        if not self.found:
            raise UserMistake("the logs hold no rows", fix="name other files under data.logs")

    def done(self, size: int) -> None:
        self._done += size
        self._report("read and sift", self._done, max(self._total, self._done))


def _leave_out_empty(names: tuple[str, ...], *, root: Path) -> tuple[str, ...]:
    """A log that was rotated a moment ago has no rows yet; only if all are so is that a mistake."""
    empty = {name for name in names if (root / name).is_file() and not (root / name).stat().st_size}
    if not empty or len(empty) == len(names):
        return names
    log.warning("empty, left out: %s", ", ".join(sorted(empty)))
    return tuple(name for name in names if name not in empty)


def _size_of(path: Path) -> int:
    """0 where nobody can know: standard input."""
    return path.stat().st_size if path.is_file() else 0


def _read_keys(path: Path) -> Keys:
    keys: Keys = read_table(path, ["line_key"]).column("line_key").to_numpy()
    return keys


def _read_order(path: Path) -> Keys:
    """A lost order is no loss of data: the rows are then seen in the order of the files."""
    data = path.read_bytes() if path.exists() else b""
    return np.frombuffer(data[: len(data) // 8 * 8], dtype=np.uint64)


def _forget_others(folder: Path, *, keep: set[str]) -> None:
    for path in folder.glob("*.arrow"):
        if path.name not in keep:
            path.unlink(missing_ok=True)
            digest_file(path).unlink(missing_ok=True)
    # What a killed run left half written.
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)
