"""Ray as an engine: pieces as tasks of a cluster that is there already.

In: pieces as bytes. Out: one event for each, in order. The driver of Ray is a child process, since Ray ends
its driver when the head dies: this process goes on. Authentication by token is on. Ray is imported only by
the child.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from graftwork.process.cluster.pieces import EngineLost, NodeRefused, code_stamp, pack
from graftwork.process.framing import encode
from graftwork.records import errors
from graftwork.records.errors import EnvironmentLacks, GraftError, WorkerFailed, pip_install

DRIVER = "graftwork.process.cluster.ray_driver"
LOG = "ray.log"
WAITING_PER_CPU = 2
AUTHENTICATION = {"RAY_AUTH_MODE": "token"}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Our pieces have limits of their own; Ray's looks at the memory of the whole machine.
    "RAY_memory_monitor_refresh_ms": "0",
    # After this many seconds without the head the driver gives up, and this machine goes on.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def ray_environment(*, token: str = "", open_cluster: bool = False) -> dict[str, str]:
    """The environment of every process that talks to Ray. `token` is a file."""
    chosen = dict(QUIET)
    if open_cluster:
        return chosen | {"RAY_AUTH_MODE": "disabled"}
    named = {"RAY_AUTH_TOKEN_PATH": str(Path(token).expanduser())} if token else {}
    return chosen | AUTHENTICATION | named


def require_ray() -> None:
    if find_spec("ray") is None:
        raise EnvironmentLacks(
            "Ray is not installed", why="`engine: ray` and the place `ray` need it", fix=pip_install("ray")
        )


@dataclass
class RayTasks:
    """Implements `PieceRunner`."""

    address: str = "auto"
    environment: Mapping[str, str] = field(default_factory=ray_environment)
    cpus: float = 1.0
    gpus: float = 0.0
    """Of each piece."""
    name: str = "ray"
    _driver: "_Driver | None" = field(default=None, init=False, repr=False, compare=False)

    def run(
        self, pieces: Iterator[bytes], *, entry: str, shared: bytes, folder: Path
    ) -> Generator[None, None, None]:
        require_ray()
        order = {"entry": entry, "stamp": code_stamp(), "folder": str(folder)}
        order |= {"address": self.address, "cpus": str(self.cpus), "gpus": str(self.gpus)}
        with _Driver(order, shared, folder, self.environment) as driver:
            self._driver = driver
            sent, next_out, more = 0, 0, True
            done: set[int] = set()
            with suppress(_Stopped):
                while True:
                    while more and sent - next_out < driver.room:
                        piece = next(pieces, None)
                        more = piece is not None
                        if piece is not None:
                            driver.send({"piece": str(sent)}, piece)
                            sent += 1
                    if next_out == sent:
                        return
                    done.add(driver.next_done())
                    while next_out in done:
                        done.discard(next_out)
                        next_out += 1
                        yield

    def stop(self) -> None:
        if self._driver is not None:
            self._driver.stop()


class _Stopped(Exception):
    """The pieces that are left are no longer wanted."""


class _Driver:
    """The child process and the messages from it."""

    def __init__(
        self, order: dict[str, str], shared: bytes, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self._log = folder / LOG
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", DRIVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self._events: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="ray events").start()
        self.send(order, shared)
        self.room = 1

    def __enter__(self) -> "_Driver":
        try:
            ready = self._next()
        except BaseException:
            self.__exit__()
            raise
        self.room = max(int(ready["cpus"]) * WAITING_PER_CPU, 2)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._child.stdin is not None:
            with suppress(OSError):
                self._child.stdin.close()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def send(self, head: dict[str, str], blob: bytes) -> None:
        message = pack(head, blob)
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(encode(message, "packet4"))
            self._child.stdin.flush()
        except OSError:
            raise self._lost() from None

    def stop(self) -> None:
        self._events.put({"stopped": True})

    def next_done(self) -> int:
        """The number of the next piece that is done."""
        return int(self._next()["piece"])

    def _next(self) -> dict[str, Any]:
        event = self._events.get()
        if event is None:
            raise self._lost()
        if "stopped" in event:
            raise _Stopped
        if "lost" in event:
            raise EngineLost(event["lost"])
        if "error" in event:
            raise to_error(event)
        return event

    def _listen(self) -> None:
        stream: IO[bytes] | None = self._child.stdout
        assert stream is not None
        for line in stream:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _lost(self) -> EngineLost:
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        return EngineLost(f"the connection to the cluster ended ({last[:200]})")


def to_error(event: Mapping[str, Any]) -> GraftError:
    """The error of a node, as this process raises it."""
    kinds = {"NodeRefused": NodeRefused}
    kind = kinds.get(event["error"]) or getattr(errors, event["error"], None)
    known = kind if isinstance(kind, type) and issubclass(kind, GraftError) else WorkerFailed
    return known(event["what"], why=event["why"], fix=event["fix"], where=event["where"])
