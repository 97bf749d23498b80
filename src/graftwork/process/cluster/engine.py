"""A map over pieces on this machine or on a cluster, with the results in the order of the pieces.

In: pieces and the work on one of them. Out: the results. A cluster that is lost in the middle costs nothing
but its time: this machine goes on with the pieces that are left.
"""

import logging
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Generic, Protocol

from graftwork.files.disk import make_folder
from graftwork.process.cluster.pieces import EngineLost, MapReport, Piece, RemoteWork, Result, read_journals
from graftwork.process.pool import work_in_order
from graftwork.records.errors import EnvironmentLacks

log = logging.getLogger(__name__)


class PieceRunner(Protocol):
    """A cluster that works on encoded pieces."""

    name: str

    def run(
        self, pieces: Iterator[bytes], *, entry: str, shared: bytes, folder: Path
    ) -> Generator[None, None, None]:
        """Yield once for each piece, in order, when it is done. Raises `EngineLost` if the cluster is gone.

        `folder` is new, and all nodes see it.
        """

    def stop(self) -> None:
        """Let `run`, in another thread, end without the pieces that are left, and nothing at the cluster."""


@dataclass(frozen=True)
class MapWork(Generic[Piece, Result]):
    """The work on one piece: in this process, and, where it has a remote form, on a cluster."""

    do: Callable[[Piece], Result]
    prepare: Callable[..., None] | None = None
    with_arguments: tuple[Any, ...] = ()
    remote: Callable[[], RemoteWork[Piece, Result] | None] = lambda: None
    """Made only if it is needed. None: this work cannot leave this machine."""


@dataclass
class MapEngine:
    """Where maps run. Without a runner: on the cores of this machine."""

    runner: PieceRunner | None = None
    folder: Path = Path()
    """Shared with all nodes; each map has a folder of its own in it."""
    processes: int | None = None
    say: Callable[[str], None] = log.info
    reports: list[MapReport] = field(default_factory=list)

    def map(self, pieces: Iterable[Piece], work: MapWork[Piece, Result]) -> Iterator[Result]:
        """Yield the results in the order of the pieces."""
        waiting = iter(pieces)
        first = list(islice(waiting, 2))
        left = chain(first, waiting)
        # A single piece does not wait for a cluster.
        remote = work.remote() if self.runner is not None and len(first) > 1 else None
        if self.runner is None or remote is None:
            yield from self._here(left, work)
            return
        taken: deque[Piece] = deque()

        def feed() -> Iterator[bytes]:
            for piece in left:
                taken.append(piece)
                yield remote.encode(piece)

        folder = self.folder / uuid.uuid4().hex[:12]
        make_folder(folder)
        done = self.runner.run(feed(), entry=remote.entry, shared=remote.shared, folder=folder)
        try:
            for _ in done:
                result = remote.collect(taken[0])
                if result is None:
                    raise _not_shared(self.runner.name, folder)
                taken.popleft()
                yield result
        except EngineLost as lost:
            self.say(f"{self.runner.name}: {lost}; this machine continues with the rest")
            yield from self._here(chain(taken, left), work)
        finally:
            done.close()
            self._report(folder)

    def _here(self, pieces: Iterable[Piece], work: MapWork[Piece, Result]) -> Iterator[Result]:
        return work_in_order(
            pieces,
            work.do,
            prepare=work.prepare,
            with_arguments=work.with_arguments,
            processes=self.processes,
        )

    def _report(self, folder: Path) -> None:
        report = read_journals(folder)
        if report.nodes:
            self.reports.append(report)
            self.say(f"{self.runner.name if self.runner else 'local'}: {report}")
        shutil.rmtree(folder, ignore_errors=True)


def _not_shared(name: str, folder: Path) -> EnvironmentLacks:
    return EnvironmentLacks(
        f"a node of {name} finished a piece, and its file is not here",
        why="the project's folder is not the same on all nodes",
        fix="put the project on a file system that all nodes share, under the same path",
        where=str(folder),
    )
