"""Hosts that are there already: this machine (`local`) and others over plain SSH (`ssh`).

In: an order with its bundle. Out: a job in `jobs/<label>` of the host's folder, which outlives the
connection. Both run the commands of `far_side.py` with the host's Python: no daemon, no root, no container,
nothing installed. Only files that the host does not have are sent.
"""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date
from functools import cache
from pathlib import Path
from typing import IO, Any, Protocol

from graftwork.fleet.bundle import BUNDLE_FILE, read_bundle
from graftwork.fleet.place import LABEL, PlaceUnreachable, Refused, unknown_job
from graftwork.fleet.results import take_packed
from graftwork.fleet.settings import HostSettings
from graftwork.process.ssh import COMMAND, UNREACHED, ssh_command
from graftwork.records.errors import UserMistake
from graftwork.records.fleet import Bundle, JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

REFUSED = 44
NOT_FOUND = (126, 127)
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A connection that is cut without notice is given up after a minute."""
SHARED_SECONDS = 20
"""How long a connection waits for the next command."""
Feed = Callable[[IO[bytes]], None]


class HostConnection(Protocol):
    """Runs the commands of one host."""

    name: str

    def run(self, *arguments: str, feed: Feed | None = None, into: IO[bytes] | None = None) -> bytes:
        """The output of the command. An error of the host is `Refused`, no answer `PlaceUnreachable`."""


class ProcessConnection:
    """Commands as child processes: of this machine, or of ssh."""

    def __init__(self, name: str, words: list[str], *, root: str, far: bool) -> None:
        self.name, self._words, self._root, self._far = name, words, root, far

    def run(self, *arguments: str, feed: Feed | None = None, into: IO[bytes] | None = None) -> bytes:
        script = _script()
        start = f"import sys;exec(compile(sys.stdin.buffer.read({len(script)}),'far_side','exec'))"
        last = ["-c", start, self._root, *arguments]
        words = [*self._words, *(map(shlex.quote, last) if self._far else last)]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=into or subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise Refused(
                f"{words[0]} cannot be started", why=str(error.strerror), fix="install an SSH client"
            ) from error
        with process:
            feeder = threading.Thread(target=_feed, args=(process.stdin, script, feed), daemon=True)
            feeder.start()
            assert process.stderr is not None
            errors: list[bytes] = []
            reader = threading.Thread(target=lambda: errors.append(process.stderr.read()), daemon=True)  # type: ignore[union-attr]
            reader.start()
            output = process.stdout.read() if process.stdout is not None else b""
            code = process.wait()
            # A shared connection may keep the pipe open behind the command.
            reader.join(timeout=2.0)
            feeder.join()
        if code:
            raise self._explain(code, output, b"".join(errors).decode(errors="replace"))
        return output

    def _explain(self, code: int, output: bytes, errors: str) -> Exception:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no output")
        if code == REFUSED:
            with suppress(ValueError):
                answer = json.loads(output)
                return Refused(answer["what"], why=answer["why"], fix=answer["fix"], where=self.name)
        if self._far and code == UNREACHED:
            return PlaceUnreachable(
                f"{self.name} cannot be reached: {last[:300]}",
                why="ssh could not log in there without asking",
                fix=f"make `ssh {self.name} true` work without a password; {COMMAND} may set options",
                where=self.name,
            )
        if code in NOT_FOUND:
            return Refused(
                f"there is no such Python on {self.name}: {last[:200]}",
                fix="install Python 3.11 or later there, or set `python` of the host in graft.yaml",
                where=f"fleet.hosts.{self.name}.python",
            )
        return PlaceUnreachable(
            f"a command on {self.name} failed with {code}: {last[:300]}",
            fix="run it again; `graft fleet list` shows what exists",
            where=self.name,
        )


class HostsPlace:
    """A place of one or more hosts."""

    paid = False

    def __init__(self, name: str, connections: Mapping[str, HostConnection]) -> None:
        self.name = name
        self._connections = dict(connections)
        self.sent_bytes = 0
        """By the last submit."""

    def offer(self) -> tuple[Offer, ...]:
        today = date.today().isoformat()
        return tuple(
            Offer(
                place=self.name,
                gpu=gpus[0]["name"] if gpus else "",
                gpus=len(gpus),
                usd_per_hour=0.0,
                instance=host,
                source=f"nvidia-smi on {host}" if gpus else host,
                dated=today,
            )
            for host, gpus in ((host, facts["gpus"]) for host, facts in self.probe().items())
        )

    def probe(self) -> dict[str, dict[str, Any]]:
        """Python, free disk, cards and running jobs of each host that answers."""
        found: dict[str, dict[str, Any]] = {}
        failure: PlaceUnreachable | None = None
        for host, connection in self._connections.items():
            try:
                found[host] = json.loads(connection.run("probe"))
            except PlaceUnreachable as error:
                failure = error
        if not found and failure is not None:
            raise failure
        return found

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        folder = Path(order.bundle)
        bundle = read_bundle(folder)
        host = self._holder(order.label) or self._choose()
        connection = self._connections[host]
        self.sent_bytes = send_files(connection, folder, bundle)
        request = {
            "label": order.label,
            "bundle": (folder / BUNDLE_FILE).read_text(),
            "seconds": order.seconds,
            "secrets": dict(secrets),
        }
        body = json.dumps(request).encode()
        connection.run("start", feed=lambda stream: _write(stream, body))
        return PlacedJob(place=self.name, id=f"{host}/{order.label}", label=order.label, host=host)

    def poll(self, job: PlacedJob) -> JobPoll:
        return JobPoll.from_json(self._at(job).run("status", job.label))

    def log(self, job: PlacedJob) -> str:
        text: str = json.loads(self._at(job).run("log", job.label))
        return text

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if self.poll(job).phase == "gone":
            raise unknown_job(self.name, job.label)
        take_packed(lambda packed: self._at(job).run("pack", job.label, into=packed), folder)

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        self._at(job).run("stop", job.label, *(["now"] if at_once else []))

    def list(self) -> tuple[PlacedJob, ...]:
        return tuple(
            PlacedJob(place=self.name, id=f"{host}/{label}", label=label, host=host)
            for host, connection in self._connections.items()
            for label in json.loads(connection.run("list"))
            if LABEL.fullmatch(label)
        )

    def remove(self, job: PlacedJob) -> None:
        """Remove the job's folder at the host; files that other jobs share stay."""
        self._at(job).run("remove", job.label)

    def _at(self, job: PlacedJob) -> HostConnection:
        connection = self._connections.get(job.host)
        if connection is None:
            raise UserMistake(
                f"the job {job.label} is on the host {job.host}, which is not configured",
                fix=f"add {job.host} to `fleet.hosts`; known: {', '.join(self._connections)}",
                where="fleet.hosts",
            )
        return connection

    def _holder(self, label: str) -> str | None:
        """The host that has a job of this label: a job never runs on two."""
        if len(self._connections) == 1:
            return None
        for host, connection in self._connections.items():
            if json.loads(connection.run("status", label))["phase"] != "gone":
                return host
        return None

    def _choose(self) -> str:
        """The host with the most free memory on a card; without cards the one with the fewest jobs."""
        if len(self._connections) == 1:
            return next(iter(self._connections))
        found = self.probe()
        return max(found, key=lambda host: (_free_memory(found[host]), -found[host]["jobs"]))


def _free_memory(facts: dict[str, Any]) -> float:
    return max((float(gpu["free_mib"]) for gpu in facts["gpus"]), default=0.0)


def local_place(root: Path) -> HostsPlace:
    """This machine: jobs in a folder of their own, which outlive this process."""
    connection = ProcessConnection("local", [sys.executable], root=str(root), far=False)
    return HostsPlace("local", {"local": connection})


def ssh_place(hosts: Mapping[str, HostSettings], *, name: str = "ssh") -> HostsPlace:
    if not hosts:
        raise UserMistake(
            "no hosts are configured",
            fix="add one to graft.yaml: `fleet: {hosts: {gpu1: {address: user@machine}}}`",
            where="fleet.hosts",
        )
    return HostsPlace(
        name,
        {
            key: ProcessConnection(
                key,
                [*ssh_command(*ALIVE, *shared_connection()), host.address, host.python],
                root=host.folder,
                far=True,
            )
            for key, host in hosts.items()
        },
    )


@cache
def shared_connection() -> tuple[str, ...]:
    """Options that let commands share a connection, where a private folder for its socket can be had."""
    folder = Path(tempfile.gettempdir()) / f"graft-ssh-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return ()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or len(str(folder)) > 50:
        return ()
    persist = ("-o", "ControlMaster=auto", "-o", f"ControlPersist={SHARED_SECONDS}")
    return (*persist, "-o", f"ControlPath={folder}/%C")


@cache
def _script() -> bytes:
    return Path(__file__).with_name("far_side.py").read_bytes()


def _feed(stream: IO[bytes], script: bytes, feed: Feed | None) -> None:
    # A host that ends early closes the pipe; its exit code says why.
    with suppress(BrokenPipeError), stream:
        stream.write(script)
        if feed is not None:
            feed(stream)


def _write(stream: IO[bytes], body: bytes) -> None:
    stream.write(body)


def send_files(connection: HostConnection, folder: Path, bundle: Bundle) -> int:
    """Send the files that the host does not have; returns their bytes."""
    by_hash = {file.sha256: (folder / name, file.size) for name, file in bundle.files.items()}
    asked = json.dumps(list(by_hash)).encode()
    missing = json.loads(connection.run("missing", feed=lambda stream: _write(stream, asked)))
    if not missing:
        return 0

    def pack(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for name in missing:
                archive.add(by_hash[name][0], arcname=name, recursive=False)

    connection.run("receive", feed=pack)
    return sum(by_hash[name][1] for name in missing)
