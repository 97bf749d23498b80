"""Messages between processes: their framing on a byte stream, and a child process that answers JSON lines.

A message is a line, or has its length in four bytes before it: `{packet, 4}`, the framing of Erlang's ports.
A child that hangs or ends is killed with its children, and the next question starts another one. What it
prints goes to standard error, or to a log.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from graftwork.files.disk import append_to
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EnvironmentFailure

Framing = Literal["lines", "packet4"]
LONGEST_MESSAGE = 2**20
_HEAD = 4


class FramingError(ValueError):
    """The stream is not a sequence of messages."""


def encode(message: bytes, framing: Framing) -> bytes:
    """One message as it goes onto the stream."""
    if framing == "packet4":
        return len(message).to_bytes(_HEAD) + message
    if b"\n" in message:
        raise FramingError("a message in a line of its own has no line break")
    return message + b"\n"


def read_messages(stream: BinaryIO, framing: Framing, *, longest: int = LONGEST_MESSAGE) -> Iterator[bytes]:
    """Messages until the stream ends. A message that is cut off by the end is dropped."""
    while framing == "lines" and (line := stream.readline(longest + 1)):
        if not line.endswith(b"\n"):
            if len(line) > longest:
                raise FramingError(f"a line is longer than {longest:,} bytes")
            return
        if text := line.strip():
            yield text
    while framing == "packet4" and len(head := _read_exactly(stream, _HEAD)) == _HEAD:
        length = int.from_bytes(head)
        if length > longest:
            raise FramingError(f"a message of {length:,} bytes; the limit is {longest:,}")
        message = _read_exactly(stream, length)
        if len(message) < length:
            return
        if message:
            yield message


def _read_exactly(stream: BinaryIO, length: int) -> bytes:
    """This many bytes, or fewer at the end of the stream."""
    pieces: list[bytes] = []
    remaining = length
    while remaining and (piece := stream.read(remaining)):
        pieces.append(piece)
        remaining -= len(piece)
    return b"".join(pieces)


START_SECONDS = 120.0


class LineProcess:
    """One process; started when first asked or before, and again after it was ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        hello: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        environment: Mapping[str, str] = {},
        without: Sequence[str] = (),
        log: Path | None = None,
    ) -> None:
        """`hello` is answered before the first question; without `seconds` a question may take forever.

        `environment` is added to the variables of this process, those named in `without` are left out.
        """
        self._command = list(command)
        self._hello = hello
        self._seconds, self._log = seconds, log
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        self._environment = {**inherited, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self) -> None:
        """Start it ahead of the first question; one that runs stays as it is."""
        if self._process is None:
            self._start()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The reply; `{"failed": why}` if there is none."""
        process = self._start() if self._process is None else self._process
        reply = self._exchange(process, question, self._seconds)
        if reply is not None:
            return reply
        code = process.poll()
        self.end()
        if code is not None:
            return {"failed": f"its process ended with exit code {code}"}
        if self._seconds is None:
            return {"failed": "it gave no answer"}
        return {"failed": f"it took longer than {self._seconds:g} s"}

    def kill(self) -> None:
        """End it now, from any thread: a caller that waits for a reply gets none."""
        process = self._process
        if process is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def end(self, *, patience: float = 0.0) -> None:
        """End it, if it does not end within `patience` seconds after its input has."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if patience:
            with suppress(BrokenPipeError, subprocess.TimeoutExpired):
                process.stdin.close()
                process.wait(patience)
        self.kill()
        process.wait()
        process.stdout.close()
        with suppress(BrokenPipeError):
            process.stdin.close()
        self._process, self._buffer = None, b""

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            with ExitStack() as files:
                log = None if self._log is None else files.enter_context(append_to(self._log))
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,
                )
        except OSError as error:
            self.end()
            raise EnvironmentFailure(
                f"{self._command[0]} cannot be started",
                why=error.strerror or str(error),
                fix="specify a Python interpreter that exists and may be run",
                where=self._command[0],
            ) from error
        if self._hello is None:
            return self._process
        greeting = self._exchange(self._process, self._hello, START_SECONDS)
        if greeting is None or "refused" in greeting:
            raise self._explain(greeting)
        return self._process

    def _explain(self, greeting: dict[str, Any] | None) -> EnvironmentFailure:
        code = None if self._process is None else self._process.poll()
        self.end()
        if greeting is not None:
            return EnvironmentFailure(**greeting["refused"])
        ended = "it does not respond" if code is None else f"it ended with exit code {code}"
        return EnvironmentFailure(
            "the process that grades answers does not start",
            why=f"{ended}; rewards run apart from the training process",
            fix=f"run `{' '.join(self._command)}`, and fix what it prints",
        )

    def _exchange(
        self, process: "subprocess.Popen[bytes]", value: Mapping[str, Any], seconds: float | None
    ) -> dict[str, Any] | None:
        """Return the line that follows; None if the process ended, took too long or wrote something else."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(value).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return None
        until = None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            remaining = None if until is None else max(until - time.monotonic(), 0)
            ready, _, _ = select.select([process.stdout], [], [], remaining)
            if not ready:
                return None
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                process.wait()
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            reply = json.loads(line)
        except ValueError:
            return None
        return reply if isinstance(reply, dict) else None
