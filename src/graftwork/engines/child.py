"""`python -m graftwork.engines.child JOB.json`: an engine for local weights in a process of its own.

In: conversations, one a line on standard input. Out: replies, one a line. The other end, `EngineChild`, is
what callers use: it starts the process on the first question and ends it on `close`.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import orjson

from graftwork.engines.interface import DecodingSettings, EngineReply, EngineSource
from graftwork.files.disk import make_folder, write_atomic
from graftwork.process.line_process import LineProcess
from graftwork.records.errors import GraftError, WorkerFailed
from graftwork.records.interaction import Message

LOG_FILE = "engine.log"
JOB_FILE = "engine.json"
_QUOTED = 400
CLOSE_SECONDS = 30.0
"""How long an engine may take to close: llama.cpp frees its memory and removes its folder."""


class EngineChild:
    """One conversation at a time; other threads wait. Raises WorkerFailed if the process ends or is stopped.

    Where the source names an adapter, the first one answers.
    """

    def __init__(self, engine: str, source: EngineSource, *, folder: Path) -> None:
        self._engine, self._source, self._folder = engine, source, folder
        command = [sys.executable, "-m", "graftwork.engines.child", str(folder / JOB_FILE)]
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
        """End the process now: an answer that is being written is given up, and its caller gets an error."""
        self._stopped.set()
        self._process.kill()

    def close(self) -> None:
        with self._lock:
            self._process.end(patience=CLOSE_SECONDS)

    def _failed(self) -> WorkerFailed:
        log = self._folder / LOG_FILE
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return WorkerFailed(
            f"the {self._engine} engine ended",
            why=lines[-1][:_QUOTED] if lines else "it wrote nothing",
            fix="read its log; a model that is too large for this machine is the usual cause",
            where=str(log),
        )


def answer_lines(job: dict[str, Any], questions: IO[bytes], replies: IO[bytes]) -> None:
    """Load the engine and answer until the questions end, as they do when the other end is gone."""
    from graftwork.engines.selection import open_engine

    given = job["source"]
    adapters = {name: Path(folder) for name, folder in given["adapters"].items()}
    source = EngineSource(**{**given, "base_folder": Path(given["base_folder"]), "adapters": adapters})
    engine = open_engine(job["engine"], source)
    adapter = next(iter(adapters), None)
    try:
        for line in questions:
            asked = orjson.loads(line)
            messages = tuple(Message(**turn) for turn in asked["messages"])
            try:
                decoding = DecodingSettings(**asked["decoding"])
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
