"""The cases of one subject shared out to several processes, here or on the nodes of a cluster.

Input: a job with `shards` over 1, and the cluster that the environment names, if any. Output: answers in the
shards' folders, copied into the job's own. Each shard has a folder, a lock and a model of its own, and the
same folder on the nodes. If one dies here, all stop; a shard whose node dies continues elsewhere after its
last whole batch. A restart resumes from what they have.
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

from graftwork.evaluate.ask.answers import AnswerBook, CaseBatch
from graftwork.evaluate.ask.runner import Progress, stopped
from graftwork.evaluate.cases import asked_messages
from graftwork.files.disk import append_to, write_atomic
from graftwork.process.heartbeat import read_beat
from graftwork.process.machine import count_cores
from graftwork.process.pieces import MapEngine, MapWork, PieceRunner, RemoteWork, pack
from graftwork.process.ray_cluster import RayTasks, to_error
from graftwork.process.worker import ERROR_FILE, PARENT_VARIABLE, lock_holder
from graftwork.records.errors import EXIT_DONE, WorkerFailed
from graftwork.records.report import Case, EvalJob

ENGINE_VARIABLE = "GRAFT_SHARD_ENGINE"
"""The Ray cluster on which shards run: the arguments of `RayTasks` as JSON."""
WORKER = "graftwork.evaluate.ask.worker"
LOG_FILE, JOB_FILE = "worker.log", "job.json"
POLL_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
STOP_SECONDS = 90.0
"""Timeout for stopping what runs at the cluster."""
ORPHAN_SECONDS = 180.0
"""How long a shard waits for the process of a node that is presumed lost."""


def share_out(
    job: EvalJob, batches: Sequence[CaseBatch], *, gpus: int = 0, alone: bool = False
) -> list[EvalJob]:
    """Return one job per process, each with every n-th batch; no more jobs than batches. `alone`: each has
    its own machine, with all of its threads.
    """
    count = min(job.shards, len(batches))
    threads = job.threads if alone else max((job.threads or count_cores()) // max(count, 1), 1)
    return [
        job.model_copy(
            update={
                "folder": str(Path(job.folder) / f"shard-{number + 1}-of-{count}"),
                "shards": 1,
                "latency_cases": 0,
                "threads": threads,
                "device": f"cuda:{number % gpus}" if gpus and job.device == "cuda" else job.device,
                "batches": tuple((batch.repeat, batch.cases) for batch in batches[number::count]),
            }
        )
        for number in range(count)
    ]


def find_runner() -> PieceRunner | None:
    """Return the cluster of the environment; None for this machine."""
    text = os.environ.get(ENGINE_VARIABLE)
    return RayTasks(**json.loads(text)) if text else None


def ask_in_shards(
    job: EvalJob, cases: Sequence[Case], *, progress: Progress, stop_asked: Callable[[], bool]
) -> int:
    """Let processes answer the missing cases; returns how many processes."""
    from graftwork.model.chat.template import ChatTemplate

    runner, gpus = find_runner(), 0
    if runner is None and job.device == "cuda":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    template = ChatTemplate.from_folder(Path(job.base_folder), reasoning=job.reasoning)
    book = AnswerBook(job, cases)
    planned = book.plan({case.id: len(template.prompt(asked_messages(job, case))) for case in cases})
    shards = share_out(job, book.open_batches(planned), gpus=gpus, alone=runner is not None)
    answered_before = book.answered

    def report(running: int) -> None:
        beats = [beat for shard in shards if (beat := read_beat(Path(shard.folder))) is not None]
        answering = [beat for beat in beats if beat.phase == "answering"]
        estimates = [beat.seconds_left for beat in answering if beat.seconds_left is not None]
        progress.beat(
            "answering" if answering else "loading the model",
            min(answered_before + sum(int(beat.done) for beat in answering), book.total),
            book.total,
            seconds_left=max(estimates) if len(estimates) == running else None,
            subject=job.subject,
            processes=running,
        )

    # Processes whose parent was killed stop at their next batch; until then they hold their folders.
    pause, until = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while any(lock_holder(Path(shard.folder)) is not None for shard in shards):
        if stop_asked() or time.monotonic() >= until:
            break
        pause.wait(POLL_SECONDS)
    for shard in shards:
        write_atomic(Path(shard.folder) / JOB_FILE, shard.to_json())
    if runner is not None and len(shards) > 1:
        ask_on_cluster(shards, runner, book, on_poll=lambda: report(len(shards)), stop_asked=stop_asked)
    else:
        _ask_here(shards, book, report=report, stop_asked=stop_asked)
    if stop_asked():
        raise stopped(job, f"{book.answered} of {book.total} cases are answered")
    return len(shards)


def _ask_here(
    shards: Sequence[EvalJob],
    book: AnswerBook,
    *,
    report: Callable[[int], None],
    stop_asked: Callable[[], bool],
) -> None:
    """Start a process for each shard, and wait for all of them, or for a stop."""
    children = [_start(Path(shard.folder)) for shard in shards]
    pause = threading.Event()
    try:
        while not stop_asked():
            running = sum(child.poll() is None for child in children)
            for shard, child in zip(shards, children, strict=True):
                if child.poll() not in (None, EXIT_DONE):
                    raise _explain_end(Path(shard.folder), child.returncode)
            if not running:
                return
            report(running)
            pause.wait(POLL_SECONDS)
    finally:
        # Asked to stop at their next batch; only those that do not are killed.
        for child in children:
            if child.poll() is None:
                child.terminate()
        for child in children:
            try:
                child.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        book.copy_from(Path(shard.folder) for shard in shards)


def _start(folder: Path) -> "subprocess.Popen[bytes]":
    with append_to(folder / LOG_FILE) as log:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER, str(folder / JOB_FILE)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )


def _explain_end(folder: Path, code: int) -> Exception:
    try:
        return to_error(json.loads((folder / ERROR_FILE).read_bytes()))
    except (OSError, ValueError):
        return WorkerFailed(
            f"one of the processes that share an evaluation ended with {code}",
            why="the others were stopped; all existing answers are kept",
            fix="run `graft eval` again to resume",
            where=str(folder / LOG_FILE),
        )


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
    engine = MapEngine(runner, folder=folder.absolute(), processes=len(shards), say=print)
    remote: RemoteWork[str, str] = RemoteWork(
        f"{__name__}:answer_piece",
        pack({}),
        lambda shard_folder: pack(str(Path(shard_folder).absolute())),
        lambda shard_folder: shard_folder,
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
    """Answer the cases of one shard in a child process, whose memory is freed with it."""
    # A process whose node was lost may still answer: it ends with its node, or when it is done.
    pause, until = threading.Event(), time.monotonic() + ORPHAN_SECONDS
    while lock_holder(Path(folder)) is not None and time.monotonic() < until:
        pause.wait(POLL_SECONDS)
    if code := _start(Path(folder)).wait():
        raise _explain_end(Path(folder), code)
    return folder
