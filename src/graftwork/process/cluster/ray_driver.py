"""The driver of Ray: `python -m graftwork.process.cluster.ray_driver`, started by `ray_tasks.py`.

In: messages on standard input, an order first and then pieces. Out: a line of JSON for each piece that is
done. Checks every node before the first piece. A node that dies costs its piece, which Ray starts again on
another one.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from graftwork.process.cluster.pieces import LONGEST_PIECE, describe_failure, refuse_code, unpack, work_on
from graftwork.process.framing import read_messages
from graftwork.records.errors import EnvironmentLacks, GraftError

WAIT_SECONDS = 0.2
NODES_SECONDS = 5.0
PROBE_SECONDS = 60.0
NOTICE_SECONDS = 20.0
"""How long Ray may take to notice that a node is gone."""
HEAD_SECONDS = 10.0
CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` notes the address of the head."""
RETRIES = 5
"""How often a piece is begun again whose node died."""


def open_events() -> Callable[..., None]:
    """Writes an event to standard output, where Ray and its children print nothing from now on."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**event: Any) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    return say


def main() -> int:
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
    asked = [
        probe.options(
            num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(folder)
        for node in nodes
    ]
    for node, reference in zip(nodes, asked, strict=True):
        name = node["NodeManagerHostname"]
        try:
            found = ray.get(reference, timeout=PROBE_SECONDS)
        except Exception as error:  # Ray raises many kinds
            if _is_lost(ray, node["NodeID"]):
                continue
            raise EnvironmentLacks(
                f"the node {name} does not answer",
                why=f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
                fix="take it out of the cluster, or look at its logs",
                where=name,
            ) from None
        if found["stamp"] != stamp:
            raise refuse_code(found["node"], found=found["stamp"], wanted=stamp)
        if not found["shared"]:
            raise EnvironmentLacks(
                f"the node {found['node']} does not see the project's folder",
                why="pieces and their results are files that all nodes share",
                fix="put the project on a file system that all nodes share, under the same path",
                where=folder,
            )


def _is_lost(ray: Any, node_id: str) -> bool:
    """Whether Ray gives up a node that does not answer. It notices the death of one only after a while."""
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
        from graftwork.process.cluster.pieces import code_stamp

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
        self._asked = time.monotonic()

    def run(self, messages: Iterator[bytes]) -> None:
        """Until the command closes the stream: it is done, or gone."""

        def listen() -> None:
            for message in messages:
                self._arrived.put(message)
            self._arrived.put(None)

        threading.Thread(target=listen, daemon=True).start()
        while self._take(wait=not self._running) and self._collect():
            pass

    def _take(self, *, wait: bool) -> bool:
        """Start what has arrived; False once no more will come."""
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
        """Report what is done; False if nothing can come any more."""
        # Pieces that arrive are started between two calls.
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=WAIT_SECONDS)
        if not ready and time.monotonic() - self._asked >= NODES_SECONDS:
            self._asked = time.monotonic()
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


if __name__ == "__main__":
    sys.exit(main())
