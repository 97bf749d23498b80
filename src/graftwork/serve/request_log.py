"""Logs of requests and of the endpoint itself: never a prompt, an answer, a secret or a query.

Input: finished requests. Output: a line for each on standard error, as text or JSON, written by a thread.
`log_as_json` turns all log messages of the endpoint into JSON lines.
"""

import logging
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Generic, NamedTuple, TextIO, TypeVar

import orjson

log = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_LEFT = 499
"""The status in logs of a request whose client left before its answer."""
OTHER_MODEL = "other"
"""Stands for the names of models that only the client knows."""


class FinishedRequest(NamedTuple):
    """What may be known outside of a request. `path` and `model` are known names, never a client's text."""

    at: float
    seconds: float
    method: str
    path: str
    status: int
    key: str = ""
    model: str = ""
    release: str = ""
    capture: str = ""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    first_token_seconds: float | None = None
    queue_seconds: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    """The code of the error."""
    stream: bool = False
    max_tokens: int | None = None
    temperature: float | None = None


class BackgroundBatches(Generic[T]):
    """`work` gets what was offered since it was called last. Items beyond `limit` are dropped and counted."""

    def __init__(
        self, work: Callable[[list[T]], None], *, name: str, limit: int = 4096, seconds: float = 0.2
    ) -> None:
        self._work = work
        self._limit = limit
        self._seconds = seconds
        self._waiting: deque[T] = deque()
        self._wake = threading.Event()
        self.closing = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, item: T) -> None:
        """Always returns immediately."""
        if len(self._waiting) >= self._limit:
            self.dropped += 1
            return
        self._waiting.append(item)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, *, seconds: float = 5.0) -> None:
        """Process what waits, then end; give up after `seconds`."""
        self.closing.set()
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self.closing.wait(self._seconds)
            self._wake.clear()
            ending = self.closing.is_set()
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                if batch:
                    self._work(batch)
            except Exception as error:
                log.warning("%s: %s", self._thread.name, type(error).__name__)
            if ending and not self._waiting:
                return


class AccessLog:
    """One line for each request."""

    def __init__(self, *, as_json: bool, stream: TextIO | None = None) -> None:
        self._encode = _encode_json if as_json else _encode_text
        self._stream = stream or sys.stderr
        self._lines: BackgroundBatches[FinishedRequest] = BackgroundBatches(self._write, name="access-log")
        self.note = self._lines.offer

    def start(self) -> None:
        self._lines.start()

    def close(self) -> None:
        self._lines.close()

    def _write(self, batch: list[FinishedRequest]) -> None:
        self._stream.write("".join(self._encode(request) + "\n" for request in batch))
        self._stream.flush()


def _encode_json(request: FinishedRequest) -> str:
    fields = {name: value for name, value in request._asdict().items() if value not in (None, "")}
    fields["at"] = _format_time(request.at)
    return orjson.dumps({"event": "request", **fields}).decode()


def _encode_text(request: FinishedRequest) -> str:
    line = (
        f"{_format_time(request.at)} {request.method} {request.path} {request.status} "
        f"{1000 * request.seconds:.1f} ms"
    )
    fields = {"key": request.key, "model": request.model, "release": request.release[:12]}
    fields |= {"error": request.error or "", "finish": request.finish_reason or ""}
    if request.prompt_tokens:
        fields["tokens"] = f"{request.prompt_tokens}+{request.reply_tokens}"
    return " ".join([line, *(f"{name}={value}" for name, value in fields.items() if value)])


def _format_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "event": "log",
            "at": _format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, trace = record.exc_info
            fields["error"] = kind.__name__
            # Places without the message of the error, which may quote a request.
            fields["trace"] = "".join(traceback.format_tb(trace))
        return orjson.dumps(fields).decode()


@contextmanager
def log_as_json(stream: TextIO | None = None) -> Iterator[None]:
    """While the block runs, messages of graftwork are JSON lines on standard error."""
    logger = logging.getLogger("graftwork")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter())
    before = (logger.level, logger.propagate)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
