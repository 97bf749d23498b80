"""Checkpoints of a run: the format on disk, the store that keeps them, and a mirror at any fsspec URL.

Input: the state of a run whose tensors no longer change (`HostCopies`). Output: a folder with a manifest of
hashes, written and verified in a thread; the newest or the best intact one. The newest few and the best one
stay, and always the one that was just verified. A failed write is a message and not the end of the run. The
mirror is for machines that vanish: its manifest comes last, and a failed copy is retried. A job's file holds
no login: the environment passes it.
"""

import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from graftwork.files import disk
from graftwork.files.disk import atomic_folder, explain_os_error, file_digest, sync_folder, write_atomic
from graftwork.files.remote import RemoteFiles
from graftwork.files.safetensors import TYPE_NAMES, TensorEntry, encode_header, in_file_order
from graftwork.process import clock
from graftwork.records.base import HIDDEN, hide_login
from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.records.run import TrainJob
from graftwork.text.redact import redact_login
from graftwork.text.wording import truncate
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint from the policy's point of view. Smaller scores are better; most have none."""

    step: int
    score: float | None = None


def steps_to_keep(checkpoints: Sequence[SavedCheckpoint], *, verified: int, newest: int) -> frozenset[int]:
    """The steps that stay once the checkpoint of step `verified` is known to be good.

    Checkpoints after `verified` do not count: the run went back because they are damaged.
    """
    past = [saved for saved in checkpoints if saved.step <= verified]
    recent = sorted({verified, *(saved.step for saved in past)})[-max(newest, 1) :]
    best = best_of(past)
    return frozenset(recent) | ({best.step} if best else frozenset())


def best_of(checkpoints: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """The checkpoint with the smallest score, the earliest one on a tie; None without evaluations."""
    looked = [saved for saved in checkpoints if is_score(saved.score)]
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
"""Errors that arbitrary JSON can lead to, including deep nesting and infinite numbers."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue.

    `score` is that of the evaluation at this step, if there was one.
    """

    step: int
    tensors: "dict[str, Tensor]"
    state: dict[str, Any]
    score: float | None = None
    journal: bytes = b""


@dataclass(frozen=True)
class CheckpointManifest:
    """The files of a checkpoint's folder, with their hashes."""

    step: int
    sha256: dict[str, str]
    sizes: dict[str, int]
    score: float | None = None

    def to_json(self) -> str:
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str) -> "CheckpointManifest":
        try:
            fields = json.loads(text)
            score = fields.get("score")
            manifest = cls(
                step=_whole_number(fields["step"]),
                sha256={name: _digest(fields["sha256"][name]) for name in CONTENT},
                sizes={name: _whole_number(fields["sizes"][name]) for name in CONTENT},
                score=None if score is None else float(score),
            )
        except _UNREADABLE as error:
            raise Corrupted("its manifest cannot be read", why=str(error)[:200], where=where) from error
        return manifest

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
    """Write and verify, and only then remove old ones, except those that are being read (`spare`)."""
    path = folder / step_name(checkpoint.step)
    if path.exists():
        try:
            # Stopped right after a resume: this step is safe already, and a good one is never removed.
            verify_checkpoint(path)
        except Corrupted:
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
    for existing in _folders(folder):
        if existing.name not in map(step_name, stay):
            shutil.rmtree(existing, ignore_errors=True)
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
        except Corrupted as damage:
            complaints.append(f"checkpoint {path.name} is skipped: {damage.what}")
    return None, tuple(complaints)


def _read_or_restore(path: Path, restore: Restore) -> Checkpoint:
    try:
        return read_checkpoint(path)
    except Corrupted:
        if not restore(path):
            raise
    return read_checkpoint(path)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint, every byte as its manifest says and all of it readable; else Corrupted."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    manifest = verify_checkpoint(path)
    try:
        tensors = load_file(path / TENSORS)
        state = json.loads((path / STATE).read_bytes())
        journal = (path / JOURNAL).read_bytes()
    except (SafetensorError, OSError, *_UNREADABLE) as error:
        raise Corrupted("its content cannot be read", why=str(error)[:200], where=str(path)) from error
    if not isinstance(state, dict):
        raise Corrupted(f"{STATE} does not hold a state", where=str(path))
    return Checkpoint(step=manifest.step, tensors=tensors, state=state, score=manifest.score, journal=journal)


def verify_checkpoint(path: Path) -> CheckpointManifest:
    """Read every byte; return the manifest if all match."""
    try:
        text = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise Corrupted("its manifest cannot be read", why=str(error), where=str(path)) from error
    manifest = CheckpointManifest.from_json(text, where=str(path))
    if path.name.startswith("step-") and path.name != step_name(manifest.step):
        raise Corrupted(f"its manifest belongs to step {manifest.step}", where=str(path))
    for name in CONTENT:
        try:
            actual = file_digest(path / name)
        except OSError as error:
            raise Corrupted(f"{name} cannot be read", why=str(error), where=str(path)) from error
        if actual != manifest.sha256[name]:
            raise Corrupted(f"{name} differs from what was written", where=str(path))
    return manifest


def list_saved(folder: Path) -> list[SavedCheckpoint]:
    """Step and score of each checkpoint with a readable manifest; nothing else of it is read."""
    return [saved for saved, _ in _manifests(folder)]


def remove_partial(folder: Path) -> None:
    """Remove incomplete files of killed writers. Only for the one process that holds the run."""
    for part in folder.glob(".step-*.part"):
        shutil.rmtree(part, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Create the folder so that it also survives a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    disk.make_folder(folder)
    for path in missing:
        sync_folder(path.parent)


def _manifests(folder: Path) -> list[tuple[SavedCheckpoint, Path]]:
    checkpoints = []
    for path in _folders(folder):
        try:
            manifest = CheckpointManifest.from_json((path / MANIFEST).read_bytes(), where=str(path))
        except (OSError, Corrupted):
            continue
        checkpoints.append((manifest.saved, path))
    return checkpoints


def _folders(folder: Path) -> list[Path]:
    return (
        sorted(folder.glob("step-*"), key=lambda path: (len(path.name), path.name)) if folder.exists() else []
    )


class CheckpointMismatch(UserError):
    """A checkpoint was made with other settings, other data or for another base."""


def require_same_run(mine: dict[str, Any], saved: dict[str, Any], *, step: int, where: str) -> None:
    differing = [name for name in mine if mine[name] != saved.get(name)]
    if not differing:
        return
    raise CheckpointMismatch(
        f"the checkpoint of step {step} belongs to another run",
        why="; ".join(_describe(name, mine[name], saved.get(name)) for name in differing),
        fix="restore the settings it was made with, or remove the checkpoints to start over",
        where=where,
    )


def _describe(name: str, mine: Any, saved: Any) -> str:
    if isinstance(mine, dict) and isinstance(saved, dict):
        keys = [key for key in {**saved, **mine} if mine.get(key) != saved.get(key)]
        return "; ".join(_describe(f"{name}.{key}", mine.get(key), saved.get(key)) for key in keys)
    return f"{name} was {truncate(str(saved), 40)} and is {truncate(str(mine), 40)}"


def write_tensors(path: Path, tensors: "dict[str, Tensor]") -> tuple[str, int]:
    """Write and sync; returns the SHA-256 and the length of the intended content."""
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


class CheckpointStore:
    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        mirror: "FsspecMirror | None" = None,
        patience: Callable[[], float] = lambda: 600.0,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._mirror = mirror
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._written: SimpleQueue[tuple[Path, int]] = SimpleQueue()
        self._write_seconds = 0.0

    @property
    def seconds(self) -> float | None:
        """Time until a checkpoint is safe everywhere, including one that is being written before it; None
        before the first.
        """
        if not self._write_seconds:
            return None
        once = self._write_seconds + (self._mirror.seconds if self._mirror else 0.0)
        busy = self._thread is not None and self._thread.is_alive()
        return once * (2 if busy else 1)

    @property
    def saved(self) -> list[SavedCheckpoint]:
        self._join()
        return list_saved(self._folder)

    def open(self) -> Checkpoint | None:
        """The newest good checkpoint of this run: from disk, or from the mirror if it is damaged here."""
        remove_partial(self._folder)
        checkpoint = self._found(*latest_good(self._folder, self._restore))
        if checkpoint is None and self._mirror is not None:
            self._mirror.fetch(self._folder)
            checkpoint = self._found(*latest_good(self._folder))
        return checkpoint

    def best(self) -> Checkpoint | None:
        """The checkpoint with the best evaluation."""
        self._join()
        return self._found(*best_good(self._folder, self._restore))

    def _restore(self, path: Path) -> bool:
        return self._mirror is not None and self._mirror.restore(path)

    def save(self, checkpoint: Checkpoint) -> None:
        """Start writing; returns as soon as the previous write is done."""
        self._join()
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current write is done."""
        self._join()

    def settle(self) -> None:
        """Wait until the last checkpoint is written and, within the patience, mirrored."""
        self._join()
        if self._mirror is not None:
            self._mirror.finish(self._patience())

    def messages(self) -> Iterator[str]:
        """Messages since the last call."""
        while not self._messages.empty():
            yield self._messages.get()
        if self._mirror is not None:
            yield from self._mirror.messages()

    def written(self) -> Iterator[tuple[Path, int]]:
        """The checkpoints written since the last call."""
        while not self._written.empty():
            yield self._written.get()

    def _found(self, checkpoint: Checkpoint | None, complaints: tuple[str, ...]) -> Checkpoint | None:
        for complaint in complaints:
            self._messages.put(complaint)
        return checkpoint

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def _write(self, checkpoint: Checkpoint) -> None:
        started_at = time.perf_counter()
        try:
            spare = self._mirror.in_use if self._mirror else frozenset()
            path = write_checkpoint(self._folder, checkpoint, keep=self._keep, spare=spare)
        except GraftError as error:
            self._messages.put(self._complain(checkpoint.step, error))
            return
        except OSError as error:
            self._messages.put(self._complain(checkpoint.step, explain_os_error(error, self._folder)))
            return
        except BaseException as bug:  # a bug, which the loop's thread must raise
            self._bug = bug
            return
        self._write_seconds = max(self._write_seconds, time.perf_counter() - started_at)
        self._written.put((path, checkpoint.step))
        if self._mirror is not None:
            self._mirror.send(path, checkpoint.step)

    def _complain(self, step: int, error: GraftError) -> str:
        good = [saved.step for saved in list_saved(self._folder)]
        fallback = f"that of step {max(good)} is still good" if good else "there is none before it"
        return (
            f"the checkpoint of step {step} could not be written: {error.what}"
            f"{f' ({error.why})' if error.why else ''}; training continues, and {fallback}"
        )


class ReadOnlyCheckpointStore(CheckpointStore):
    """For the other processes: finds what the first one saved, and saves nothing."""

    def open(self) -> Checkpoint | None:
        return self._found(*latest_good(self._folder))

    def save(self, checkpoint: Checkpoint) -> None:
        del checkpoint


LONGEST_PAUSE = 300.0
LAST_TRIES = 3


class FsspecMirror:
    def __init__(self, url: str, *, run_id: str, keep: int, first_pause: float = 2.0) -> None:
        self._url = url
        self._files = RemoteFiles(url, kind="mirror", setting="train.run.mirror", folder=run_id)
        self._keep = keep
        self._first_pause = first_pause
        self._folder: Path | None = None
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._known: dict[int, SavedCheckpoint] = {}
        self._distrusted: set[int] = set()
        self._in_use: frozenset[int] = frozenset()
        self._seconds = 0.0
        self._change = threading.Condition()
        self._dirty = self._busy = self._hurry = False
        self._last_tries = 0
        self._thread: threading.Thread | None = None

    @property
    def in_use(self) -> frozenset[int]:
        """Steps whose folders are being read."""
        return self._in_use

    @property
    def seconds(self) -> float:
        """The longest time that copying a checkpoint has taken."""
        return self._seconds

    def messages(self) -> Iterator[str]:
        """Problems since the last call."""
        while not self._messages.empty():
            yield self._messages.get()

    def send(self, path: Path, step: int) -> None:
        """Copy the checkpoint soon, in a thread; never waits."""
        with self._change:
            self._folder = path.parent
            self._dirty = True
            if self._thread is None:
                # Waiting for it has a limit: a hanging network must not keep the process alive.
                self._thread = threading.Thread(target=self._work, daemon=True, name="mirror")
                self._thread.start()
            self._change.notify_all()

    def finish(self, seconds: float) -> None:
        """Wait until the last checkpoint is copied: a few last tries, at most this long."""
        with self._change:
            self._hurry, self._last_tries = True, 0
            self._change.notify_all()
            self._change.wait_for(lambda: self._is_done() or self._last_tries >= LAST_TRIES, timeout=seconds)
            self._hurry = False
            done = self._is_done()
        if not done:
            self._messages.put("the mirror does not have the last checkpoint; the one here is good")

    def fetch(self, folder: Path) -> None:
        """Fetch the newest good checkpoint and the best one, if the mirror has any."""
        pause = min(self._first_pause, 2.0)
        for attempt in range(1, LAST_TRIES + 1):
            try:
                remote_steps = self._steps()
                step = next(
                    (step for step in sorted(remote_steps, reverse=True) if self._bring(step, folder)), None
                )
                if step is not None:
                    self._messages.put(f"the checkpoint of step {step} was fetched from the mirror")
                    best = best_of([saved for saved in self._look_at(remote_steps) if saved.step < step])
                    if best is not None:
                        self._bring(best.step, folder)
            except Exception as error:  # whatever a network library may raise
                self._messages.put(f"the mirror cannot be read: {self._say(error)}")
                if attempt == LAST_TRIES:
                    raise EnvironmentFailure(
                        f"the mirror cannot be read: {self._say(error)}",
                        why="there is no checkpoint on disk; without the mirror the run would start over",
                        fix="make the mirror readable, or remove `train.run.mirror` to start over",
                        where="train.run.mirror",
                    ) from error
                time.sleep(pause * 2**attempt)
            else:
                return

    def restore(self, path: Path) -> bool:
        """Replace a damaged checkpoint here by its copy. If that fails an older one is used, so the copy is
        tried once.
        """
        try:
            step = next((step for step in self._steps() if step_name(step) == path.name), None)
            restored = step is not None and self._bring(step, path.parent)
        except Exception as error:  # whatever a network library may raise
            self._messages.put(f"the mirror cannot be read: {self._say(error)}")
            return False
        if restored:
            self._messages.put(f"the damaged checkpoint of step {step} was replaced by that of the mirror")
        return restored

    def _say(self, error: Exception) -> str:
        return redact_login(error, self._url)

    def _bring(self, step: int, folder: Path) -> bool:
        """Copy one checkpoint here; it gets its name only if every byte matches its manifest."""
        make_folder(folder)
        try:
            with atomic_folder(folder / step_name(step)) as temporary:
                try:
                    manifest = self._manifest(step)
                    for name in CONTENT:
                        source = self._files.path(name_of_copy(step, name, manifest))
                        self._files.system.get_file(source, str(temporary / name))
                except FileNotFoundError as missing:
                    raise Corrupted("one of its files is missing", why=self._say(missing)) from missing
                (temporary / MANIFEST).write_text(manifest.to_json())
                verify_checkpoint(temporary)
                # Only a damaged one can be there.
                shutil.rmtree(folder / step_name(step), ignore_errors=True)
        except Corrupted as damage:
            self._distrusted.add(step)
            self._messages.put(f"checkpoint {step_name(step)} of the mirror is skipped: {damage.what}")
            return False
        return True

    def _work(self) -> None:
        failures = 0
        while True:
            with self._change:
                self._change.wait_for(lambda: self._dirty)
                self._dirty, self._busy = False, True
                folder = self._folder
            assert folder is not None
            try:
                self._copy(folder)
            except Exception as error:  # whatever a network library may raise
                failures += 1
                self._messages.put(f"the mirror failed {failures} time(s): {self._say(error)}; trying again")
                # Longer after each failure; briefly if the run waits for the mirror.
                pause = min(self._first_pause * 2 ** min(failures - 1, 20), LONGEST_PAUSE)
                with self._change:
                    self._dirty, self._busy = True, False
                    self._last_tries += 1
                    self._change.notify_all()
                    if not self._hurry:
                        self._change.wait_for(lambda: self._hurry, timeout=pause)
                if self._hurry:
                    time.sleep(min(self._first_pause, 1.0))
            else:
                failures = 0
                with self._change:
                    self._busy = False
                    self._change.notify_all()

    def _is_done(self) -> bool:
        return not self._dirty and not self._busy

    def _copy(self, folder: Path) -> None:
        """Copy the newest checkpoint, then the best one; then remove old ones."""
        here = list_saved(folder)
        if not here:
            return
        newest, best = max(here, key=lambda saved: saved.step), best_of(here)
        for saved in dict.fromkeys((newest, best or newest)):
            self._in_use = frozenset({saved.step})
            try:
                self._upload(folder / step_name(saved.step), saved)
            except FileNotFoundError:
                # A newer checkpoint has replaced it; the next round copies that one.
                if (folder / step_name(saved.step) / MANIFEST).exists():
                    raise
            finally:
                self._in_use = frozenset()
        # By the same policy as on disk. Later steps are not known to be bad, so they stay.
        remote_steps = self._steps()
        stay = steps_to_keep(self._look_at(remote_steps), verified=newest.step, newest=self._keep)
        for step in sorted(remote_steps - stay):
            if step < newest.step:
                remote = self._files.path(step_name(step))
                if self._files.size(f"{step_name(step)}/{MANIFEST}") is not None:
                    self._files.system.rm_file(f"{remote}/{MANIFEST}")
                if self._files.system.exists(remote):
                    self._files.system.rm(remote, recursive=True)

    def _upload(self, path: Path, saved: SavedCheckpoint) -> None:
        started_at = time.perf_counter()
        manifest = CheckpointManifest.from_json((path / MANIFEST).read_bytes(), where=str(path))
        for name in CONTENT:
            copy, size = name_of_copy(saved.step, name, manifest), manifest.sizes[name]
            if saved.step not in self._distrusted and self._files.size(copy) == size:
                continue
            self._files.put(path / name, copy)
            if self._files.size(copy) != size:
                raise OSError(f"{name} arrived with a different length")
        self._files.write(f"{path.name}/{MANIFEST}", manifest.to_json().encode())
        self._known[saved.step] = saved
        self._distrusted.discard(saved.step)
        self._seconds = max(self._seconds, time.perf_counter() - started_at)

    def _look_at(self, steps: set[int]) -> list[SavedCheckpoint]:
        """Step and score of each checkpoint; each manifest is read once."""
        for step in steps - self._known.keys():
            try:
                self._known[step] = self._manifest(step).saved
            except (FileNotFoundError, Corrupted):
                continue
        return [self._known[step] for step in steps & self._known.keys()]

    def _steps(self) -> set[int]:
        """Steps that have files in the mirror."""
        self._files.system.invalidate_cache()
        try:
            names = self._files.system.ls(self._files.root, detail=False)
        except FileNotFoundError as missing:
            if not self._files.has_bucket():
                bucket = self._files.root.partition("/")[0]
                raise OSError(f"there is no bucket {bucket!r}; create it, or fix its name") from missing
            return set()
        matches = (re.fullmatch(r"step-(\d+)", str(name).rstrip("/").rpartition("/")[2]) for name in names)
        return {int(match[1]) for match in matches if match}

    def _manifest(self, step: int) -> CheckpointManifest:
        content = self._files.read(f"{step_name(step)}/{MANIFEST}")
        return CheckpointManifest.from_json(content, where=step_name(step))


def name_of_copy(step: int, name: str, manifest: CheckpointManifest) -> str:
    """It contains the hash, so a file of full length is the correct one."""
    return f"{step_name(step)}/{name}.{manifest.sha256[name][:16]}"


MIRROR_PATIENCE = 600.0
MIRRORS_VARIABLE = "GRAFT_TRAIN_MIRRORS"
"""Variable with the addresses of mirrors that contain a login: a job's file is stored, and contains none."""


def open_checkpoint_store(
    job: TrainJob, settings: TrainSettings, *, deadline: float | None
) -> CheckpointStore:
    """Report a mirror that cannot work before training starts."""
    mirror, address = None, find_mirror(job, settings, passed=_passed_mirrors())
    if address is not None:
        mirror = FsspecMirror(address, run_id=job.run_id, keep=settings.keep_checkpoints)

    def patience() -> float:
        return MIRROR_PATIENCE if deadline is None else max(deadline - clock.steady() - 1, 0.0)

    return CheckpointStore(
        Path(job.folder) / CHECKPOINTS, keep=settings.keep_checkpoints, mirror=mirror, patience=patience
    )


def pass_mirrors(mirrors: Mapping[str, str | None]) -> dict[str, str]:
    """The environment with the addresses of the runs' mirrors, by the run's id."""
    secret = {run: url for run, url in mirrors.items() if url is not None and hide_login(url) != url}
    return {MIRRORS_VARIABLE: json.dumps(secret)} if secret else {}


@cache
def _passed_mirrors() -> dict[str, str]:
    """What `pass_mirrors` passed. Removed from the environment, so that child processes do not inherit it."""
    passed: dict[str, str] = json.loads(os.environ.pop(MIRRORS_VARIABLE, "{}"))
    return passed


def find_mirror(job: TrainJob, settings: TrainSettings, *, passed: Mapping[str, str]) -> str | None:
    """The mirror's address: from the job, or with its login as it was passed, by the run's id."""
    address = passed.get(job.run_id) or settings.run.mirror
    if address is not None and HIDDEN in address:
        raise EnvironmentFailure(
            "the login of the mirror is not known here",
            why="a job's file holds no secrets: `graft train` passes them to the process that it starts",
            fix="start the run with `graft train`",
            where="train.run.mirror",
        )
    return address or None
