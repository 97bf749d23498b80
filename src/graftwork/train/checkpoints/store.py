"""The checkpoint store of one run: writes checkpoints in a thread, keeps them by policy, mirrors them.

In: a checkpoint whose tensors no longer change (`HostCopies`). Out: the same on disk and verified while
training continues. A failed write is a message and not the end of the run: the last good checkpoint remains.
One write at a time; the next save waits for the one before.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from graftwork.files.disk import explain_os_error
from graftwork.records.errors import GraftError
from graftwork.train.checkpoints.checkpoint import (
    Checkpoint,
    SavedCheckpoint,
    best_good,
    latest_good,
    list_saved,
    remove_partial,
    write_checkpoint,
)

if TYPE_CHECKING:
    from torch import Tensor

    from graftwork.train.checkpoints.mirror import FsspecMirror


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
        """How long a checkpoint takes until it is safe everywhere, with one that is being written
        before it; None before the first."""
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
        """The newest good checkpoint of this run: from disk, or from the mirror where it is damaged here."""
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
        begun = time.perf_counter()
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
        self._write_seconds = max(self._write_seconds, time.perf_counter() - begun)
        self._written.put((path, checkpoint.step))
        if self._mirror is not None:
            self._mirror.send(path, checkpoint.step)

    def _complain(self, step: int, error: GraftError) -> str:
        good = [saved.step for saved in list_saved(self._folder)]
        rest = f"that of step {max(good)} is still good" if good else "there is none before it"
        return (
            f"the checkpoint of step {step} could not be written: {error.what}"
            f"{f' ({error.why})' if error.why else ''}; training continues, and {rest}"
        )


class ReadOnlyCheckpointStore(CheckpointStore):
    """For the other processes: finds what the first one saved, and saves nothing."""

    def open(self) -> Checkpoint | None:
        return self._found(*latest_good(self._folder))

    def save(self, checkpoint: Checkpoint) -> None:
        del checkpoint


ALIGNED = 64
BUFFERS = 2


class HostCopies:
    """Copies of tensors on the host, in pinned memory for those of a GPU.

    Pinned memory is fast to copy to but slow to allocate, so two buffers take turns: one is written to disk
    while the other is filled. The caller must be done with the copies of the call before last.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor | None] = [None] * BUFFERS
        self._turn = 0

    def take(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Copies of all tensors, complete when this returns."""
        import torch

        on_card = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device.type == "cuda"}
        copies = dict(zip(on_card, self._allocate(list(on_card.values())), strict=True))
        for name, tensor in on_card.items():
            copies[name].copy_(tensor, non_blocking=True)
        if on_card:
            torch.cuda.synchronize()
        return {
            name: copies[name] if name in copies else tensor.detach().to("cpu", copy=True)
            for name, tensor in tensors.items()
        }

    def _allocate(self, tensors: "list[Tensor]") -> "list[Tensor]":
        """Space for each tensor in the next buffer."""
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        buffer = self._buffers[self._turn]
        if end and (buffer is None or buffer.numel() < end):
            buffer = self._buffers[self._turn] = pinned_buffer(end)
        self._turn = (self._turn + 1) % BUFFERS
        return [
            buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(begins, tensors, strict=True)
            if buffer is not None
        ]


def pinned_buffer(size: int) -> "Tensor":
    """Host memory that a GPU can write to directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
