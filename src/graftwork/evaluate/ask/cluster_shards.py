"""Shards of an evaluation on the nodes of a cluster, each in the folder that it also has on this machine.

In: the jobs of the shards, and the engine that the environment names. Out: answers in the shards' folders. A
shard whose node dies goes on elsewhere after its last whole batch.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.evaluate.ask.answers import AnswerBook
from graftwork.files.disk import append_to, write_atomic
from graftwork.process.cluster.pieces import MapEngine, MapWork, PieceRunner, RemoteWork, pack
from graftwork.process.cluster.ray_tasks import RayTasks, to_error
from graftwork.process.worker import ERROR_FILE, PARENT_VARIABLE, lock_holder
from graftwork.records.errors import WorkerFailed
from graftwork.records.report import EvalJob

ENGINE_VARIABLE = "GRAFT_SHARD_ENGINE"
"""The Ray cluster on which shards run: the arguments of `RayTasks` as JSON."""
WORKER = "graftwork.evaluate.ask.worker"
LOG_FILE, JOB_FILE = "worker.log", "job.json"
POLL_SECONDS = 0.5
STOP_SECONDS = 90.0
"""How long the end of what runs at the cluster is waited for."""
ORPHAN_SECONDS = 180.0
"""How long a shard waits for the process of a node that this command takes for lost."""


def find_runner() -> PieceRunner | None:
    """The cluster of the environment; None: this machine."""
    text = os.environ.get(ENGINE_VARIABLE)
    if not text:
        return None
    return RayTasks(**json.loads(text))


def ask_on_cluster(
    shards: Sequence[EvalJob],
    runner: PieceRunner,
    book: AnswerBook,
    *,
    on_poll: Callable[[], None],
    stop_asked: Callable[[], bool],
) -> None:
    """Let nodes answer; `on_poll` reports progress meanwhile."""
    folder = Path(shards[0].folder).parent / "engine"
    for shard in shards:
        write_atomic(Path(shard.folder) / JOB_FILE, shard.to_json())
    engine = MapEngine(runner, folder=folder.absolute(), processes=len(shards), say=print)
    remote: RemoteWork[str, str] = RemoteWork(
        "graftwork.evaluate.ask.cluster_shards:answer_piece", pack({}), _encode, lambda path: path
    )
    failures: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        mapped: MapWork[str, str] = MapWork(run_shard, remote=lambda: remote)
        results = engine.map([shard.folder for shard in shards], mapped)
        try:
            for _ in results:
                if over.is_set():
                    break
        except BaseException as error:
            failures.append(error)
        finally:
            results.close()  # type: ignore[attr-defined]  # a generator

    thread = threading.Thread(target=work, daemon=True, name="shards")
    thread.start()
    try:
        while thread.is_alive() and not stop_asked():
            on_poll()
            thread.join(POLL_SECONDS)
    finally:
        over.set()
        # Nothing waits for the tasks any more: they would run, and be billed, to their end.
        runner.stop()
        thread.join(STOP_SECONDS)
        book.copy_from(Path(shard.folder) for shard in shards)
    if failures:
        raise failures[0]


def prepare_shared(_head: Any, _blobs: list[bytes]) -> None:
    return


def answer_piece(_context: None, head: Any, _blobs: list[bytes]) -> None:
    """Work on one shard, on a node."""
    run_shard(head)


def run_shard(folder: str) -> str:
    """Answer the cases of one shard in a process of its own: it takes its memory with it."""
    own = Path(folder)
    _wait_for_orphan(own)
    with append_to(own / LOG_FILE) as log:
        code = subprocess.run(
            [sys.executable, "-m", WORKER, str(own / JOB_FILE)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**_without_engine(), PARENT_VARIABLE: str(os.getpid())},
            check=False,
        ).returncode
    if code and (own / ERROR_FILE).exists():
        raise to_error(json.loads((own / ERROR_FILE).read_text()))
    if code:
        raise WorkerFailed(f"a shard of the evaluation ended with {code}", where=str(own / LOG_FILE))
    return folder


def _wait_for_orphan(folder: Path) -> None:
    """A process whose node was lost may still answer: it ends with its node, or when it is done."""
    pause, until = threading.Event(), time.monotonic() + ORPHAN_SECONDS
    while lock_holder(folder) is not None and time.monotonic() < until:
        pause.wait(POLL_SECONDS)


def _without_engine() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != ENGINE_VARIABLE}


def _encode(folder: str) -> bytes:
    return pack(str(Path(folder).absolute()))
