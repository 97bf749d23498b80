"""Pieces of work as bytes, and how a node works on one.

In: the name of a function, what all pieces have in common, one piece. Out: files in a folder that all nodes
share, named by their content: a piece that is done twice gives the same files. Every node checks that it has
the same code before its first piece. Nothing is pickled.
"""

import hashlib
import importlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from graftwork.records.errors import EnvironmentLacks, GraftError
from graftwork.version import __version__

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Context = Any

PACKAGE = Path(__file__).parents[2]
JOURNALS = "journals"
_LENGTH = 8


@dataclass(frozen=True)
class RemoteWork(Generic[Piece, Result]):
    """What a cluster needs to work on pieces."""

    entry: str
    """`module:function` of graftwork; called with what `prepare` returned, the head and the blobs."""
    shared: bytes
    """What all pieces have in common; `module:prepare` unpacks it once in each process."""
    encode: Callable[[Piece], bytes]
    collect: Callable[[Piece], Result | None]
    """Reads what a node left in the shared folder; None if it is not there."""


class EngineLost(Exception):
    """The cluster is gone or has no node left. What is done is kept."""


class NodeRefused(EnvironmentLacks):
    """A node cannot take part; the message names it."""


def pack(head: Any, *blobs: bytes) -> bytes:
    """Pack JSON and bytes into one message."""
    text = json.dumps({"head": head, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join((len(text).to_bytes(_LENGTH, "big"), text, *blobs))


def unpack(message: bytes) -> tuple[Any, list[bytes]]:
    """Take apart what `pack` made."""
    view = memoryview(message)
    length = int.from_bytes(view[:_LENGTH], "big")
    body = json.loads(bytes(view[_LENGTH : _LENGTH + length]))
    at, blobs = _LENGTH + length, []
    for size in body["sizes"]:
        blobs.append(bytes(view[at : at + size]))
        at += size
    if at != len(view):
        raise ValueError("the message has another length than its head says")
    return body["head"], blobs


@cache
def code_stamp() -> str:
    """The version of this package and a hash of its sources: other code may give other bytes."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{__version__}+{digest.hexdigest()[:12]}"


def require_same_code(stamp: str, node: str) -> None:
    """Refuse a node with other code than the command has."""
    if stamp != code_stamp():
        raise refuse_code(node, found=code_stamp(), wanted=stamp)


def refuse_code(node: str, *, found: str, wanted: str) -> NodeRefused:
    return NodeRefused(
        f"the node {node} has graftwork {found or 'not installed'}, this command {wanted}",
        why="nodes with other code could give other datasets",
        fix=f"install the same graftwork on {node}, or take it out of the cluster",
        where=node,
    )


def work_on(order: dict[str, str], shared: bytes, piece: bytes) -> None:
    """Work on one piece on a node. `order` has the entry, the stamp, the folder and the piece's number."""
    node = order.get("node") or socket.gethostname()
    require_same_code(order["stamp"], node)
    _note(order, node, "begun")
    work, context = _prepare(order["entry"], shared)
    work(context, *unpack(piece))
    _note(order, node, "done")


def _note(order: dict[str, str], node: str, state: str) -> None:
    """In a file of this process: appending to one file is not safe on every network disk."""
    path = Path(order["folder"]) / JOURNALS / f"{node}-{os.getpid()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"piece": order["piece"], "node": node, "state": state, "at": time.time()}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class MapReport:
    """How the pieces were divided."""

    nodes: dict[str, int]
    """Pieces that each node finished."""
    repeated: int
    """Pieces that were begun more than once."""

    def __str__(self) -> str:
        shares = ", ".join(f"{node} {count}" for node, count in sorted(self.nodes.items()))
        again = f", {self.repeated} repeated" if self.repeated else ""
        return f"{sum(self.nodes.values())} pieces on {len(self.nodes)} node(s): {shares}{again}"


def read_journals(folder: Path) -> MapReport:
    """Sum up the journals of all processes."""
    nodes: dict[str, int] = {}
    begun: dict[str, int] = {}
    for path in sorted((folder / JOURNALS).glob("*.jsonl")):
        for line in _whole_lines(path):
            if line["state"] == "done":
                nodes[line["node"]] = nodes.get(line["node"], 0) + 1
            else:
                begun[line["piece"]] = begun.get(line["piece"], 0) + 1
    return MapReport(nodes, sum(count > 1 for count in begun.values()))


def _whole_lines(path: Path) -> Iterable[dict[str, Any]]:
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except ValueError:
            # The process was killed while it wrote.
            continue


_prepared: dict[str, tuple[Callable[..., None], Context]] = {}


def _prepare(entry: str, shared: bytes) -> tuple[Callable[..., None], Context]:
    """The function and what it needs, once a process."""
    key = f"{entry} {hashlib.sha256(shared).hexdigest()}"
    if key not in _prepared:
        name, _, function = entry.partition(":")
        if not name.startswith("graftwork."):
            raise ValueError(f"{entry} is no function of graftwork")
        module = importlib.import_module(name)
        # One at a time: a tokenizer takes memory.
        _prepared.clear()
        _prepared[key] = getattr(module, function), module.prepare_shared(*unpack(shared))
    return _prepared[key]


def describe_failure(error: BaseException) -> dict[str, object]:
    """An error of a node for the command that waits for it."""
    if isinstance(error, GraftError):
        return error.as_json()
    text = f"{type(error).__name__}: {error}"
    return {"error": "WorkerFailed", "what": text[:500], "why": "", "fix": "", "where": socket.gethostname()}
