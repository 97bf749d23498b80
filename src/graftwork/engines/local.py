"""Which engine answers for local weights, in which precision, and how it is opened: here or in a process.

Input: the jobs of one evaluation. Output: one engine for all of them, since answers of two engines differ in
their last digits, and a comparison would take that for a difference of the models. GRAFT_ENGINE names an
engine of an installed package. Loads no torch on the CPU.

`python -m graftwork.engines.local JOB.json` is an engine in a process of its own: conversations, one per
line, on standard input, replies on standard output. `EngineChild` is its other end.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from graftwork.engines.embedded import EMBEDDED, REVISION, EmbeddedEngine, precision_on
from graftwork.engines.interface import DecodingSettings, EngineReply, EngineSource, MeasuringEngine
from graftwork.engines.llamacpp import DEFAULT_PRECISION, LLAMACPP, LlamaCppEngine, engine_version
from graftwork.files.disk import make_folder, write_atomic
from graftwork.process.extensions import load_extension
from graftwork.process.stdio import LineProcess
from graftwork.records.errors import EnvironmentFailure, GraftError, WorkerFailed
from graftwork.records.interaction import Message
from graftwork.records.report import EvalJob

LOG_FILE = "engine.log"
JOB_FILE = "engine.json"
_QUOTED = 400
CLOSE_SECONDS = 30.0
"""How long an engine may take to close: llama.cpp frees its memory and removes its folder."""
ENGINE_VARIABLE = "GRAFT_ENGINE"
ADAPTER = "adapter"
"""The name under which an engine holds the adapter of a job."""
PRECISIONS = ("float32", "bfloat16", "float16")
REQUIRED = ("answer", "render", "time_one", "reply_losses", "peak_memory_gib", "close")
"""What the engine of an extension must have."""


def agree_on_engine() -> str:
    """Return the engine for all subjects that name none: our own, or that of an extension."""
    return os.environ.get(ENGINE_VARIABLE, "").strip() or EMBEDDED


def settle(job: EvalJob) -> EvalJob:
    """Return the job with its engine and precision resolved, since answers are stored under both."""
    if job.endpoint is not None:
        return job
    return job.model_copy(
        update={
            "engine": job.engine or agree_on_engine(),
            # As the model is served.
            "precision": job.precision or (DEFAULT_PRECISION if is_alone(job) else precision_on(job.device)),
        }
    )


def answered_by(job: EvalJob) -> list[str | int] | None:
    """Return the engine's part in the identity of answers; None for an endpoint."""
    if job.endpoint is not None:
        return None
    embedded = job.engine.partition(" ")[0] in ("", EMBEDDED)
    return [job.engine, job.precision, *([REVISION] if embedded else [])]


def name_engine(kind: str) -> str:
    """The engine of this kind with the version that is installed here, as jobs and verdicts name it."""
    if kind == LLAMACPP:
        return f"{LLAMACPP} {engine_version()}"
    return kind


def is_alone(job: EvalJob) -> bool:
    """Whether the job's engine cannot share a process with those of other subjects."""
    return job.engine.partition(" ")[0] == LLAMACPP


def source_of(job: EvalJob) -> EngineSource:
    """What an engine loads for a job that `settle` has completed."""
    return EngineSource(
        base_folder=Path(job.base_folder),
        adapters={ADAPTER: Path(job.adapter_folder)} if job.adapter_folder is not None else {},
        device=job.device,
        precision=job.precision,
        threads=job.threads,
        reasoning=job.reasoning,
        fingerprint=job.identity,
        rows=job.batch_size,
    )


def open_engine(name: str, source: EngineSource) -> MeasuringEngine:
    """Load the engine of this name; a version after it is ignored."""
    kind = name.partition(" ")[0]
    if kind == EMBEDDED:
        return EmbeddedEngine(source)
    if kind == LLAMACPP:
        return LlamaCppEngine(source)
    opened: Any = load_extension("graftwork.engines", kind)(source)
    missing = [attribute for attribute in (*REQUIRED, "facts", "adapters") if not hasattr(opened, attribute)]
    if missing:
        raise EnvironmentFailure(
            f"the engine {kind!r} has no {', '.join(missing)}",
            why="graftwork.engines.interface.MeasuringEngine lists what an engine must have",
            fix=f"update the package that provides {kind!r}",
        )
    engine: MeasuringEngine = opened
    return engine


class EngineChild:
    """An engine in a child process, which starts with the first prompt and ends on `close`. One conversation
    at a time; other threads wait. Raises WorkerFailed if the process ends or is stopped. If the source names
    an adapter, that adapter answers.
    """

    def __init__(self, engine: str, source: EngineSource, *, folder: Path) -> None:
        self._engine, self._source, self._folder = engine, source, folder
        command = [sys.executable, "-m", "graftwork.engines.local", str(folder / JOB_FILE)]
        self._process = LineProcess(command, log=folder / LOG_FILE)
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def ask_once(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply:
        turns = [{"role": turn.role, "content": turn.content} for turn in messages]
        with self._lock:
            if self._stopped.is_set():
                raise self._failed()
            make_folder(self._folder)
            adapters = {name: str(folder) for name, folder in self._source.adapters.items()}
            base = str(self._source.base_folder)
            source = {**self._source._asdict(), "base_folder": base, "adapters": adapters}
            write_atomic(self._folder / JOB_FILE, orjson.dumps({"engine": self._engine, "source": source}))
            self._process.start()
            if self._stopped.is_set():
                self._process.kill()  # `stop` was called before it could see the process
            reply = self._process.ask({"messages": turns, "decoding": decoding._asdict()})
        if "failed" in reply:
            raise self._failed()
        return EngineReply(**reply)

    def stop(self) -> None:
        """End the process now: a running answer is abandoned, and its caller gets an error."""
        self._stopped.set()
        self._process.kill()

    def close(self) -> None:
        with self._lock:
            self._process.end(patience=CLOSE_SECONDS)

    def _failed(self) -> WorkerFailed:
        log = self._folder / LOG_FILE
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return WorkerFailed(
            f"the {self._engine} engine exited",
            why=lines[-1][:_QUOTED] if lines else "it wrote nothing",
            fix="check its log; the usual cause is a model that is too large for this machine",
            where=str(log),
        )


def answer_lines(job: dict[str, Any], questions: IO[bytes], replies: IO[bytes]) -> None:
    """Load the engine and answer until the input ends, as it does when the other end is gone."""

    fields = job["source"]
    adapters = {name: Path(folder) for name, folder in fields["adapters"].items()}
    source = EngineSource(**{**fields, "base_folder": Path(fields["base_folder"]), "adapters": adapters})
    engine = open_engine(job["engine"], source)
    adapter = next(iter(adapters), None)
    try:
        for line in questions:
            question = orjson.loads(line)
            messages = tuple(Message(**turn) for turn in question["messages"])
            try:
                decoding = DecodingSettings(**question["decoding"])
                [reply] = engine.answer([engine.render(messages)], decoding, adapter=adapter)
            except GraftError as error:
                # Such as a prompt that is too long for the model: the next one may not be.
                print(error.what, file=sys.stderr)
                reply = EngineReply("", tokens=0, prompt_tokens=0, finish_reason="length")
            replies.write(orjson.dumps(reply._asdict()) + b"\n")
            replies.flush()
    finally:
        engine.close()


def main() -> None:
    # Libraries print to standard output; replies go where nothing else is written.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_lines(orjson.loads(Path(sys.argv[1]).read_bytes()), sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
