"""`python -m graftwork.evaluate.ask.worker JOB.json`: one subject, all cases, in a process of its own.

In: an EvalJob as a file. Out: `answers.jsonl`, and `generation.json` written last: its presence means that
all answers are there. With `shards` over 1 the batches are shared out to several processes, each with a
folder, a lock and a model of its own; if one dies, all stop, and a restart resumes from what they have.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.interface import MeasuringEngine
from graftwork.engines.selection import ADAPTER, answered_by, open_engine, settle, source_of
from graftwork.evaluate.ask.answers import ANSWERS_FILE, BATCHES_FILE, PLAN_FILE, AnswerBook, CaseBatch
from graftwork.evaluate.ask.cluster_shards import ask_on_cluster, find_runner
from graftwork.evaluate.ask.runner import CaseRunner, Progress, stopped, summarise
from graftwork.evaluate.cases import asked_messages, read_cases
from graftwork.files.disk import file_digest, folder_digest, write_atomic
from graftwork.process.heartbeat import Heart, read_beat
from graftwork.process.worker import (
    ERROR_FILE,
    PARENT_VARIABLE,
    hold_lock,
    lock_holder,
    run_worker,
    stop_asked,
    stop_at_once,
)
from graftwork.records import errors
from graftwork.records.base import fingerprint
from graftwork.records.errors import EnvironmentLacks, GraftError, WorkerFailed
from graftwork.records.report import Case, EvalJob, Generation
from graftwork.text.redact import hide_in_tracebacks

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 60.0
LOG_FILE = "worker.log"


def share_out(
    job: EvalJob, batches: Sequence[CaseBatch], *, cards: int = 0, alone: bool = False
) -> list[EvalJob]:
    """One job a process, each with every n-th batch; no more of them than there are batches.

    `alone`: each has a machine of its own, with all of its threads.
    """
    count = min(job.shards, len(batches))
    threads = job.threads if alone else max((job.threads or _processors()) // max(count, 1), 1)
    return [
        job.model_copy(
            update={
                "folder": str(Path(job.folder) / f"shard-{number + 1}-of-{count}"),
                "shards": 1,
                "latency_cases": 0,
                "threads": threads,
                "device": f"cuda:{number % cards}" if cards and job.device == "cuda" else job.device,
                "batches": tuple((batch.repeat, batch.cases) for batch in batches[number::count]),
            }
        )
        for number in range(count)
    ]


def ask_in_shards(
    job: EvalJob,
    book: AnswerBook,
    *,
    lengths: dict[str, int],
    progress: Progress,
    stop_asked: Callable[[], bool],
    cards: int = 0,
) -> int:
    """Let the processes answer what is missing; how many they were."""
    runner = find_runner()
    shards = share_out(
        job,
        book.open_batches(book.plan(lengths)),
        cards=cards if runner is None else 0,
        alone=runner is not None,
    )
    before = book.answered
    _wait_for_orphans(shards, stop_asked)
    if runner is not None and len(shards) > 1:
        ask_on_cluster(
            shards,
            runner,
            book,
            on_poll=lambda: _report_beats(job, shards, book, before, progress, running=len(shards)),
            stop_asked=stop_asked,
        )
        if stop_asked():
            raise stopped(job, f"{book.answered} of {book.total} cases are answered")
        return len(shards)
    children = [(shard, _start(shard)) for shard in shards]
    try:
        _watch(job, children, book, before, progress, stop_asked)
    finally:
        _stop([child for _, child in children])
        book.copy_from(Path(shard.folder) for shard in shards)
    return len(shards)


def _wait_for_orphans(shards: Sequence[EvalJob], stop_asked: Callable[[], bool]) -> None:
    """Processes whose parent was killed stop at their next batch; until then they hold their folders."""
    pause, until = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while any(lock_holder(Path(shard.folder)) is not None for shard in shards):
        if stop_asked() or time.monotonic() >= until:
            return
        pause.wait(POLL_SECONDS)


def _start(shard: EvalJob) -> "subprocess.Popen[bytes]":
    from graftwork.files.disk import append_to, write_atomic

    folder = Path(shard.folder)
    write_atomic(folder / "job.json", shard.to_json())
    with append_to(folder / LOG_FILE) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "graftwork.evaluate.ask.worker", str(folder / "job.json")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        )


def _watch(
    job: EvalJob,
    children: "list[tuple[EvalJob, subprocess.Popen[bytes]]]",
    book: AnswerBook,
    before: int,
    progress: Progress,
    stop_asked: Callable[[], bool],
) -> None:
    pause = threading.Event()
    while running := [child for _, child in children if child.poll() is None]:
        shards = [shard for shard, _ in children]
        _report_beats(job, shards, book, before, progress, running=len(running))
        if stop_asked():
            _stop(running)
            book.copy_from(Path(shard.folder) for shard, _ in children)
            raise stopped(job, f"{book.answered} of {book.total} cases are answered")
        _raise_first_failure(children)
        pause.wait(POLL_SECONDS)
    _raise_first_failure(children)


def _report_beats(
    job: EvalJob,
    shards: Sequence[EvalJob],
    book: AnswerBook,
    before: int,
    progress: Progress,
    *,
    running: int,
) -> None:
    beats = [beat for shard in shards if (beat := read_beat(Path(shard.folder))) is not None]
    answering = [beat for beat in beats if beat.phase == "answering"]
    done = sum(int(beat.done) for beat in answering)
    left = [beat.seconds_left for beat in answering if beat.seconds_left is not None]
    progress.beat(
        "answering" if answering else "loading the model",
        min(before + done, book.total),
        book.total,
        seconds_left=max(left) if len(left) == running else None,
        subject=job.subject,
        processes=running,
    )


def _raise_first_failure(children: "list[tuple[EvalJob, subprocess.Popen[bytes]]]") -> None:
    for shard, child in children:
        code = child.poll()
        if code in (None, errors.EXIT_DONE):
            continue
        raise _what_it_said(Path(shard.folder)) or WorkerFailed(
            f"one of the processes that share the evaluation of {shard.subject} ended with {code}",
            why="the others were stopped; what all of them answered is kept",
            fix="run `graft eval` again: it resumes from there",
            where=str(Path(shard.folder) / LOG_FILE),
        )


def _what_it_said(folder: Path) -> GraftError | None:
    import json

    try:
        failure = json.loads((folder / ERROR_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    kind = getattr(errors, failure["error"], EnvironmentLacks)
    error: GraftError = kind(failure["what"], why=failure["why"], fix=failure["fix"], where=failure["where"])
    return error


def _stop(children: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Ask all to stop at their next batch, and end only those that do not."""
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        try:
            child.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


GENERATION_FILE = "generation.json"
IDENTITY_FILE = "asked_for.txt"
NOT_DECIDING = {
    "folder",
    "base_folder",
    "adapter_folder",
    "cases_file",
    "latency_cases",
    "answers_folder",
    "shards",
    "endpoint",
}


def evaluate(job: EvalJob) -> None:
    """Load the subject, ask everything, say how it went."""
    folder = Path(job.folder)
    job = settle(job)
    drop_answers_of_another_job(job)
    cases = read_cases(Path(job.cases_file))
    if _all_is_there(job, cases):
        return
    with Heart(folder) as heart:
        if job.endpoint is not None:
            generation = _ask_endpoint(job, cases, heart)
        else:
            generation = _ask_model(job, cases, heart)
        write_atomic(folder / GENERATION_FILE, generation.to_json())
        heart.beat("done", len(cases), len(cases), subject=job.subject)


def evaluate_with(
    open_engine_for: Callable[[EvalJob], MeasuringEngine], job: EvalJob, *, adapter: str, heart: Heart
) -> None:
    """The same in a process that evaluates several subjects with one engine, opened where it is needed."""
    job, folder = settle(job), Path(job.folder)
    with hold_lock(folder):
        drop_answers_of_another_job(job)
        cases = read_cases(Path(job.cases_file))
        if not _all_is_there(job, cases):
            heart.beat("loading the model", 0, len(cases), subject=job.subject)
            begun = time.perf_counter()
            engine = open_engine_for(job)
            loading = time.perf_counter() - begun
            generation = _ask_engine(job, cases, heart, engine, adapter=adapter, loading=loading)
            write_atomic(folder / GENERATION_FILE, generation.to_json())


def _all_is_there(job: EvalJob, cases: Sequence[Case]) -> bool:
    """Whether an evaluation before this one answered, and timed as many requests as this one wants."""
    path = Path(job.folder) / GENERATION_FILE
    if not path.exists():
        return False
    if job.endpoint is not None:
        # What it has answered is not paid for twice.
        return True
    timed = Generation.from_json(path.read_bytes()).single_latency_seconds
    return len(timed) >= min(job.latency_cases, len(cases))


def drop_answers_of_another_job(job: EvalJob) -> None:
    """Answers are taken up again only for the same question to the same model."""
    folder = Path(job.folder)
    identity = identify(job)
    marker = folder / IDENTITY_FILE
    if marker.exists() and marker.read_text() == identity:
        return
    for name in (GENERATION_FILE, ANSWERS_FILE, BATCHES_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)
    write_atomic(marker, identity)


def identify(job: EvalJob) -> str:
    """A hash of what decides the answers: cases, weights or address, worked example, limits."""
    base = Path(job.base_folder)
    asked = [job.endpoint.url, job.endpoint.model] if job.endpoint else None
    return fingerprint(
        {
            "cases": file_digest(Path(job.cases_file)),
            "adapter": folder_digest(Path(job.adapter_folder)) if job.adapter_folder else None,
            # Base weights are large and proven elsewhere; sizes catch an exchanged folder.
            "base": asked
            or sorted((file.name, file.stat().st_size) for file in base.iterdir() if file.is_file()),
            "job": job.model_dump(mode="json", exclude=NOT_DECIDING),
            "answered_by": answered_by(job),
        }
    )


def _ask_model(job: EvalJob, cases: Sequence[Case], heart: Heart) -> Generation:
    shards = _share_cases(job, cases, heart) if job.shards > 1 else 1
    heart.beat("loading the model", 0, len(cases), subject=job.subject)
    begun = time.perf_counter()
    with stop_at_once(stopped(job, "its model was being loaded")):
        engine = open_engine(job.engine, source_of(job))
    loading = time.perf_counter() - begun
    generation = _ask_engine(job, cases, heart, engine, adapter=ADAPTER, processes=shards, loading=loading)
    engine.close()
    return generation


def _ask_engine(
    job: EvalJob,
    cases: Sequence[Case],
    heart: Heart,
    engine: MeasuringEngine,
    *,
    adapter: str,
    loading: float,
    processes: int = 1,
) -> Generation:
    recorded = recording_seconds(engine)
    runner = CaseRunner(
        job,
        engine=engine,
        progress=heart,
        stop_asked=stop_asked.is_set,
        details={"processes": processes},
        adapter=adapter,
    )
    runner.ask_all(cases)
    timings = runner.time_requests(cases)
    firsts = [timing.first_token for timing in timings if timing.first_token is not None]
    generation = runner.summarise(
        single_latency_seconds=tuple(timing.total for timing in timings),
        first_token_seconds=tuple(firsts) if len(firsts) == len(timings) else (),
    )
    recording = recording_seconds(engine) - recorded
    times = {"load": loading, **({"recording": recording} if recording else {})}
    return generation.model_copy(update={"times": times})


def recording_seconds(engine: MeasuringEngine) -> float:
    """Spent by the embedded engine on recording passes on a card; nothing by others."""
    return engine.recording_seconds if isinstance(engine, EmbeddedEngine) else 0.0


def _share_cases(job: EvalJob, cases: Sequence[Case], heart: Heart) -> int:
    """What is missing, answered by several processes; this one then only measures single requests."""
    from graftwork.model.chat.template import ChatTemplate

    template = ChatTemplate.from_folder(Path(job.base_folder), reasoning=job.reasoning)
    lengths = {case.id: len(template.prompt(asked_messages(job, case))) for case in cases}
    return ask_in_shards(
        job,
        AnswerBook(job, cases),
        lengths=lengths,
        progress=heart,
        stop_asked=stop_asked.is_set,
        cards=_count_cards() if job.device == "cuda" else 0,
    )


def _ask_endpoint(job: EvalJob, cases: Sequence[Case], heart: Heart) -> Generation:
    from graftwork.evaluate.ask.endpoint import ask_endpoint

    asked = ask_endpoint(job, cases, progress=heart, stop_asked=stop_asked)
    return summarise(
        job,
        single_latency_seconds=asked.single_latency_seconds,
        first_token_seconds=asked.first_token_seconds,
        peak_memory_gib=0.0,
        details=asked.details,
    )


def _count_cards() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(EvalJob, lambda job: Path(job.folder), evaluate))
