"""The checkpoints of one run: written behind the loop's back, kept by the policy, mirrored.

In: a checkpoint whose tensors nobody changes any more. Out: it, on disk and verified, while the next
steps go on. A write that fails is a word and not the end of the run: the last good one still stands.
One write at a time; who saves again waits for the one before.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

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
from graftwork.train.run_folder import CHECKPOINTS
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor


class CheckpointMirror(Protocol):
    """What the store asks of a mirror."""

    def send(self, path: Path, step: int) -> None:
        """Copy it there soon; never waits."""

    def fetch(self, folder: Path) -> None:
        """Bring the newest good checkpoint from there into `folder`, if there is one.

        EnvironmentLacks where it cannot be told whether there is.
        """

    def words(self) -> Iterator[str]:
        """What went wrong since the last time somebody asked."""

    def finish(self, seconds: float) -> None:
        """Wait until the last one is there, but not longer than this."""

    @property
    def in_use(self) -> frozenset[int]:
        """Steps whose folders are still read."""

    @property
    def seconds(self) -> float:
        """How long copying one has taken at most."""


class CheckpointStore:
    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        mirror: CheckpointMirror | None = None,
        patience: Callable[[], float] = lambda: 600.0,
    ) -> None:
        self._folder = folder
        self._keep = keep
        self._mirror = mirror
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None
        self._words: SimpleQueue[str] = SimpleQueue()
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
        """The newest good checkpoint of this run, from here or else from the mirror."""
        remove_partial(self._folder)
        checkpoint = self._found(*latest_good(self._folder))
        if checkpoint is None and self._mirror is not None:
            self._mirror.fetch(self._folder)
            checkpoint = self._found(*latest_good(self._folder))
        return checkpoint

    def best(self) -> Checkpoint | None:
        """The checkpoint of the best look."""
        self._join()
        return self._found(*best_good(self._folder))

    def save(self, checkpoint: Checkpoint) -> None:
        """Begin to write; returns as soon as the one before is done."""
        self._join()
        self._thread = threading.Thread(target=self._write, args=(checkpoint,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until what is being written is written here."""
        self._join()

    def settle(self) -> None:
        """Wait until the last checkpoint is written, and with patience until it is mirrored."""
        self._join()
        if self._mirror is not None:
            self._mirror.finish(self._patience())

    def words(self) -> Iterator[str]:
        """What there is to say since the last time somebody asked."""
        while not self._words.empty():
            yield self._words.get()
        if self._mirror is not None:
            yield from self._mirror.words()

    def written(self) -> Iterator[tuple[Path, int]]:
        """The checkpoints that became safe since the last time somebody asked."""
        while not self._written.empty():
            yield self._written.get()

    def _found(self, checkpoint: Checkpoint | None, complaints: tuple[str, ...]) -> Checkpoint | None:
        for complaint in complaints:
            self._words.put(complaint)
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
            self._words.put(self._complain(checkpoint.step, error))
            return
        except OSError as error:
            self._words.put(self._complain(checkpoint.step, explain_os_error(error, self._folder)))
            return
        except BaseException as bug:  # a fault of the program, which the loop's thread must show
            self._bug = bug
            return
        self._write_seconds = max(self._write_seconds, time.perf_counter() - begun)
        self._written.put((path, checkpoint.step))
        if self._mirror is not None:
            self._mirror.send(path, checkpoint.step)

    def _complain(self, step: int, error: GraftError) -> str:
        good = [saved.step for saved in list_saved(self._folder)]
        stands = f"that of step {max(good)} still stands" if good else "there is none before it"
        return (
            f"the checkpoint of step {step} could not be written: {error.what}"
            f"{f' ({error.why})' if error.why else ''}; the run goes on, and {stands}"
        )


class ReadOnlyCheckpointStore(CheckpointStore):
    """Finds what the first process saved, and saves nothing itself."""

    def open(self) -> Checkpoint | None:
        return self._found(*latest_good(self._folder))

    def save(self, checkpoint: Checkpoint) -> None:
        del checkpoint


def open_read_only_store(folder: Path, settings: TrainSettings) -> ReadOnlyCheckpointStore:
    return ReadOnlyCheckpointStore(folder / CHECKPOINTS, keep=settings.keep_checkpoints)


ALIGNED = 64
BUFFERS = 2


class HostCopies:
    """Whoever takes copies must be done with those of the last time but one."""

    def __init__(self) -> None:
        self._lots: list[Tensor | None] = [None] * BUFFERS
        self._turn = 0

    def take(self, tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        """Copies of all of them, complete when this returns."""
        import torch

        on_card = {name: tensor.detach() for name, tensor in tensors.items() if tensor.device.type == "cuda"}
        copies = dict(zip(on_card, self._room(list(on_card.values())), strict=True))
        for name, tensor in on_card.items():
            copies[name].copy_(tensor, non_blocking=True)
        if on_card:
            torch.cuda.synchronize()
        return {
            name: copies[name] if name in copies else tensor.detach().to("cpu", copy=True)
            for name, tensor in tensors.items()
        }

    def _room(self, tensors: "list[Tensor]") -> "list[Tensor]":
        """A place for each in the lot whose turn it is."""
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // ALIGNED) * ALIGNED
        lot = self._lots[self._turn]
        if end and (lot is None or lot.numel() < end):
            lot = self._lots[self._turn] = pinned_buffer(end)
        self._turn = (self._turn + 1) % BUFFERS
        return [
            lot[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for begin, tensor in zip(begins, tensors, strict=True)
            if lot is not None
        ]


def pinned_buffer(size: int) -> "Tensor":
    """Bytes that a card can write to directly."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
