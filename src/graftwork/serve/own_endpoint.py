"""The endpoint of this project, as a client on this machine asks it and has it reload its settings.

Input: the settings by which it was started. Output: its answers. Its own certificate is trusted and no other;
the key comes from the environment and goes into a header only. The gateway holds a lock in its folder, by
which `graft serve --reload` finds it, and writes there what each reload did.
"""

import json
import os
import signal
import ssl
import time
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from graftwork.files.disk import read_record
from graftwork.process.http_client import LONGEST_ANSWER, HttpAnswer, HttpClient
from graftwork.process.worker import lock_holder
from graftwork.records.base import Record
from graftwork.records.errors import UserError, WorkerFailed
from graftwork.serve.settings import ServeSettings, is_loopback

RESULT_FILE = "reload.json"
RELOAD_SIGNAL = signal.SIGUSR1
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class OwnEndpoint:
    """`url` is without /v1. `admin` asks the listener for metrics and health, if there is one."""

    def __init__(self, settings: ServeSettings, *, root: Path, admin: bool = False) -> None:
        host, port = settings.host, settings.port
        if admin and settings.admin_port is not None:
            host, port = settings.admin_host or "127.0.0.1", settings.admin_port
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if settings.tls_certificate is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.is_here = is_loopback(host) and port != 0
        """Whether its address is fixed, and on this machine."""
        self._settings, self._root = settings, root

    def send(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float,
        longest: int = LONGEST_ANSWER,
        headers: Mapping[str, str] = {},
    ) -> AbstractContextManager[HttpAnswer]:
        """GET, or POST where there is a body. Raises NoAnswer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=dict(headers))
        request.add_header("content-type", "application/json")
        if key := os.environ.get(self._settings.api_key_env or "", "").strip():
            request.add_header("authorization", f"Bearer {key}")
        # No proxy of the environment: it could not reach this machine.
        client = HttpClient(longest=longest, proxies=False, context=self._trust_certificate())
        return client.send(request, seconds=seconds)

    def _trust_certificate(self) -> ssl.SSLContext | None:
        """Trusts the endpoint's own certificate; its name need not be that of this machine."""
        if self._settings.tls_certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            context.load_verify_locations(self._root / self._settings.tls_certificate)
        except (OSError, ssl.SSLError):
            return None
        return context


class ReloadResult(Record):
    """What the last reload did; `number` counts the reloads of this endpoint."""

    number: int
    changed: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    error: str | None = None


def gateway_folder(serving: Path) -> Path:
    """The lock file of a project's gateway."""
    return serving / "gateway"


def reload_endpoint(serving: Path) -> ReloadResult:
    """The changes that the endpoint applied. Raises if none is running, or if it rejects the settings."""
    folder = gateway_folder(serving)
    process = lock_holder(folder)
    if process is None or process <= 0:
        raise UserError(
            "no endpoint of this project runs here",
            why="there is nothing to reload",
            fix="`graft serve` starts it with the current settings",
            where=str(folder),
        )
    before = read_record(ReloadResult, folder / RESULT_FILE)
    number = before.number if before is not None else 0
    os.kill(process, RELOAD_SIGNAL)
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline and lock_holder(folder) == process:
        result = read_record(ReloadResult, folder / RESULT_FILE)
        if result is None or result.number <= number:
            time.sleep(_POLL_SECONDS)
        elif result.error is None:
            return result
        else:
            raise UserError(
                f"the endpoint keeps its old settings: {result.error}",
                why="settings that are not valid change nothing",
                fix="correct graft.yaml and reload again",
            )
    raise WorkerFailed(
        "the endpoint did not reload",
        why=f"process {process} did not respond for {_WAIT_SECONDS:.0f} s, or has ended",
        fix="check its output; `graft status` shows whether it answers",
    )
