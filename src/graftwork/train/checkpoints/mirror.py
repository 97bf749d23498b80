"""A mirror for checkpoints at any fsspec URL, for machines that vanish.

In: the run's checkpoint folder, whenever it has something new. Out: the newest and the best checkpoint at the
URL, manifest last, so that a checkpoint with a manifest is complete. Works in a thread of its own; a failed
copy is a message and is retried. Only a run that would start over because its mirror cannot be read does not
start.
"""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

from graftwork.files.disk import atomic_folder
from graftwork.files.remote import RemoteFiles
from graftwork.records.errors import Damaged, EnvironmentLacks
from graftwork.text.messages import redact_login
from graftwork.train.checkpoints.checkpoint import (
    CONTENT,
    MANIFEST,
    CheckpointManifest,
    SavedCheckpoint,
    best_of,
    list_saved,
    make_folder,
    step_name,
    steps_to_keep,
    verify_checkpoint,
)

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
                there = self._steps()
                step = next((step for step in sorted(there, reverse=True) if self._bring(step, folder)), None)
                if step is not None:
                    self._messages.put(f"the checkpoint of step {step} was fetched from the mirror")
                    best = best_of([saved for saved in self._look_at(there) if saved.step < step])
                    if best is not None:
                        self._bring(best.step, folder)
            except Exception as error:  # whatever a network library may raise
                self._messages.put(f"the mirror cannot be read: {self._say(error)}")
                if attempt == LAST_TRIES:
                    raise EnvironmentLacks(
                        f"the mirror cannot be read: {self._say(error)}",
                        why="there is no checkpoint on disk; without the mirror the run would start over",
                        fix="make the mirror readable, or remove `train.run.mirror` to start over",
                        where="train.run.mirror",
                    ) from error
                time.sleep(pause * 2**attempt)
            else:
                return

    def restore(self, path: Path) -> bool:
        """Replace a damaged checkpoint here by its copy. An older one is there if that fails: asked once."""
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
                    raise Damaged("one of its files is missing", why=self._say(missing)) from missing
                (temporary / MANIFEST).write_text(manifest.to_json())
                verify_checkpoint(temporary)
                # Only a damaged one can be there.
                shutil.rmtree(folder / step_name(step), ignore_errors=True)
        except Damaged as damage:
            self._distrusted.add(step)
            self._messages.put(f"checkpoint {step_name(step)} of the mirror is passed over: {damage.what}")
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
        there = self._steps()
        stay = steps_to_keep(self._look_at(there), verified=newest.step, newest=self._keep)
        for step in sorted(there - stay):
            if step < newest.step:
                remote = self._files.path(step_name(step))
                if self._files.size(f"{step_name(step)}/{MANIFEST}") is not None:
                    self._files.system.rm_file(f"{remote}/{MANIFEST}")
                if self._files.system.exists(remote):
                    self._files.system.rm(remote, recursive=True)

    def _upload(self, path: Path, saved: SavedCheckpoint) -> None:
        begun = time.perf_counter()
        manifest = CheckpointManifest.from_json((path / MANIFEST).read_bytes(), where=str(path))
        for name in CONTENT:
            copy, size = name_of_copy(saved.step, name, manifest), manifest.sizes[name]
            if saved.step not in self._distrusted and self._files.size(copy) == size:
                continue
            self._files.put(path / name, copy)
            if self._files.size(copy) != size:
                raise OSError(f"{name} arrived with another length than it has")
        self._files.write(f"{path.name}/{MANIFEST}", manifest.to_json().encode())
        self._known[saved.step] = saved
        self._distrusted.discard(saved.step)
        self._seconds = max(self._seconds, time.perf_counter() - begun)

    def _look_at(self, there: set[int]) -> list[SavedCheckpoint]:
        """Step and score of each checkpoint; each manifest is read once."""
        for step in there - self._known.keys():
            try:
                self._known[step] = self._manifest(step).saved
            except (FileNotFoundError, Damaged):
                continue
        return [self._known[step] for step in there & self._known.keys()]

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
        found = (re.fullmatch(r"step-(\d+)", str(name).rstrip("/").rpartition("/")[2]) for name in names)
        return {int(match[1]) for match in found if match}

    def _manifest(self, step: int) -> CheckpointManifest:
        content = self._files.read(f"{step_name(step)}/{MANIFEST}")
        return CheckpointManifest.from_json(content, where=step_name(step))


def name_of_copy(step: int, name: str, manifest: CheckpointManifest) -> str:
    """It contains the hash, so a file of full length is the right one."""
    return f"{step_name(step)}/{name}.{manifest.sha256[name][:16]}"
