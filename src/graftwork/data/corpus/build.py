"""Builds the corpus: extracts the features of new blocks on all cores and puts all rows in row order.

Row order is the order in which rows were first seen, by the hash of their lines: known rows first, new ones
after them, whatever file they are in. A log that grows or is rotated, or a new file that sorts first, moves
no known row. An interrupted run loses only the blocks in progress.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from graftwork.data.audit.findings import PROMPT_FINGERPRINT
from graftwork.data.audit.row_checks import (
    NEGATIVE_FEEDBACK,
    NOT_KEPT,
    RATED_BAD,
    RETRIED,
    REVIEWED,
    AuditContext,
    is_bad_score,
    is_rated_bad,
    say_bad_score,
)
from graftwork.data.condition import NO_NUMBER, list_fields
from graftwork.data.corpus.row_features import (
    FeatureTask,
    digest_file,
    extract_features,
    has_features,
    list_feature_inputs,
    name_features,
    remote_features,
)
from graftwork.data.corpus.scores import find_low_rated, find_scored_pairs, require_scores
from graftwork.data.corpus.store import Corpus, JoinedFacts, Segment, read_head, read_table
from graftwork.data.ingest.files import cut_blocks, find_sources
from graftwork.data.settings import DataSettings
from graftwork.files.disk import file_digest, make_folder, write_atomic
from graftwork.process.cluster.pieces import MapEngine, MapWork
from graftwork.records.base import fingerprint
from graftwork.records.dataset import InputFile
from graftwork.records.errors import UserMistake

Keys: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

RUNS_A_BLOCK, FEW_RUNS = 8, 2000
"""A shuffled log falls into too many runs to read efficiently. With more runs than this (on average per
block, and in total), rows are ordered by file again.
"""

_ODD = np.uint64(0x9E3779B97F4A7C15)


Progress = Callable[[str, int, int], None]


def order_rows(
    blocks: Sequence[Segment], line_keys: Sequence[Keys], known: Keys
) -> tuple[list[Segment], Keys]:
    """Put the rows of these blocks in row order: runs of rows, and the hashes of all lines.

    `line_keys` are the hashes of each block's lines; `known` is the order of the last time.
    """
    keys = np.concatenate([np.zeros(0, dtype=np.uint64), *line_keys])
    sizes = np.array([len(own) for own in line_keys], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    stood = find_places(keys, known)
    # Known rows keep their order; new ones follow in the order of the files.
    order = np.lexsort((np.arange(len(keys)), np.where(stood < 0, len(known), stood)))
    runs = _find_runs(order, starts)
    if len(runs) > max(RUNS_A_BLOCK * len(blocks), FEW_RUNS):
        order = np.arange(len(keys))
        runs = _find_runs(order, starts)
    segments = []
    for low, high in runs:
        number = int(np.searchsorted(starts, low, side="right")) - 1
        while not sizes[number]:
            number -= 1
        start = int(starts[number])
        segments.append(blocks[number]._replace(start=low - start, stop=high - start))
    # A block without a readable row carries the rows that could not be read.
    segments += [block for block, size in zip(blocks, sizes, strict=True) if not size]
    return segments, keys[order]


def find_places(keys: Keys, known: Keys) -> Places:
    """Return the position of each key in `known`, or -1. Equal keys are matched one to one, in order."""
    if not len(known):
        return np.full(len(keys), -1, dtype=np.int64)
    wanted, there = _number_repeats(keys), _number_repeats(known)
    order = np.argsort(there, kind="stable")
    at = np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)
    places = order[at]
    found: Places = np.where(there[places] == wanted, places, -1)
    return found


def _number_repeats(keys: Keys) -> Keys:
    """Make repeated keys distinct: the second of two equal keys is changed, the third differently."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(keys)]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    distinct = np.empty_like(keys)
    distinct[order] = ordered + (np.arange(len(keys)) - begins).astype(np.uint64) * _ODD
    return distinct


def _find_runs(order: Places, starts: Places) -> list[tuple[int, int]]:
    """Return runs of consecutive rows of one block as (first, end)."""
    if not len(order):
        return []
    broken = (np.diff(order) != 1) | np.isin(order[1:], starts)
    lows = np.concatenate(([0], np.flatnonzero(broken) + 1))
    highs = np.append(lows[1:], len(order))
    return list(zip(order[lows].tolist(), (order[highs - 1] + 1).tolist(), strict=True))


ROW_ORDER_FILE = "order.bin"
"""The hash of every line, in row order: 8 bytes per row."""

BLOCK_BYTES = 4 << 20

log = logging.getLogger(__name__)


def build_corpus(
    context: AuditContext,
    *,
    folder: Path,
    root: Path = Path(),
    on_progress: Progress,
    engine: MapEngine | None = None,
) -> Corpus:
    """Extract the features of new blocks, and put all rows in row order."""
    names = find_sources(context.settings.logs, root=root)
    make_folder(folder)
    reading = _LogReader(names, root=root, folder=folder, context=context, report=on_progress)
    work = MapWork(extract_features, remote=lambda: remote_features(context))
    for size in (engine or MapEngine()).map(reading.new_tasks(), work):
        reading.done(size)
    records: Counter[str] = Counter()
    line_keys: list[Keys] = []
    for block in reading.blocks:
        # One by one: a head lists every unreadable line of its block.
        records[block.file] += read_head(folder / block.features)["records"]
        line_keys.append(read_table(folder / block.features, ["line_key"]).column("line_key").to_numpy())
    stored = folder / ROW_ORDER_FILE
    # Without the stored order, rows are ordered by file.
    data = stored.read_bytes() if stored.exists() else b""
    known = np.frombuffer(data[: len(data) // 8 * 8], dtype=np.uint64)
    segments, keys = order_rows(reading.blocks, line_keys, known)
    write_atomic(stored, keys.tobytes())
    _remove_stale(folder, keep={block.features for block in reading.blocks})
    inputs = [
        InputFile(file=file, sha256=sha256, rows=records[file]) for file, sha256 in reading.hashes.items()
    ]
    corpus = Corpus(
        folder, segments=segments, inputs=inputs, features_key=fingerprint(list_feature_inputs(context))
    )
    corpus.withdraw(_find_disputed_captures(corpus))
    corpus.withdraw(_find_replaced(corpus))
    corpus.withdraw(_find_retried_calls(corpus))
    corpus.joined.update(_join_scores(corpus))
    rated_bad = _find_rated_bad(corpus, context.settings)
    if context.settings.drop_rated_bad:
        corpus.withdraw(rated_bad)
    elif rated_bad:
        corpus.rate_low(np.array(sorted(rated_bad), dtype=np.int64))
    require_scores(corpus, context.settings)
    corpus.rate_low(find_low_rated(corpus, context.settings))
    corpus.pairs = find_scored_pairs(corpus, context.settings)
    if context.settings.keep is not None:
        _require_condition_fits(corpus, context.settings.keep)
    return corpus


def _require_condition_fits(corpus: Corpus, condition: str) -> None:
    """Refuse a `data.keep` that compares text with a number, or that leaves no row."""
    faults, reasons = corpus.labels("fault"), corpus.labels("reason")
    left_out = faults.numbers == next((n for n, name in enumerate(faults.names) if name == NOT_KEPT), -2)
    if not left_out.any():
        return
    names = np.array([name.startswith(NO_NUMBER) for name in reasons.names], dtype=bool)
    places = np.flatnonzero(left_out & names[reasons.numbers])
    own = (corpus.column("capture") != 0) | (corpus.column("replaces") != 0)
    if not len(places) and not (left_out | own).all():
        return
    places = places if len(places) else np.flatnonzero(left_out)
    counts = Counter(reasons.numbers[places].tolist())
    number, rows = counts.most_common(1)[0]
    first = corpus.origin(int(places[np.flatnonzero(reasons.numbers[places] == number)[0]]))
    listed = [row for _, row in corpus.rows_at(np.flatnonzero(left_out)[:50].tolist())]
    fields = ", ".join(sorted({name for row in listed for name in list_fields(row)})[:20])
    raise UserMistake(
        f"`{condition}` cannot be decided"
        if reasons.names[number].startswith(NO_NUMBER)
        else "no row is kept",
        why=f"{reasons.names[number].removeprefix(f'{NO_NUMBER}: ')} in {rows:,} rows, first in {first}",
        fix=f"name another field or condition; rows have {fields or 'no fields of their own'}",
        where="data.keep",
    )


def _find_retried_calls(corpus: Corpus) -> dict[int, str]:
    """Find calls that their agent made again: the same prompt in the same trace. The last answer counts."""
    traces = corpus.column("trace")
    places = np.flatnonzero((traces != 0) & corpus.column("passed").astype(bool))
    if not len(places):
        return {}
    mixed = (traces[places] * _ODD) ^ corpus.column(PROMPT_FINGERPRINT)[places].astype(np.uint64)
    order = np.argsort(mixed, kind="stable")
    is_followed = np.zeros(len(places), dtype=bool)
    is_followed[order[:-1]] = mixed[order[1:]] == mixed[order[:-1]]
    reason = f"{RETRIED}: the agent made the same call again in the same trace"
    return dict.fromkeys(places[is_followed].tolist(), reason)


def _join_scores(corpus: Corpus) -> dict[int, JoinedFacts]:
    """Give each call the mean of its own scores, else that of its trace."""
    by_call: dict[tuple[int, int], list[float]] = {}
    for trace, call, value in corpus.scores():
        by_call.setdefault((trace, call), []).append(value)
    if not by_call:
        return {}
    found: dict[int, JoinedFacts] = {}
    calls = corpus.column("call").tolist()
    for place, trace in enumerate(corpus.column("trace").tolist()):
        own = by_call.get((trace, calls[place])) if trace else None
        scores = own or (by_call.get((trace, 0)) if trace else None)
        if scores:
            found[place] = JoinedFacts(sum(scores) / len(scores), "call" if own else "trace")
    return found


def _find_rated_bad(corpus: Corpus, settings: DataSettings) -> dict[int, str]:
    """Find rows that a score apart from them rates bad; one that has a score of its own keeps that."""
    scored = sorted(
        place
        for place, joined in corpus.joined.items()
        if joined.reward is not None and is_bad_score(joined.reward, settings)
    )
    bad = (place for place, row in corpus.rows_at(scored) if is_rated_bad(row, settings))
    return dict.fromkeys(bad, f"{RATED_BAD}: a score of its trace is {say_bad_score(settings)}")


def _find_disputed_captures(corpus: Corpus) -> dict[int, str]:
    """Find captures that were exported before users rated them negative, and again afterwards."""
    captures = corpus.column("capture")
    if not captures.any():
        return {}
    faults = corpus.labels("fault")
    bad = np.isin(faults.numbers, [n for n, name in enumerate(faults.names) if name == NEGATIVE_FEEDBACK])
    again = np.isin(captures, captures[bad & (captures != 0)]) & corpus.column("passed").astype(bool)
    again &= corpus.column("unconfirmed") != 0
    reason = f"{NEGATIVE_FEEDBACK}: another row of the logs says that users called this reply bad"
    return dict.fromkeys(np.flatnonzero(again).tolist(), reason)


def _find_replaced(corpus: Corpus) -> dict[int, str]:
    """Find rows that another row replaces: a teacher or a reviewer answered the same prompt again.

    A line may have several rows: only the one with the same user turns is replaced. A replacement that was
    dropped replaces nothing, unless a reviewer rejected the row.
    """
    replaces = corpus.column("replaces")
    if not replaces.any():
        return {}
    faults = corpus.labels("fault")
    rejected = np.isin(faults.numbers, [n for n, name in enumerate(faults.names) if name == REVIEWED])
    valid = (replaces != 0) & (corpus.column("passed").astype(bool) | rejected)
    # Not the whole prompt: the system prompt may have been replaced since.
    turns = corpus.column("turn")
    pairs = set(zip(replaces[valid].tolist(), turns[valid].tolist(), strict=True))
    lines = corpus.column("line_key")
    places = np.flatnonzero(np.isin(lines, replaces[valid]) & corpus.column("passed").astype(bool))
    found = [place for place in places.tolist() if (int(lines[place]), int(turns[place])) in pairs]
    return dict.fromkeys(found, "replaced: another row of the logs answers it again or rejects it")


class _LogReader:
    """Reads the files once: hashes them and yields the blocks without features."""

    def __init__(
        self, names: tuple[str, ...], *, root: Path, folder: Path, context: AuditContext, report: Progress
    ) -> None:
        self.blocks: list[Segment] = []
        """The blocks of the log, with no rows yet."""
        self.hashes: dict[str, str] = {}
        # A log that was just rotated has no rows yet; it is an error only if all are empty.
        sizes = {name: (root / name).stat().st_size for name in names if (root / name).is_file()}
        empty = {name for name, size in sizes.items() if not size}
        if empty and len(empty) < len(names):
            log.warning("empty, left out: %s", ", ".join(sorted(empty)))
            names = tuple(name for name in names if name not in empty)
        self._names = names
        self._root, self._folder, self._context = root, folder, context
        self._inputs = list_feature_inputs(context)
        self._report = report
        self._total = sum(sizes.values())
        self._done = 0

    def new_tasks(self) -> Iterator[FeatureTask]:
        for name in self._names:
            blocks_digest = hashlib.sha256()
            for block in cut_blocks(name, root=self._root, size=BLOCK_BYTES):
                blocks_digest.update(block.key.encode())
                features = name_features(block, inputs=self._inputs, settings=self._context.settings)
                self.blocks.append(Segment(block.file, block.index, block.first_line, features, 0, 0))
                if has_features(self._folder / features):
                    self.done(len(block.data))
                else:
                    yield FeatureTask(block, self._folder / features, self._context)
            # Standard input can be read only once: it is identified by the hash of its blocks.
            path = self._root / name
            sha256 = file_digest(path) if path.is_file() else blocks_digest.hexdigest()
            self.hashes[self.blocks[-1].file if self.blocks else name] = sha256
        if not self.blocks:
            raise UserMistake("the logs hold no rows", fix="name other files under data.logs")

    def done(self, size: int) -> None:
        self._done += size
        self._report("read and sift", self._done, max(self._total, self._done))


def _remove_stale(folder: Path, *, keep: set[str]) -> None:
    for path in folder.glob("*.arrow"):
        if path.name not in keep:
            path.unlink(missing_ok=True)
            digest_file(path).unlink(missing_ok=True)
    # Left over from a killed run.
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)
