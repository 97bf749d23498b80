"""A child process that answers JSON lines, each within a time limit.

In: a command, what the process reads first, questions. Out: its replies. A process that hangs or ends is
killed with its children, and the next question starts another one.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EnvironmentLacks

START_SECONDS = 120.0


class LineProcess:
    """One process; started when it is first asked or before, and again after it was ended."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        hello: Mapping[str, Any],
        seconds: float,
        environment: Mapping[str, str] = {},
        without: Sequence[str] = (),
    ) -> None:
        """`environment` is added to the variables of this process, those named in `without` are left out."""
        self._command = list(command)
        self._hello = hello
        self._seconds = seconds
        kept = {name: value for name, value in os.environ.items() if name not in without}
        self._environment = {**kept, **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def start(self) -> None:
        """Start it ahead of the first question; one that runs stays as it is."""
        if self._process is None:
            self._start()

    def ask(self, question: Mapping[str, Any], *, seconds: float | None = None) -> dict[str, Any]:
        """The reply; `{"failed": why}` if there is none."""
        limit = self._seconds if seconds is None else seconds
        process = self._start() if self._process is None else self._process
        try:
            self._send(process, question)
            reply = self._read(process, limit)
        except BrokenPipeError:
            reply = None
        if reply is not None:
            return reply
        code = process.poll()
        self.end()
        if code is None:
            return {"failed": f"it took longer than {limit:g} s"}
        return {"failed": f"its process ended with exit code {code}"}

    def end(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**self._environment, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        except OSError as error:
            self.end()
            raise EnvironmentLacks(
                f"{self._command[0]} cannot be started",
                why=error.strerror or str(error),
                fix="name an interpreter of Python that exists and may be run",
                where=self._command[0],
            ) from error
        found = self._greet(self._process)
        if found is None or "refused" in found:
            raise self._explain(found)
        return self._process

    def _greet(self, process: "subprocess.Popen[bytes]") -> dict[str, Any] | None:
        try:
            self._send(process, self._hello)
        except BrokenPipeError:
            return None
        return self._read(process, START_SECONDS)

    def _explain(self, found: dict[str, Any] | None) -> EnvironmentLacks:
        code = None if self._process is None else self._process.poll()
        self.end()
        if found is not None:
            return EnvironmentLacks(**found["refused"])
        ended = "it gives no sign of life" if code is None else f"it ended with exit code {code}"
        return EnvironmentLacks(
            "the process that grades answers does not start",
            why=f"{ended}; rewards run apart from the training process",
            fix=f"run `{' '.join(self._command)}`, and fix what it prints",
        )

    def _send(self, process: "subprocess.Popen[bytes]", value: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()

    def _read(self, process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process ended, took too long or wrote something else."""
        assert process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(left, 0))
            if not ready:
                return None
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                process.wait()
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None
