"""The same work on many pieces, on all cores of this machine or on a cluster, in the order of the pieces.

Input: pieces, and a function of the module level that works on one. A few pieces are worked on right here:
small work does not wait for processes to start. A Ctrl-C reaches only this process; the others end with it.

A cluster gets the name of a function, what all pieces have in common, and pieces as bytes; it leaves files in
a folder that all nodes share, named by their content: a piece that is done twice gives the same files. Every
node checks that it has the same code before its first piece. A cluster that is lost in the middle costs
nothing but its time: this machine continues with the pieces that are left. Nothing is pickled for it.

`CallThread` is for calls that all have to come from one thread.
"""

import hashlib
import importlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from graftwork.files.disk import Journal, make_folder
from graftwork.process.machine import count_cores
from graftwork.process.worker import tie_to_parent
from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.version import __version__

log = logging.getLogger(__name__)

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Context = Any

WAITING_PER_PROCESS = 2
"""Pieces queued per process: enough that none is idle, few enough not to pile up in memory."""
FEW_PIECES = 4
"""Fewer pieces are done in this process: a new one takes as long for its imports as for a piece."""


def work_in_order(
    pieces: Iterable[Piece],
    work: Callable[[Piece], Result],
    *,
    prepare: Callable[..., None] | None = None,
    with_arguments: tuple[Any, ...] = (),
    processes: int | None = None,
) -> Iterator[Result]:
    """`prepare(*with_arguments)` is called once in each process before its first piece."""
    count = count_cores() if processes is None else processes
    waiting = iter(pieces)
    first = list(islice(waiting, FEW_PIECES))
    if len(first) < FEW_PIECES or count < 2:
        if prepare is not None and first:
            prepare(*with_arguments)
        yield from map(work, chain(first, waiting))
        return
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), prepare, with_arguments),
    )
    remaining = chain(first, waiting)
    try:
        running = deque(
            _submit(pool, work, piece) for piece in islice(remaining, count * WAITING_PER_PROCESS)
        )
        while running:
            yield running.popleft().result()
            running.extend(_submit(pool, work, piece) for piece in islice(remaining, 1))
    except BrokenProcessPool as error:
        raise EnvironmentFailure(
            "a worker process was killed",
            why="most often the machine ran out of memory",
            fix="run the same command again: what was finished is kept; free some memory first",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Piece], Result], piece: Piece) -> Future[Result]:
    """Processes start here and ignore Ctrl-C from the first moment: `_begin` runs only after imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, piece)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tie_to_parent(parent)
    if prepare is not None:
        prepare(*arguments)


T = TypeVar("T")


class CallThread:
    """Runs calls one after the other, all in the same thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def call(self, work: Callable[[], T], *, seconds: float) -> T:
        future: Future[T] = Future()
        self._calls.put((work, future))
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            if future.done():
                # It is the call's own.
                raise
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    def _work(self) -> None:
        while True:
            work, future = self._calls.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


PACKAGE = Path(__file__).parents[1]
JOURNALS = "journals"
_LENGTH = 8
LONGEST_PIECE = 2**32 - 1
"""Limit of one message to a process of this machine that forwards pieces."""


@dataclass(frozen=True)
class RemoteWork(Generic[Piece, Result]):
    """What a cluster needs to work on pieces."""

    entry: str
    """`module:function` of graftwork; called with what `prepare` returned, the head and the blobs."""
    shared: bytes
    """Data shared by all pieces; `module:prepare` unpacks it once in each process."""
    encode: Callable[[Piece], bytes]
    collect: Callable[[Piece], Result | None]
    """Reads what a node left in the shared folder; None if it is not there."""


class EngineLost(Exception):
    """The cluster is gone or has no node left. Finished work is kept."""


class NodeRefused(EnvironmentFailure):
    """A node cannot take part; the message names it."""


def pack(head: Any, *blobs: bytes) -> bytes:
    """Pack JSON and bytes into one message."""
    text = json.dumps({"head": head, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join((len(text).to_bytes(_LENGTH, "big"), text, *blobs))


def unpack(message: bytes) -> tuple[Any, list[bytes]]:
    """Take apart what `pack` made."""
    view = memoryview(message)
    length = int.from_bytes(view[:_LENGTH], "big")
    body = json.loads(bytes(view[_LENGTH : _LENGTH + length]))
    offset, blobs = _LENGTH + length, []
    for size in body["sizes"]:
        blobs.append(bytes(view[offset : offset + size]))
        offset += size
    if offset != len(view):
        raise ValueError("the message has a different length than its header states")
    return body["head"], blobs


@cache
def code_stamp() -> str:
    """The version of this package and a hash of its sources: other code may give other bytes."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"


def require_same_code(stamp: str, node: str) -> None:
    """Refuse a node with other code than the command has."""
    if stamp != code_stamp():
        raise refuse_code(node, actual=code_stamp(), expected=stamp)


def refuse_code(node: str, *, actual: str, expected: str) -> NodeRefused:
    return NodeRefused(
        f"the node {node} has graftwork {actual or 'not installed'}, this command {expected}",
        why="nodes with other code could give other datasets",
        fix=f"install the same graftwork on {node}, or take it out of the cluster",
        where=node,
    )


def work_on(order: dict[str, str], shared: bytes, piece: bytes) -> None:
    """Work on one piece on a node. `order` has the entry, the stamp, the folder and the piece's number."""
    node = order.get("node") or socket.gethostname()
    require_same_code(order["stamp"], node)
    _note(order, node, "begun")
    work, context = _prepare(order["entry"], shared)
    work(context, *unpack(piece))
    _note(order, node, "done")


def _note(order: dict[str, str], node: str, state: str) -> None:
    """Each process has its own file: appending to a shared one is not safe on every network disk."""
    path = Path(order["folder"]) / JOURNALS / f"{node}-{os.getpid()}.jsonl"
    Journal(path).append({"piece": order["piece"], "node": node, "state": state, "at": time.time()})


def read_journals(folder: Path) -> tuple[dict[str, int], int]:
    """The pieces that each node finished, and how many pieces were begun more than once."""
    nodes: dict[str, int] = {}
    starts: dict[str, int] = {}
    for path in sorted((folder / JOURNALS).glob("*.jsonl")):
        for line in Journal(path).read():
            if line["state"] == "done":
                nodes[line["node"]] = nodes.get(line["node"], 0) + 1
            else:
                starts[line["piece"]] = starts.get(line["piece"], 0) + 1
    return nodes, sum(count > 1 for count in starts.values())


_prepared: dict[str, tuple[Callable[..., None], Context]] = {}


def _prepare(entry: str, shared: bytes) -> tuple[Callable[..., None], Context]:
    """The function and what it needs, once per process."""
    key = f"{entry} {hashlib.sha256(shared).hexdigest()}"
    if key not in _prepared:
        name, _, function = entry.partition(":")
        if not name.startswith("graftwork."):
            raise ValueError(f"{entry} is not a function of graftwork")
        module = importlib.import_module(name)
        # One at a time: a tokenizer takes memory.
        _prepared.clear()
        _prepared[key] = getattr(module, function), module.prepare_shared(*unpack(shared))
    return _prepared[key]


def describe_failure(error: BaseException) -> dict[str, object]:
    """An error of a node for the command that waits for it."""
    if isinstance(error, GraftError):
        return error.as_json()
    text = f"{type(error).__name__}: {error}"
    return {"error": "WorkerFailed", "what": text[:500], "why": "", "fix": "", "where": socket.gethostname()}


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
        """Let `run`, in another thread, end without the remaining pieces, leaving nothing at the cluster."""


@dataclass(frozen=True)
class MapWork(Generic[Piece, Result]):
    """The work on one piece: in this process and, if it has a remote form, on a cluster."""

    do: Callable[[Piece], Result]
    prepare: Callable[..., None] | None = None
    with_arguments: tuple[Any, ...] = ()
    remote: Callable[[], RemoteWork[Piece, Result] | None] = lambda: None
    """Created only if needed. None: this work cannot leave this machine."""


@dataclass
class MapEngine:
    """Where maps run. Without a runner: on the cores of this machine."""

    runner: PieceRunner | None = None
    folder: Path = Path()
    """Shared with all nodes; each map has a folder of its own in it."""
    processes: int | None = None
    say: Callable[[str], None] = log.info
    reports: list[tuple[dict[str, int], int]] = field(default_factory=list)
    """For each map: the pieces of each node, and how many were started more than once."""

    def map(self, pieces: Iterable[Piece], work: MapWork[Piece, Result]) -> Iterator[Result]:
        """Yield the results in the order of the pieces."""
        waiting = iter(pieces)
        first = list(islice(waiting, 2))
        remaining = chain(first, waiting)
        # A single piece does not wait for a cluster.
        remote = work.remote() if self.runner is not None and len(first) > 1 else None
        if self.runner is None or remote is None:
            yield from self._here(remaining, work)
            return
        in_flight: deque[Piece] = deque()

        def feed() -> Iterator[bytes]:
            for piece in remaining:
                in_flight.append(piece)
                yield remote.encode(piece)

        folder = self.folder / uuid.uuid4().hex[:12]
        make_folder(folder)
        done = self.runner.run(feed(), entry=remote.entry, shared=remote.shared, folder=folder)
        try:
            for _ in done:
                result = remote.collect(in_flight[0])
                if result is None:
                    raise EnvironmentFailure(
                        f"a node of {self.runner.name} finished a piece, and its file is not here",
                        why="the project's folder is not the same on all nodes",
                        fix="put the project on a file system that all nodes share, under the same path",
                        where=str(folder),
                    )
                in_flight.popleft()
                yield result
        except EngineLost as lost:
            self.say(f"{self.runner.name}: {lost}; this machine continues with the rest")
            yield from self._here(chain(in_flight, remaining), work)
        finally:
            done.close()
            nodes, repeated = read_journals(folder)
            if nodes:
                self.reports.append((nodes, repeated))
                shares = ", ".join(f"{node} {count}" for node, count in sorted(nodes.items()))
                repeat_note = f", {repeated} repeated" if repeated else ""
                pieces_done = f"{sum(nodes.values())} pieces on {len(nodes)} node(s)"
                self.say(f"{self.runner.name}: {pieces_done}: {shares}{repeat_note}")
            shutil.rmtree(folder, ignore_errors=True)

    def _here(self, pieces: Iterable[Piece], work: MapWork[Piece, Result]) -> Iterator[Result]:
        return work_in_order(
            pieces,
            work.do,
            prepare=work.prepare,
            with_arguments=work.with_arguments,
            processes=self.processes,
        )
