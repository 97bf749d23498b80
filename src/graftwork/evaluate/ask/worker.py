"""`python -m graftwork.evaluate.ask.worker JOB.json`: one subject, all cases, in a process of its own.

Input: an EvalJob as a file. Output: `answers.jsonl`, and `generation.json` written last: its presence means
that all answers are there. With `shards` over 1 the batches are shared out to several processes.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.interface import MeasuringEngine
from graftwork.engines.local import ADAPTER, answered_by, open_engine, settle, source_of
from graftwork.evaluate.ask.answers import ANSWERS_FILE, BATCHES_FILE, PLAN_FILE
from graftwork.evaluate.ask.runner import CaseRunner, ask_endpoint, stopped
from graftwork.evaluate.ask.shards import ask_in_shards
from graftwork.evaluate.cases import read_cases
from graftwork.files.disk import file_digest, folder_digest, write_atomic
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import hold_lock, run_worker, stop_asked, stop_at_once
from graftwork.records.base import fingerprint
from graftwork.records.report import Case, EvalJob, Generation
from graftwork.text.redact import hide_in_tracebacks

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
    """Load the subject, ask everything, and report how it went."""
    folder = Path(job.folder)
    job = settle(job)
    drop_answers_of_another_job(job)
    cases = read_cases(Path(job.cases_file))
    if _all_is_there(job, cases):
        return
    with Heart(folder) as heart:
        if job.endpoint is not None:
            generation = ask_endpoint(job, cases, progress=heart, stop_asked=stop_asked)
        else:
            generation = _ask_model(job, cases, heart)
        write_atomic(folder / GENERATION_FILE, generation.to_json())
        heart.beat("done", len(cases), len(cases), subject=job.subject)


def evaluate_with(
    open_engine_for: Callable[[EvalJob], MeasuringEngine], job: EvalJob, *, adapter: str, heart: Heart
) -> None:
    """The same in a process that evaluates several subjects with one engine, opened when needed."""
    job, folder = settle(job), Path(job.folder)
    with hold_lock(folder):
        drop_answers_of_another_job(job)
        cases = read_cases(Path(job.cases_file))
        if not _all_is_there(job, cases):
            heart.beat("loading the model", 0, len(cases), subject=job.subject)
            started = time.perf_counter()
            engine = open_engine_for(job)
            loading = time.perf_counter() - started
            generation = _ask_engine(job, cases, heart, engine, adapter=adapter, loading=loading)
            write_atomic(folder / GENERATION_FILE, generation.to_json())


def _all_is_there(job: EvalJob, cases: Sequence[Case]) -> bool:
    """Return whether an earlier evaluation has all answers, and timed as many requests as this one needs."""
    path = Path(job.folder) / GENERATION_FILE
    if not path.exists():
        return False
    if job.endpoint is not None:
        # What it has answered is not paid for twice.
        return True
    timed = Generation.from_json(path.read_bytes()).single_latency_seconds
    return len(timed) >= min(job.latency_cases, len(cases))


def drop_answers_of_another_job(job: EvalJob) -> None:
    """Answers are reused only for the same question to the same model."""
    folder = Path(job.folder)
    identity = identify(job)
    marker = folder / IDENTITY_FILE
    if marker.exists() and marker.read_text() == identity:
        return
    for name in (GENERATION_FILE, ANSWERS_FILE, BATCHES_FILE, PLAN_FILE):
        (folder / name).unlink(missing_ok=True)
    write_atomic(marker, identity)


def identify(job: EvalJob) -> str:
    """Hash what decides the answers: cases, weights or address, worked example, limits."""
    base = Path(job.base_folder)
    endpoint = [job.endpoint.url, job.endpoint.model] if job.endpoint else None
    return fingerprint(
        {
            "cases": file_digest(Path(job.cases_file)),
            "adapter": folder_digest(Path(job.adapter_folder)) if job.adapter_folder else None,
            # Base weights are large and proven elsewhere; sizes catch an exchanged folder.
            "base": endpoint
            or sorted((file.name, file.stat().st_size) for file in base.iterdir() if file.is_file()),
            "job": job.model_dump(mode="json", exclude=NOT_DECIDING),
            "answered_by": answered_by(job),
        }
    )


def _ask_model(job: EvalJob, cases: Sequence[Case], heart: Heart) -> Generation:
    shards = 1
    if job.shards > 1:
        # What is missing: this process then only measures single requests.
        shards = ask_in_shards(job, cases, progress=heart, stop_asked=stop_asked.is_set)
    heart.beat("loading the model", 0, len(cases), subject=job.subject)
    started = time.perf_counter()
    with stop_at_once(stopped(job, "its model was being loaded")):
        engine = open_engine(job.engine, source_of(job))
    loading = time.perf_counter() - started
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
    """Seconds spent by the embedded engine on recording passes on a GPU; 0 for others."""
    return engine.recording_seconds if isinstance(engine, EmbeddedEngine) else 0.0


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(EvalJob, lambda job: Path(job.folder), evaluate))
