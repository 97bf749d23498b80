"""Checkpoints on disk: written and verified, read again, and which of them stay.

In: the state of a run. Out: a folder with a manifest of hashes; the newest or the best intact one. The newest
few and the best one stay, and always the one that was just verified, so that the last good checkpoint is
never lost to tidiness.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.files import disk
from graftwork.files.disk import atomic_folder, file_digest, sync_folder, write_atomic
from graftwork.files.safetensors import TYPE_NAMES, TensorEntry, encode_header, in_file_order
from graftwork.records.errors import Damaged, UserMistake

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint as the policy sees it. Smaller scores are better; most have none."""

    step: int
    score: float | None = None


def steps_to_keep(found: Sequence[SavedCheckpoint], *, verified: int, newest: int) -> frozenset[int]:
    """The steps that stay once the checkpoint of step `verified` is known to be good.

    Checkpoints after `verified` do not count: the run went back because they are damaged.
    """
    past = [saved for saved in found if saved.step <= verified]
    recent = sorted({verified, *(saved.step for saved in past)})[-max(newest, 1) :]
    best = best_of(past)
    return frozenset(recent) | ({best.step} if best else frozenset())


def best_of(found: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """The one with the smallest score, the earliest of several; None without evaluations."""
    looked = [saved for saved in found if is_score(saved.score)]
    return min(looked, key=lambda saved: (saved.score, saved.step), default=None)


def is_better(score: float | None, than: Sequence[SavedCheckpoint]) -> bool:
    """Whether an evaluation was better than all before it."""
    if not is_score(score):
        return False
    best = best_of(than)
    return best is None or (score is not None and best.score is not None and score < best.score)


def is_score(score: float | None) -> bool:
    """An evaluation that is not a number does not count."""
    return score is not None and not math.isnan(score)


MANIFEST = "manifest.json"
TENSORS = "tensors.safetensors"
STATE = "state.json"
JOURNAL = "steps.jsonl"
CONTENT = (TENSORS, STATE, JOURNAL)
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError)
"""What JSON of any shape can lead to; deep nesting and infinite numbers, too."""


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on. `score` is that of the look at this step, if there was one."""

    step: int
    tensors: "dict[str, Tensor]"
    state: dict[str, Any]
    score: float | None = None
    journal: bytes = b""


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint's folder promises about its files."""

    step: int
    sha256: dict[str, str]
    sizes: dict[str, int]
    score: float | None = None

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> "CheckpointManifest":
        try:
            held = json.loads(text)
            score = held.get("score")
            found = cls(
                step=_whole_number(held["step"]),
                sha256={name: _digest(held["sha256"][name]) for name in CONTENT},
                sizes={name: _whole_number(held["sizes"][name]) for name in CONTENT},
                score=None if score is None else float(score),
            )
        except _UNREADABLE as error:
            raise Damaged("its manifest cannot be read", why=str(error)[:200], where=where) from error
        return found

    @property
    def saved(self) -> SavedCheckpoint:
        return SavedCheckpoint(self.step, self.score)


def _whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a step or a size is not a whole number")
    return value


def _digest(value: Any) -> str:
    # Part of a file name in a mirror: it may only be a hash.
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError("a hash is not a sha256")
    return value


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def write_checkpoint(
    folder: Path, checkpoint: Checkpoint, *, keep: int, spare: Set[int] = frozenset()
) -> Path:
    """Write, verify, and only then let old ones go, except those that are still being read (`spare`)."""
    path = folder / step_name(checkpoint.step)
    if path.exists():
        try:
            # Stopped right after a resume: this step is safe already, and a good one is never removed.
            verify_checkpoint(path)
        except Damaged:
            shutil.rmtree(path)
    if not path.exists():
        make_folder(folder)
        with atomic_folder(path) as temporary:
            # The hashes are of what memory holds, not of what the disk has.
            digest, length = write_tensors(temporary / TENSORS, checkpoint.tensors)
            hashes, sizes = {TENSORS: digest}, {TENSORS: length}
            for name, data in ((STATE, json.dumps(checkpoint.state).encode()), (JOURNAL, checkpoint.journal)):
                write_atomic(temporary / name, data)
                hashes[name], sizes[name] = hashlib.sha256(data).hexdigest(), len(data)
            manifest = CheckpointManifest(checkpoint.step, sha256=hashes, sizes=sizes, score=checkpoint.score)
            write_atomic(temporary / MANIFEST, manifest.to_json())
        verify_checkpoint(path)
    stay = steps_to_keep(list_saved(folder), verified=checkpoint.step, newest=keep) | spare
    for other in _folders(folder):
        if other.name not in map(step_name, stay):
            shutil.rmtree(other, ignore_errors=True)
    return path


Restore = Callable[[Path], bool]
"""Replaces a damaged checkpoint by an intact copy, if there is one."""


def no_copy(_path: Path) -> bool:
    return False


def latest_good(folder: Path, restore: Restore = no_copy) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest intact checkpoint, and a message about each newer one that is damaged."""
    return first_good(reversed(_folders(folder)), restore)


def best_good(folder: Path, restore: Restore = no_copy) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The intact checkpoint with the best score, and a message about each better one that is damaged."""
    looked = [(saved.score, path) for saved, path in _manifests(folder) if is_score(saved.score)]
    return first_good((path for _, path in sorted(looked)), restore)


def first_good(paths: Iterable[Path], restore: Restore) -> tuple[Checkpoint | None, tuple[str, ...]]:
    complaints: list[str] = []
    for path in paths:
        try:
            return _read_or_restore(path, restore), tuple(complaints)
        except Damaged as damage:
            complaints.append(f"checkpoint {path.name} is passed over: {damage.what}")
    return None, tuple(complaints)


def _read_or_restore(path: Path, restore: Restore) -> Checkpoint:
    try:
        return read_checkpoint(path)
    except Damaged:
        if not restore(path):
            raise
    return read_checkpoint(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint, every byte as its manifest says and all of it readable; else Damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = verify_checkpoint(path)
    try:
        tensors = load_file(path / TENSORS)
        state = json.loads((path / STATE).read_bytes())
        journal = (path / JOURNAL).read_bytes()
    except (SafetensorError, OSError, *_UNREADABLE) as error:
        raise Damaged("its content cannot be read", why=str(error)[:200], where=str(path)) from error
    if not isinstance(state, dict):
        raise Damaged(f"{STATE} does not hold a state", where=str(path))
    return Checkpoint(step=manifest.step, tensors=tensors, state=state, score=manifest.score, journal=journal)


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Read every byte; the manifest if all is as it says."""
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise Damaged("its manifest cannot be read", why=str(error), where=str(path)) from error
    manifest = CheckpointManifest.from_json(text, where=str(path))
    if path.name.startswith("step-") and path.name != step_name(manifest.step):
        raise Damaged(f"its manifest belongs to step {manifest.step}", where=str(path))
    for name in CONTENT:
        try:
            actual = file_digest(path / name)
        except OSError as error:
            raise Damaged(f"{name} cannot be read", why=str(error), where=str(path)) from error
        if actual != manifest.sha256[name]:
            raise Damaged(f"{name} has other bytes than were written", where=str(path))
    return manifest


def list_saved(folder: Path) -> list[SavedCheckpoint]:
    """Step and score of each checkpoint with a readable manifest; nothing else of it is read."""
    return [saved for saved, _ in _manifests(folder)]


def remove_partial(folder: Path) -> None:
    """Remove what killed writers left half-made. Only for the one process that holds the run."""
    for part in folder.glob(".step-*.part"):
        shutil.rmtree(part, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Make the folder so that it, too, survives a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    disk.make_folder(folder)
    for path in missing:
        sync_folder(path.parent)


def _manifests(folder: Path) -> list[tuple[SavedCheckpoint, Path]]:
    found = []
    for path in _folders(folder):
        try:
            manifest = CheckpointManifest.from_json((path / MANIFEST).read_bytes(), where=str(path))
        except (OSError, Damaged):
            continue
        found.append((manifest.saved, path))
    return found


def _folders(folder: Path) -> list[Path]:
    return (
        sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name)) if folder.exists() else []
    )


class CheckpointMismatch(UserMistake):
    """A checkpoint was made with other settings, other data or for another base."""


def require_same_run(mine: dict[str, Any], held: dict[str, Any], *, step: int, where: str) -> None:
    differing = [name for name in mine if mine[name] != held.get(name)]
    if not differing:
        return
    raise CheckpointMismatch(
        f"the checkpoint of step {step} belongs to another run",
        why="; ".join(_describe(name, mine[name], held.get(name)) for name in differing),
        fix="restore the settings it was made with, or remove the checkpoints to start over",
        where=where,
    )


def _describe(name: str, mine: Any, held: Any) -> str:
    if isinstance(mine, dict) and isinstance(held, dict):
        keys = [key for key in {**held, **mine} if mine.get(key) != held.get(key)]
        return "; ".join(_describe(f"{name}.{key}", mine.get(key), held.get(key)) for key in keys)
    return f"{name} was {_short(held)} and is {_short(mine)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"


def write_tensors(path: Path, tensors: "dict[str, Tensor]") -> tuple[str, int]:
    """Write and sync; the sha256 and the length of what was meant to be written."""
    digest, length = hashlib.sha256(), 0
    # Hashing takes as long as writing, and needs nothing of it.
    with path.open("wb") as handle, ThreadPoolExecutor(1, thread_name_prefix="hash") as hasher:
        for part in _file_parts(tensors):
            hashed = hasher.submit(digest.update, part)
            handle.write(part)
            length += len(part)
        handle.flush()
        os.fsync(handle.fileno())
        hashed.result()
    return digest.hexdigest(), length


def _file_parts(tensors: "dict[str, Tensor]") -> Iterator[bytes | memoryview]:
    """The header, then the bytes of each tensor."""
    import torch

    ordered = in_file_order(
        TensorEntry(
            name,
            TYPE_NAMES[str(tensor.dtype).removeprefix("torch.")],
            list(tensor.shape),
            tensor.element_size(),
            tensor.numel() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    )
    yield encode_header(ordered)
    for entry in ordered:
        flat = tensors[entry.name].detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            yield flat.view(torch.uint8).numpy().data
