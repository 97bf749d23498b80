"""From kept rows to dataset folders: rendered shards, packed sequences, the list of dropped rows, the
manifest.

Input: the corpus, the kept rows and each model's subset. Output: `out/<content_hash>` per model, which
appears whole or not at all. Shards are named by everything they depend on and are reused; datasets link to
them. `content_hash` covers the manifest, and through the hashes in it every row. Packing is best fit
decreasing: the longest row first, each into the fullest sequence with room.
"""

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from graftwork.data.corpus.build import NOT_SENT, Progress
from graftwork.data.corpus.store import Corpus, JoinedFacts
from graftwork.data.dedup.repeats import Repeats
from graftwork.data.render.rows import (
    RenderedBlock,
    RenderedShard,
    Renderer,
    RenderTask,
    SubsetRows,
    find_rendered,
    init_worker,
    render_block,
)
from graftwork.data.settings import DataSettings
from graftwork.data.split.assignment import SplitAssignment
from graftwork.data.split.model_subsets import ModelSubset
from graftwork.files.dataset import (
    DROPS,
    MANIFEST,
    drops_table,
    hash_manifest,
    list_files,
    read_manifest,
    write_table,
)
from graftwork.files.disk import (
    atomic_folder,
    explain_os_error,
    file_digest,
    make_folder,
    require_digest,
    write_atomic,
)
from graftwork.process.pieces import MapEngine, MapWork, RemoteWork, pack
from graftwork.records.base import fingerprint
from graftwork.records.dataset import SPLITS, Dataset, Drop, Packing, Shard, Split, SplitSummary
from graftwork.records.errors import Corrupted, GraftError
from graftwork.records.interaction import Origin

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Lengths = Sequence[int] | NDArray[np.integer]
    import pyarrow as pa


def remote_rendering(
    renderer: Renderer, settings: DataSettings
) -> RemoteWork[RenderTask, RenderedBlock] | None:
    """The form for a cluster; None for a renderer that is no `ChatTemplate`."""
    from graftwork.model.chat.template import ChatTemplate

    if not isinstance(renderer, ChatTemplate):
        return None
    *texts, reasoning = renderer.as_texts().values()
    head = {"settings": settings.model_dump(mode="json", exclude=NOT_SENT), "reasoning": reasoning}

    def encode(task: RenderTask) -> bytes:
        identity = {
            "features": str(task.features.absolute()),
            "file": task.file,
            "first_line": task.first_line,
            "subsets": [[name, subset.staged] for name, subset in task.subsets.items()],
            "out": str(task.out.absolute()),
            "joined": [[position, *facts] for position, facts in task.joined.items()],
        }
        arrays = [np.ascontiguousarray(task.numbers, dtype=np.int64).tobytes()]
        for subset in task.subsets.values():
            arrays.append(np.ascontiguousarray(subset.split, dtype=np.uint8).tobytes())
            arrays.append(np.ascontiguousarray(subset.weight, dtype=np.float64).tobytes())
        return pack(identity, *arrays)

    return RemoteWork(
        entry="graftwork.data.render.dataset:render_piece",
        shared=pack(head, *(text.encode() for text in texts)),
        encode=encode,
        collect=lambda task: find_rendered(task.out),
    )


def prepare_shared(head: Any, blobs: list[bytes]) -> None:
    from graftwork.model.chat.template import ChatTemplate

    tokenizer_json, config, chat_template = (blob.decode() for blob in blobs)
    renderer = ChatTemplate.from_texts(tokenizer_json, config, chat_template, head["reasoning"])
    init_worker(renderer, DataSettings.model_validate(head["settings"]))


def render_piece(_context: None, head: Any, blobs: list[bytes]) -> None:
    """Work on one block, on a node."""
    if find_rendered(Path(head["out"])) is not None:
        return
    arrays = iter(blobs[1:])
    subsets = {
        name: SubsetRows(
            np.frombuffer(next(arrays), dtype=np.uint8), np.frombuffer(next(arrays), dtype=np.float64), staged
        )
        for name, staged in head["subsets"]
    }
    render_block(
        RenderTask(
            features=Path(head["features"]),
            numbers=np.frombuffer(blobs[0], dtype=np.int64),
            file=head["file"],
            first_line=head["first_line"],
            subsets=subsets,
            out=Path(head["out"]),
            joined={position: JoinedFacts(*facts) for position, *facts in head["joined"]},
        )
    )


def pack_rows(lengths: "Lengths", *, length: int) -> "tuple[NDArray[np.int64], NDArray[np.int32]]":
    """Pack every row once into sequences of at most `length` tokens. Deterministic.

    Returns the order of the rows and the boundaries of the sequences in it: sequence k holds the rows
    `order[boundaries[k] : boundaries[k + 1]]`, the longest first.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and not (sizes.min() >= 1 and sizes.max() <= length):
        raise ValueError(f"every row must have 1 to {length} tokens, not {sizes.min()} to {sizes.max()}")
    longest_first = np.argsort(-sizes, kind="stable")
    bits = [1 << room for room in range(length + 1)]
    buckets: list[list[int]] = [[] for _ in range(length + 1)]
    open_rooms = 0  # bit r is set while a sequence with room for r tokens is open
    sequence_of: list[int] = []
    sequences = 0
    for size in sizes[longest_first].tolist():
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            bucket = buckets[room]
            sequence = bucket.pop()
            if not bucket:
                open_rooms ^= bits[room]
        else:
            room, sequence = length, sequences
            sequences += 1
        sequence_of.append(sequence)
        space = room - size
        if space:
            buckets[space].append(sequence)
            open_rooms |= bits[space]
    numbers = np.array(sequence_of, dtype=np.int64)
    return longest_first[np.argsort(numbers, kind="stable")], boundaries(np.bincount(numbers))


def boundaries(lengths: "Lengths") -> "NDArray[np.int32]":
    """Return where the documents of a sequence begin, and where the last one ends (`cu_seqlens`)."""
    return np.concatenate(([0], np.cumsum(np.asarray(lengths, dtype=np.int64)))).astype(np.int32)


PACKS = "packs.parquet"


class PlacedShard(NamedTuple):
    """A shard, the folder it was rendered into, and the question group of each of its rows."""

    shard: RenderedShard
    folder: Path
    groups: "np.ndarray[Any, np.dtype[np.int64]]"


def assemble(
    head: Dataset, placed: Sequence[PlacedShard], *, drops: Path, scratch: Path, out: Path, pack_tokens: int
) -> tuple[Dataset, Path]:
    """Write the dataset folder. `head` is the manifest without splits, packing and name."""
    by_split: dict[Split, list[PlacedShard]] = {split: [] for split in SPLITS}
    for entry in placed:
        by_split.setdefault(entry.shard.split, []).append(entry)
    names = {
        member.folder / member.shard.file: f"{split}/{number:05d}.parquet"
        for split, members in by_split.items()
        for number, member in enumerate(members)
    }
    packs, packing = _pack([entry.shard for entry in by_split["train"]], length=pack_tokens)
    packed = scratch / f"{head.model}.{PACKS}"
    write_table(packed, packs, durable=False)
    unnamed = head.model_copy(
        update={
            "splits": {split: _summarize(members, names) for split, members in by_split.items()},
            "packing": packing.model_copy(update={"sha256": file_digest(packed)}),
        }
    )
    dataset = unnamed.model_copy(update={"content_hash": hash_manifest(unnamed)})
    folder = out / dataset.content_hash
    _put_away_if_damaged(folder, dataset)
    with atomic_folder(folder) as whole:
        for source, name in {**names, drops: DROPS, packed: PACKS}.items():
            make_folder((whole / name).parent)
            try:
                os.link(source, whole / name)
            except OSError:  # the file system has no links
                shutil.copyfile(source, whole / name)
        write_atomic(whole / MANIFEST, dataset.to_json())
    return dataset, folder


def _put_away_if_damaged(folder: Path, dataset: Dataset) -> None:
    """Remove a folder of this name whose content does not match its name."""
    if not folder.exists():
        return
    try:
        if read_manifest(folder) != dataset:
            raise Corrupted("its manifest is different")
        for shard in list_files(dataset):
            require_digest(folder / shard.file, shard.sha256)
    except GraftError:
        aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}.damaged")
        folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)


def write_drops(path: Path, tables: Iterable["pa.Table"]) -> tuple[Shard, dict[str, int]]:
    """Write all dropped rows to one file. Returns the shard and the number of drops per step."""
    import pyarrow.parquet as pq

    counts: Counter[str] = Counter()
    writer = None
    try:
        for table in tables:
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            counts.update(table.column("step").to_pylist())
        if writer is not None:
            writer.close()
    except OSError as error:
        raise explain_os_error(error, path) from error
    return Shard(file=DROPS, rows=counts.total(), sha256=file_digest(path)), dict(counts)


def _summarize(placed: Sequence[PlacedShard], names: Mapping[Path, str]) -> SplitSummary:
    lengths: Counter[int] = Counter()
    for entry in placed:
        lengths.update(entry.shard.lengths.tolist())
    groups = np.unique(np.concatenate([entry.groups for entry in placed])) if placed else ()
    return SplitSummary(
        rows=lengths.total(),
        groups=len(groups),
        tokens=sum(length * rows for length, rows in lengths.items()),
        trained_tokens=sum(entry.shard.trained_tokens for entry in placed),
        longest=max(lengths, default=0),
        shards=tuple(
            Shard(
                file=names[entry.folder / entry.shard.file],
                rows=len(entry.shard.lengths),
                sha256=entry.shard.sha256,
            )
            for entry in placed
        ),
        lengths=dict(sorted(lengths.items())),
    )


def _pack(shards: Sequence[RenderedShard], *, length: int) -> tuple["pa.Table", Packing]:
    """Pack the training rows, by their numbers in the split."""
    import pyarrow as pa

    lengths = np.concatenate([shard.lengths for shard in shards] or [np.zeros(0, dtype=np.int32)])
    order, ends = pack_rows(lengths, length=length)
    rows = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(order, pa.int32()))
    sequences = len(ends) - 1
    room = sequences * length
    fill = round(int(lengths.sum()) / room, 4) if room else 0.0
    packing = Packing(length=length, sequences=sequences, fill=fill, file=PACKS, sha256="")
    return pa.table({"rows": rows}), packing


REPEAT_STEPS = ("", "conflicting_answers", "duplicate", "near_duplicate")
"""The steps by their numbers in `Repeats.step`."""

_WORDS = {
    "conflicting_answers": "other reply to the same prompt in",
    "duplicate": "the same as",
    "near_duplicate": "nearly the same as",
}


UNFIT_REFERENCE = (
    "no reference for a test: a model wrote this reply to a held-out question, unconfirmed by a person, or "
    "the log rates it bad"
)


class RowOutcomes(NamedTuple):
    """What each step decided, by row position."""

    repeats: Repeats
    assignment: SplitAssignment
    refused: Mapping[int, str]
    shortened: Mapping[int, str]
    unwanted: set[int]
    unfit_references: set[int]


def list_dropped(corpus: Corpus, decided: RowOutcomes) -> Iterator["pa.Table"]:
    """List unreadable rows first, then the others in row order."""
    unread = [
        Drop(origin=fault.origin, step="read", reason=f"{fault.code}: {fault.message}", input_hash=line_hash)
        for line_hash, fault in corpus.faults()
    ]
    yield drops_table(unread)
    # The rows that some step decided on are few; each of them is looked at.
    concerned = ~corpus.column("passed") | (decided.repeats.instead >= 0)
    for positions in (
        *(corpus.withdrawn, decided.assignment.excluded, decided.unfit_references),
        *(decided.unwanted, decided.refused, decided.shortened),
    ):
        concerned[list(positions)] = True
    names = ("line", "input_hash", "passed", "fault", "reason")
    for first, segment in corpus.by_segment():
        stop = first + segment.stop - segment.start
        numbers = np.flatnonzero(concerned[first:stop]).tolist()
        columns = corpus.read_columns(segment, names, numbers) if numbers else {}
        drops = []
        for index, number in enumerate(numbers):
            drop = _judge(corpus, first + number, index, columns, decided)
            if drop is not None:
                step, reason = drop
                origin = Origin(file=segment.file, line=segment.first_line + columns["line"][index])
                input_hash = columns["input_hash"][index]
                drops.append(Drop(origin=origin, step=step, reason=reason, input_hash=input_hash))
        yield drops_table(drops)


def _judge(
    corpus: Corpus, position: int, index: int, columns: Mapping[str, list[Any]], decided: RowOutcomes
) -> tuple[str, str] | None:
    repeats, assignment = decided.repeats, decided.assignment
    if position in corpus.withdrawn or not columns["passed"][index]:
        fault = f"{columns['fault'][index]}: {columns['reason'][index]}"
        return "filter", corpus.withdrawn.get(position, fault)
    if repeats.instead[position] >= 0:
        step = REPEAT_STEPS[repeats.step[position]]
        return step, f"{_WORDS[step]} {corpus.origin(int(repeats.instead[position]))}"
    if position in assignment.excluded or position in decided.unfit_references:
        reason = UNFIT_REFERENCE
        if position in assignment.excluded:
            first, second = map(corpus.origin, assignment.excluded[position])
            reason = f"set aside: it asks what {first} and {second} ask, which stand in different splits"
            if assignment.excluded[position][1] == position:
                reason = f"set aside: it asks what {first} asks, and stood in another split before"
        return "split", reason
    if position in decided.unwanted:
        return "models", "not used by any model under models:"
    if position in decided.refused or position in decided.shortened:
        # A shortened row is in a shard too, without the part that was left out.
        step = "render" if position in decided.refused else "render_part"
        return step, decided.refused.get(position) or decided.shortened[position]
    return None


def count_kept(passed: "np.ndarray[Any, Any]", decided: RowOutcomes) -> dict[str, int]:
    """Count the rows left after each step."""
    repeats = decided.repeats
    remaining = int(passed.sum())
    after = {"read": len(passed), "filter": remaining, "redact": remaining}
    for number, step in enumerate(REPEAT_STEPS[1:], start=1):
        remaining -= int(((repeats.step == number) & passed).sum())
        after[step] = remaining
    excluded = (*decided.assignment.excluded, *decided.unfit_references)
    after["split"] = remaining - sum(repeats.instead[position] < 0 for position in excluded)
    after["render"] = after["split"] - len(decided.refused)
    return after


SHARDS_FORM = 3
"""Incremented when the format of shards changes: older shards are then rendered again."""

BLOCK_DIGITS = 16
"""The names of shards of one block begin with the same digits."""

RENDER_SETTINGS = (
    *("system_prompt", "system_prompts", "logged_system_prompt", "train_on", "drop_broken_calls"),
    *("max_tokens", "overlong"),
)
"""The settings that a rendered row depends on; the rows themselves are hashed separately."""


class RenderedSegment(NamedTuple):
    """A rendered segment: the folder of its shards, and the offset from row numbers to positions."""

    block: RenderedBlock
    folder: Path
    offset: int

    @property
    def refused(self) -> dict[int, str]:
        return {number + self.offset: reason for number, reason in self.block.refused.items()}

    @property
    def shortened(self) -> dict[int, str]:
        return {number + self.offset: reason for number, reason in self.block.shortened.items()}

    def placed(self, model: str, assignment: SplitAssignment) -> Iterator[PlacedShard]:
        for shard in self.block.shards:
            if shard.model == model:
                yield PlacedShard(shard, self.folder, assignment.group[shard.numbers + self.offset])


class RenderOptions(NamedTuple):
    """How rows are rendered, and into which folder. `staged` names the models whose rows keep their stage."""

    renderer: Renderer
    settings: DataSettings
    folder: Path
    staged: frozenset[str]


def render_corpus(
    corpus: Corpus,
    positions: "np.ndarray[Any, np.dtype[np.int64]]",
    subsets: Sequence[ModelSubset],
    *,
    options: RenderOptions,
    report: Progress,
    engine: MapEngine,
) -> list[RenderedSegment]:
    """Render every segment in order."""
    renderer, settings, folder, staged = options
    render_key = fingerprint(
        [
            renderer.template_fingerprint,
            renderer.tokenizer_fingerprint,
            settings.model_dump(mode="json", include=set(RENDER_SETTINGS)),
            SHARDS_FORM,
        ]
    )
    tasks = list(_list_tasks(corpus, positions, subsets, staged=staged, render_key=render_key, folder=folder))
    blocks_by_folder = {task.out: find_rendered(task.out) for task, _ in tasks}
    done = sum(len(task.numbers) for task, _ in tasks if blocks_by_folder[task.out])
    new = [task for task, _ in tasks if blocks_by_folder[task.out] is None]
    new = _add_earlier(new, folder, current=set(blocks_by_folder))
    work = MapWork(
        render_block,
        prepare=init_worker,
        with_arguments=(renderer, settings),
        remote=lambda: remote_rendering(renderer, settings),
    )
    blocks = engine.map(new, work)
    report("render", done, len(positions))
    for task, rendered in zip(new, blocks, strict=True):
        blocks_by_folder[task.out] = rendered
        done += len(task.numbers)
        report("render", done, len(positions))
    for path in folder.iterdir() if folder.exists() else ():
        if path not in blocks_by_folder:
            shutil.rmtree(path, ignore_errors=True)
    return [
        RenderedSegment(block, task.out, offset)
        for task, offset in tasks
        if (block := blocks_by_folder[task.out]) is not None
    ]


def _list_tasks(
    corpus: Corpus,
    positions: "np.ndarray[Any, np.dtype[np.int64]]",
    subsets: Sequence[ModelSubset],
    *,
    staged: Collection[str],
    render_key: str,
    folder: Path,
) -> Iterator[tuple[RenderTask, int]]:
    """Yield a task for each segment, with the offset from its row numbers to positions."""
    for first, segment in corpus.by_segment():
        low, high = np.searchsorted(positions, [first, first + segment.stop - segment.start])
        if low == high:
            continue
        offset = first - segment.start
        numbers = positions[low:high] - offset
        rows = {
            subset.name: SubsetRows(subset.split[low:high], subset.weight[low:high], subset.name in staged)
            for subset in subsets
        }
        decided = [
            [name, subset.split.tobytes().hex(), subset.weight.tobytes().hex(), subset.staged]
            for name, subset in rows.items()
        ]
        joined = {
            index: corpus.joined[int(row)]
            for index, row in enumerate(positions[low:high] if corpus.joined else ())
            if int(row) in corpus.joined
        }
        stated = [[index, *facts] for index, facts in joined.items()]
        source = [segment.features, segment.file, segment.first_line, numbers.tobytes().hex(), *stated]
        block = fingerprint([render_key, segment.file, segment.first_line])[:BLOCK_DIGITS]
        task = RenderTask(
            features=corpus.path_of(segment),
            numbers=numbers,
            file=segment.file,
            first_line=segment.first_line,
            subsets=rows,
            out=folder / f"{block}-{fingerprint([render_key, source, decided])[:40]}",
            joined=joined,
        )
        yield task, offset


def _add_earlier(tasks: Sequence[RenderTask], folder: Path, *, current: Collection[Path]) -> list[RenderTask]:
    """Give each task the shards of its block from the last run: most of its rows were rendered then."""
    earlier: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if tasks and folder.exists() else ():
        if path not in current:
            earlier.setdefault(path.name[:BLOCK_DIGITS], []).append(path)
    return [task._replace(earlier=tuple(earlier.get(task.out.name[:BLOCK_DIGITS], ()))) for task in tasks]
