"""Send alerts: always to the log, and to a command and a webhook if they are configured.

Input: alerts. Output: a line in `alerts.jsonl`, the alert as JSON on the command's input and as the body of a
POST. Deliveries run in a thread, one after the other: watching a run must not wait for a server that does not
answer. Failed deliveries are reported without secrets: the address of a webhook is one.
"""

import os
import queue
import shlex
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from graftwork.files.disk import Journal
from graftwork.process.http_client import HttpClient, NoAnswer, may_pass
from graftwork.records.errors import UserError
from graftwork.records.fleet import Alert, AlertKind

ALERTS_FILE = "alerts.jsonl"
COMMAND_SECONDS = 30.0
WEBHOOK_SECONDS = 10.0
WEBHOOK_PAUSES = (1.0, 4.0)
"""Seconds between three attempts."""
LONGEST_ANSWER = 64 * 2**10
LONGEST_OUTPUT, LONGEST_LINE = 4096, 300
"""Bytes and characters of a command's output to keep: enough to show why it failed."""
SHORTEST_SECRET = 6
CLOSING_SECONDS = 30.0


class Alarm:
    """Use as a context manager around the watching: on exit it waits briefly for deliveries."""

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        project: str = "",
        command: str | None = None,
        webhook: str | None = None,
        on_info: Callable[[str], None] = lambda _text: None,
        pauses: tuple[float, ...] = WEBHOOK_PAUSES,
    ) -> None:
        self._log = Journal(folder / ALERTS_FILE)
        self._run, self._project = run, project
        self._command = split_command(command) if command else None
        self._webhook = check_webhook(webhook) if webhook else None
        self._on_info = on_info
        self._pauses = pauses
        self._queue: queue.Queue[Alert | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.undelivered: list[str] = []

    def __enter__(self) -> "Alarm":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def send(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> Alert:
        """Record and report it now; deliver it soon."""
        alert = Alert(
            kind=kind,
            run=self._run,
            project=self._project,
            what=what,
            why=why,
            fix=fix,
            at=time.time(),
            host=socket.gethostname(),
        )
        self._log.append(alert.model_dump(mode="json"), durable=True)
        self._on_info(f"{what}: {why}" if why else what)
        if self._command or self._webhook:
            if self._thread is None:
                self._thread = threading.Thread(target=self._deliver_all, daemon=True, name="alerts")
                self._thread.start()
            self._queue.put(alert)
        return alert

    def close(self, *, seconds: float = CLOSING_SECONDS) -> None:
        """Wait for running deliveries, and report those that failed."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(seconds)
            if self._thread.is_alive():
                self.undelivered.append("an alert is not delivered yet and will not be")
            self._thread = None
        for message in self.undelivered:
            self._on_info(message)
        self.undelivered.clear()

    def _deliver_all(self) -> None:
        while (alert := self._queue.get()) is not None:
            body = alert.model_dump_json().encode()
            if self._command and (failure := run_command(self._command, body)):
                self.undelivered.append(f"the alert command {failure}")
            if self._webhook and (failure := post(self._webhook, body, pauses=self._pauses)):
                host = urlsplit(self._webhook).hostname
                self.undelivered.append(f"the webhook at {host} {failure}")


def split_command(command: str) -> list[str]:
    """Split the command into words. No shell sees it."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        parts = []
        reason = str(error)
    else:
        reason = "it is empty"
    if not parts:
        raise UserError(
            "the alert command cannot be read",
            why=reason,
            fix="write it as in a shell; quotes must be closed. It is run without a shell",
            where="train.run.alerts.command",
        )
    return parts


def check_webhook(address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(
            "the webhook is not an http(s) address",
            fix="write it whole: https://host/path",
            where="train.run.alerts.webhook",
        )
    return address


def run_command(command: list[str], body: bytes, *, seconds: float = COMMAND_SECONDS) -> str:
    """Run the command with the alert on its input. Returns why it failed, with its last line of output, or
    nothing.
    """
    # Not a pipe: what the command leaves running may keep its end open.
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            return f"could not be started: {error.strerror}"
        try:
            child.communicate(body, timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            return f"was ended: it took longer than {seconds:.0f} s{_last_line(output, command)}"
        return (
            f"ended with exit code {child.returncode}{_last_line(output, command)}"
            if child.returncode
            else ""
        )


def _last_line(output: IO[bytes], command: list[str]) -> str:
    """The last line of what a command wrote, without its own arguments. The caller redacts it."""
    output.seek(max(output.seek(0, os.SEEK_END) - LONGEST_OUTPUT, 0))
    lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    # The arguments may be secret: a command that fails often repeats them.
    for word in sorted(command, key=len, reverse=True):
        last = last.replace(word, "…") if len(word) >= SHORTEST_SECRET else last
    return f": {last[:LONGEST_LINE]}" if last else ""


def post(
    address: str, body: bytes, *, pauses: tuple[float, ...] = WEBHOOK_PAUSES, seconds: float = WEBHOOK_SECONDS
) -> str:
    """Post it. Returns why it failed after all attempts, or nothing. A final refusal (4xx) is not retried."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    failure = ""
    for pause in (0.0, *pauses):
        threading.Event().wait(pause)
        try:
            with HttpClient(longest=LONGEST_ANSWER).send(request, seconds=seconds) as answer:
                if answer.status < 300:
                    return ""
                failure = f"answered with status {answer.status}"
                if not may_pass(answer.status):
                    break
        except NoAnswer as error:
            failure = f"could not be reached: {error}"
    return failure
