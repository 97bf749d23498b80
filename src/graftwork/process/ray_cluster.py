"""Ray as an engine: pieces as tasks of an existing cluster, or one command on some of its nodes.

Input: pieces as bytes, or a command with its place holders `{rank}` and `{host}`. Output: one event for each
piece, or the exit code of each machine. Only a child process imports Ray, `python -m
graftwork.process.ray_cluster`, since Ray ends its driver when the head dies: the command continues. The child
checks every node before its first piece. A node that dies costs its piece, which Ray starts again on another
one; of a command it ends the other machines. Authentication by token is on.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from graftwork.process.pieces import (
    LONGEST_PIECE,
    EngineLost,
    NodeRefused,
    code_stamp,
    describe_failure,
    pack,
    refuse_code,
    unpack,
    work_on,
)
from graftwork.process.stdio import encode, read_messages
from graftwork.records import errors
from graftwork.records.errors import EnvironmentFailure, GraftError, WorkerFailed, pip_install

DRIVER = "graftwork.process.ray_cluster"
LOG = "ray.log"
WAITING_PER_CPU = 2
AUTHENTICATION = {"RAY_AUTH_MODE": "token"}
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Our pieces have limits of their own; Ray's looks at the memory of the whole machine.
    "RAY_memory_monitor_refresh_ms": "0",
    # After this many seconds without the head the driver gives up, and this machine continues.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}


def ray_environment(*, token: str = "", open_cluster: bool = False) -> dict[str, str]:
    """The environment of every process that talks to Ray. `token` is a file."""
    environment = dict(QUIET)
    if open_cluster:
        return environment | {"RAY_AUTH_MODE": "disabled"}
    token_path = {"RAY_AUTH_TOKEN_PATH": str(Path(token).expanduser())} if token else {}
    return environment | AUTHENTICATION | token_path


def require_ray() -> None:
    if find_spec("ray") is None:
        raise EnvironmentFailure(
            "Ray is not installed", why="`engine: ray` and the place `ray` need it", fix=pip_install("ray")
        )


@dataclass
class RayTasks:
    """Implements `PieceRunner`."""

    address: str = "auto"
    environment: Mapping[str, str] = field(default_factory=ray_environment)
    cpus: float = 1.0
    gpus: float = 0.0
    """GPUs of each piece."""
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
            sent, next_out, has_more = 0, 0, True
            done: set[int] = set()
            with suppress(_Stopped):
                while True:
                    while has_more and sent - next_out < driver.room:
                        piece = next(pieces, None)
                        has_more = piece is not None
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
    """The remaining pieces are no longer wanted."""


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
    error_class = kind if isinstance(kind, type) and issubclass(kind, GraftError) else WorkerFailed
    return error_class(event["what"], why=event["why"], fix=event["fix"], where=event["where"])


WAIT_SECONDS = 0.2
NODES_SECONDS = 5.0
PROBE_SECONDS = 60.0
NOTICE_SECONDS = 20.0
"""How long Ray may take to notice that a node is gone."""
HEAD_SECONDS = 10.0
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` notes the address of the head."""
RETRIES = 5
"""How often a piece is started again after its node died."""


def open_events() -> Callable[..., None]:
    """Writes an event to standard output, where Ray and its children print nothing from now on."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    return say


def run_tasks() -> int:
    say = open_events()
    import ray

    messages = read_messages(sys.stdin.buffer, "packet4", longest=LONGEST_PIECE)
    message = next(messages, None)
    if message is None:
        return 0
    order, (shared,) = unpack(message)
    if (fault := connect(ray, order["address"])) is not None:
        say(lost=fault)
        return 0
    try:
        check_nodes(ray, order["stamp"], order["folder"])
        say(cpus=int(ray.cluster_resources().get("CPU", 1)))
        _Tasks(ray, order, shared, say).run(messages)
    except GraftError as error:
        say(**error.as_json())
    finally:
        ray.shutdown()
    return 0


def connect(ray: Any, address: str) -> str | None:
    """Connect to the cluster; why it cannot be reached, or None."""
    try:
        head = os.environ.get("RAY_ADDRESS", "auto") if address == "auto" else address
        if head == "auto":
            # What Ray noted on this machine.
            head = CURRENT_CLUSTER.read_text().strip() if CURRENT_CLUSTER.is_file() else ""
        host, _, port = head.rpartition(":")
        if host and port.isdigit():
            # Ray itself tries for minutes.
            socket.create_connection((host.strip("[]"), int(port)), timeout=HEAD_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="WARNING", namespace="graft")
    except Exception as error:  # Ray raises many kinds
        first = (str(error).splitlines() or ["no message"])[0]
        return f"the cluster cannot be reached: {type(error).__name__}: {first[:200]}"
    return None


def check_nodes(ray: Any, stamp: str, folder: str) -> None:
    """Refuse a node with other code, or without the shared folder, by its name."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = ray.remote(_describe_node)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    references = [
        probe.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folder)
        for node in nodes
    ]
    for node, reference in zip(nodes, references, strict=True):
        name = node["NodeManagerHostname"]
        try:
            facts = ray.get(reference, timeout=PROBE_SECONDS)
        except Exception as error:  # Ray raises many kinds
            if _is_lost(ray, node["NodeID"]):
                continue
            raise EnvironmentFailure(
                f"the node {name} is not responding",
                why=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                fix="take it out of the cluster, or check its logs",
                where=name,
            ) from None
        if facts["stamp"] != stamp:
            raise refuse_code(facts["node"], actual=facts["stamp"], expected=stamp)
        if not facts["shared"]:
            raise EnvironmentFailure(
                f"the node {facts['node']} does not see the project's folder",
                why="pieces and their results are files that all nodes share",
                fix="put the project on a file system that all nodes share, under the same path",
                where=folder,
            )


def _is_lost(ray: Any, node_id: str) -> bool:
    """Return whether Ray gives up a node that does not answer. It notices the death of one only after a
    while.
    """
    until = time.monotonic() + NOTICE_SECONDS
    while any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True


def _describe_node(folder: str) -> dict[str, Any]:
    """Runs on every node, whatever graftwork it has: sent as code, with imports of its own."""
    import socket
    from pathlib import Path

    try:
        from graftwork.process.pieces import code_stamp

        stamp = code_stamp()
    except Exception:  # another version, or none
        try:
            from graftwork.version import __version__ as stamp
        except Exception:
            stamp = ""
    return {"node": socket.gethostname(), "stamp": stamp, "shared": Path(folder).is_dir()}


def _run_piece(order: dict[str, str], shared: bytes, piece: bytes) -> dict[str, object] | None:
    """Runs on a node. An error is an answer: only the loss of a node starts a piece again."""
    import ray

    # Several nodes may be on one host.
    node = f"{socket.gethostname()}-{ray.get_runtime_context().get_node_id()[:6]}"
    try:
        work_on({**order, "node": node}, shared, piece)
    except Exception as error:  # whatever the work raises
        return describe_failure(error)
    return None


class _Tasks:
    def __init__(self, ray: Any, order: dict[str, str], shared: bytes, say: Any) -> None:
        self._ray, self._order, self._say = ray, order, say
        self._shared = ray.put(shared)
        self._work = ray.remote(_run_piece).options(
            num_cpus=float(order["cpus"]),
            num_gpus=float(order["gpus"]),
            max_retries=RETRIES,
            retry_exceptions=False,
            scheduling_strategy="SPREAD",
        )
        self._running: dict[Any, str] = {}
        self._arrived: SimpleQueue[bytes | None] = SimpleQueue()
        self._polled_at = time.monotonic()

    def run(self, messages: Iterator[bytes]) -> None:
        """Run until the command closes the stream: it is done, or gone."""

        def listen() -> None:
            for message in messages:
                self._arrived.put(message)
            self._arrived.put(None)

        threading.Thread(target=listen, daemon=True).start()
        while self._take(wait=not self._running) and self._collect():
            pass

    def _take(self, *, wait: bool) -> bool:
        """Start the pieces that have arrived; False once no more will come."""
        while True:
            try:
                message = self._arrived.get(block=wait)
            except Empty:
                return True
            if message is None:
                return False
            head, (piece,) = unpack(message)
            order = {**self._order, "piece": head["piece"]}
            self._running[self._work.remote(order, self._shared, piece)] = head["piece"]
            wait = False

    def _collect(self) -> bool:
        """Report finished pieces; False if nothing more can come."""
        # Pieces that arrive are started between two calls.
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=WAIT_SECONDS)
        if not ready and time.monotonic() - self._polled_at >= NODES_SECONDS:
            self._polled_at = time.monotonic()
            if not any(node["Alive"] and node["Resources"].get("CPU") for node in self._ray.nodes()):
                self._say(lost="no node is left")
                return False
        for reference in ready:
            number = self._running.pop(reference)
            try:
                failure = self._ray.get(reference)
            except Exception as error:  # Ray raises many kinds
                self._say(lost=f"piece {number} was lost with its node: {type(error).__name__}")
                return False
            if failure is not None:
                self._say(**failure)
                return False
            self._say(piece=number)
        return True


PLACE_SECONDS = 600.0
"""How long to wait for enough free nodes."""
LOST = -1
"""The exit code of a machine whose node died."""


def run_gang(text: str) -> int:
    say = open_events()
    import ray

    order = json.loads(text)
    if (fault := connect(ray, order["address"])) is not None:
        say(lost=fault)
        return 1
    try:
        check_nodes(ray, order["stamp"], order["folder"])
        return _run(ray, order, say)
    except GraftError as error:
        say(**error.as_json())
        return 1
    finally:
        ray.shutdown()


def machine_log(folder: Path, rank: int) -> Path:
    """The output of one machine."""
    return folder / f"machine-{rank}.log"


def _run(ray: Any, order: dict[str, Any], say: Any) -> int:
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    share = {"CPU": order["cpus"], **({"GPU": order["gpus"]} if order["gpus"] else {})}
    group = placement_group([share] * order["machines"], strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=PLACE_SECONDS)
    except ray.exceptions.GetTimeoutError:
        remove_placement_group(group)
        say(lost=f"the cluster has no {order['machines']} free nodes with {share}")
        return 1

    def at(function: Any, rank: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        return ray.remote(function).options(
            num_cpus=order["cpus"], num_gpus=order["gpus"], scheduling_strategy=strategy, max_retries=0
        )

    host = ray.get(at(_own_address, 0).remote())
    parts = {
        at(_run_command, rank).remote(
            order["command"], rank, host, str(machine_log(Path(order["folder"]), rank))
        ): rank
        for rank in range(order["machines"])
    }
    waiting, failed = list(parts), False
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        try:
            code = int(ray.get(ready[0]))
        except Exception:  # its node died, or it was cancelled
            code = LOST
        say(rank=parts[ready[0]], code=code)
        if code and not failed:
            failed = True
            for reference in waiting:
                # They would wait for the missing one until their own time limit.
                ray.cancel(reference, force=True)
    remove_placement_group(group)
    return 0


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _run_command(command: list[str], rank: int, host: str, log: str) -> int:
    """Runs on a node. Its output goes to the shared folder: that of Ray's workers stays on the node."""
    arguments = [word.replace("{rank}", str(rank)).replace("{host}", host) for word in command]
    with Path(log).open("ab") as output:
        return subprocess.run(
            arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(run_gang(sys.argv[1]) if len(sys.argv) > 1 else run_tasks())
