"""Existing hosts: this machine (`local`), others over plain SSH (`ssh`), nodes of a cluster.

Input: an order with its bundle. Output: a job in `jobs/<label>` of the host's folder, which outlives the
connection. All run the commands of `far_side.py` with the host's Python: no daemon, no root, no container,
nothing installed. Only files that the host does not have are sent. What starts a job in a folder that all
nodes of a cluster share is the work of the cluster.
"""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import date
from functools import cache
from pathlib import Path
from typing import IO, Annotated, Any, Protocol, cast

from pydantic import Field

from graftwork.fleet.bundle import BUNDLE_FILE, read_bundle, take_packed
from graftwork.fleet.far_side import GONE, READY, JobHost, PieceWriter, answer, explain_failure
from graftwork.fleet.place import LABEL, NotThere, PlaceUnreachable, Refused, unknown_job
from graftwork.process.ssh import COMMAND, UNREACHED, ssh_command
from graftwork.records.base import NotSecret, Record
from graftwork.records.errors import UserError
from graftwork.records.fleet import Bundle, JobOrder, JobPoll, PlacedJob
from graftwork.records.hardware import Offer

NOT_FOUND = (126, 127)
ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""A connection that is cut without notice is dropped after a minute."""
MOST_GREETING = 2**16
END_SECONDS = 5.0
"""How long a process may take to exit after its input ends."""
ANSWER_SECONDS = 120.0
"""Timeout of a short command on a host that is busy or hangs: other hosts and paid machines wait for it."""
SHORT = ("probe", "list", "status", "stop", "wait")
SHARED_SECONDS = 20
"""How long a connection waits for the next command."""
Feed = Callable[[IO[bytes]], None]


class HostSettings(Record):
    """A machine that is reached over SSH."""

    address: Annotated[str, NotSecret("a host, as ssh takes it")] = Field(
        min_length=1,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.@%:\[\]-]*$",
        description="[user@]host, as ssh takes it.",
    )
    python: str = Field("python3", description="Python 3.11 or later on that machine.")
    folder: str = Field("~/.graftwork", description="Where jobs and their files are kept there.")


class HostConnection(Protocol):
    """Runs the commands of one host."""

    name: str

    def run(self, *arguments: str, feed: Feed | None = None, into: IO[bytes] | None = None) -> bytes:
        """The output of the command. An error of the host is `Refused`, no answer `PlaceUnreachable`."""

    def send(self, files: Mapping[str, Path]) -> None:
        """Send files to the host, by their hashes."""


class ProcessConnection:
    """Sends commands to a child process: Python of this machine, or of another one over ssh. The process
    stays for the next command, because a login takes longer than a command. A process that has exited by then
    is started again: every command may be repeated.
    """

    def __init__(self, name: str, command: list[str], *, root: str, far: bool, address: str = "") -> None:
        self.name, self._words, self._root, self._far = name, command, root, far
        self._address = address or name
        self._session: HostSession | None = None
        self._lock = threading.Lock()

    def run(self, *arguments: str, feed: Feed | None = None, into: IO[bytes] | None = None) -> bytes:
        with self._lock:
            used, self._session = self._session, None
            offset = into.tell() if into is not None else 0
            if used is not None:
                with suppress(_Lost):
                    return self._ask(used, arguments, feed, into)
                used.end()
            if into is not None:
                into.seek(offset)
                into.truncate()
            script = _script()
            start = f"import sys;exec(compile(sys.stdin.buffer.read({len(script)}),'far_side','exec'))"
            # The commands use only the standard library: packages installed on the host are not searched.
            last = ["-I", "-S", "-c", start, self._root]
            last = [shlex.quote(word) for word in last] if self._far else last
            session = HostSession([*self._words, *last], script)
            try:
                return self._ask(session, arguments, feed, into)
            except _Lost:
                raise self._explain(*session.end()) from None

    def _ask(
        self, session: "HostSession", arguments: tuple[str, ...], feed: Feed | None, into: IO[bytes] | None
    ) -> bytes:
        output = io.BytesIO()
        waited = float(arguments[2]) if arguments[0] == "wait" else 0.0
        longest = ANSWER_SECONDS + waited if arguments[0] in SHORT else None
        code = session.ask(arguments, feed, into or output, seconds=longest)
        if code:
            session.end()
            raise _refusal(_read_back(into or output), self.name)
        self._session = session
        return output.getvalue()

    def send(self, files: Mapping[str, Path]) -> None:
        def pack(stream: IO[bytes]) -> None:
            with tarfile.open(fileobj=stream, mode="w|") as archive:
                for name, path in files.items():
                    archive.add(path, arcname=name, recursive=False)

        self.run("receive", feed=pack)

    def _explain(self, code: int, errors: str) -> Exception:
        last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "no output")
        if self._far and code == UNREACHED:
            return PlaceUnreachable(
                f"{self.name} cannot be reached: {last[:300]}",
                why="ssh could not log in there without a prompt",
                fix=f"make `ssh {self._address} true` work without a password; {COMMAND} may set options",
                where=self.name,
            )
        if code == -signal.SIGKILL:
            return PlaceUnreachable(
                f"{self.name} is not responding",
                why="it accepted the login, then hung",
                fix="log in there and find out what hangs: a disk or a network file system",
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


class _Lost(Exception):
    """The process ended before it had answered."""


class HostSession:
    """A process that carries out the commands of `far_side.py`, one after the other."""

    def __init__(self, words: list[str], script: bytes) -> None:
        # Not a pipe: a shared connection keeps its end open after the process.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            self._errors.close()
            raise Refused(
                f"{words[0]} cannot be started", why=str(error.strerror), fix="install an SSH client"
            ) from error
        assert self._process.stdin is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._close = weakref.finalize(self, _end_process, self._process, self._errors)
        self._is_ready = False
        with suppress(BrokenPipeError):
            self._stdin.write(script)

    def ask(
        self, words: tuple[str, ...], feed: Feed | None, into: IO[bytes], *, seconds: float | None
    ) -> int:
        """Write the answer of the command; returns its code. After this many seconds the process is
        killed.
        """
        if seconds is None:
            return self._ask(words, feed, into)
        limit = threading.Timer(seconds, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            return self._ask(words, feed, into)
        finally:
            limit.cancel()

    def _ask(self, words: tuple[str, ...], feed: Feed | None, into: IO[bytes]) -> int:
        # A host that cannot continue closes the pipe; its answer says why.
        with suppress(BrokenPipeError):
            self._stdin.write(json.dumps(words).encode() + b"\n")
            data = PieceWriter(self._stdin)
            if feed is not None:
                feed(cast(IO[bytes], data))
            data.end()
        assert self._process.stdout is not None
        answered, stream = False, self._process.stdout
        greeting = b""
        while not self._is_ready:
            byte = stream.read(1)
            if not byte or len(greeting) > MOST_GREETING:
                raise _Lost
            greeting += byte
            self._is_ready = greeting.endswith(READY)
        while len(head := stream.read(4)) == 4:
            size = int.from_bytes(head, "big")
            if not size:
                answered = True
                break
            while size and (piece := stream.read(min(size, 2**20))):
                into.write(piece)
                size -= len(piece)
        code = stream.read(1) if answered else b""
        if not code:
            raise _Lost
        return code[0]

    def end(self) -> tuple[int, str]:
        """Return the exit code of the process, and what it wrote on standard error."""
        if self._process.poll() is None:
            with suppress(OSError):
                self._stdin.close()
        code = self._process.wait()
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._close()
        return code, text


def _end_process(process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
    """Close its input, which ends the process."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    errors.close()


def _refusal(output: bytes, host: str) -> Refused:
    # A host that fails in the middle of its answer says so after what it had written.
    refusal = json.loads(output[max(output.rfind(b'{"what": '), 0) :])
    kind = NotThere if refusal["what"] == GONE else Refused
    return kind(refusal["what"], why=refusal["why"], fix=refusal["fix"], where=host)


class OwnConnection:
    """The commands of this machine, carried out by this process."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self._root = name, root

    def run(self, *arguments: str, feed: Feed | None = None, into: IO[bytes] | None = None) -> bytes:
        request, output = io.BytesIO(), io.BytesIO()
        if feed is not None:
            feed(request)
            request.seek(0)
        code = answer(self._root, list(arguments), request, into or output)
        if code:
            raise _refusal(_read_back(into or output), self.name)
        return output.getvalue()

    def send(self, files: Mapping[str, Path]) -> None:
        for name, path in files.items():
            try:
                JobHost(self._root).take(name, path)
            except OSError as error:
                raise _refusal(json.dumps(explain_failure(error, self._root)).encode(), self.name) from error


class HostsPlace:
    """A place of one or more hosts."""

    paid = False

    def __init__(self, name: str, connections: Mapping[str, HostConnection]) -> None:
        self.name = name
        self._connections = dict(connections)
        self.sent_bytes = 0
        """Bytes sent by the last submit."""
        self.unreached: frozenset[str] = frozenset()
        """Hosts that did not answer the last `list`."""

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
        """Python, free disk, GPUs and running jobs of each host that answers."""
        answers: dict[str, dict[str, Any]] = {
            host: json.loads(text) for host, text in self._ask_all("probe").items()
        }
        return answers

    def _ask_all(self, *words: str) -> dict[str, bytes]:
        """The answer of each host that gives one; an error if none does."""
        outputs: dict[str, bytes] = {}
        failures: dict[str, PlaceUnreachable] = {}
        for host, connection in self._connections.items():
            try:
                outputs[host] = connection.run(*words)
            except PlaceUnreachable as error:
                failures[host] = error
        self.unreached = frozenset(failures)
        if outputs or not failures:
            return outputs
        if len(failures) == 1:
            raise next(iter(failures.values()))
        raise PlaceUnreachable(
            f"none of the hosts {', '.join(failures)} can be reached",
            why="; ".join(error.what for error in failures.values())[:600],
            fix=next(iter(failures.values())).fix,
            where="fleet.hosts",
        )

    def describe_dataset(self, path: str, *, model: str) -> dict[str, Any]:
        """Counts and hashes of a prepared dataset that is on the host, and its folder there."""
        if len(self._connections) > 1:
            raise UserError(
                f"{self.name} has several hosts, but its data is on one",
                fix=f"specify the host, as {self.name}:{next(iter(self._connections))}",
            )
        connection = next(iter(self._connections.values()))
        description: dict[str, Any] = json.loads(connection.run("dataset", path, model))
        return description

    def submit(self, order: JobOrder, *, secrets: Mapping[str, str]) -> PlacedJob:
        folder = Path(order.bundle)
        bundle = read_bundle(folder)
        host = self._choose_host(order.label)
        connection = self._connections[host]
        request = {
            "label": order.label,
            "bundle": (folder / BUNDLE_FILE).read_text(),
            "seconds": order.seconds,
            "secrets": dict(secrets),
        }
        self.sent_bytes = 0
        started = json.loads(connection.run("start", feed=_feed(request)))
        if started.get("missing"):
            self.sent_bytes = send_missing(connection, folder, bundle, started["missing"])
            connection.run("start", feed=_feed(request))
        return PlacedJob(place=self.name, id=f"{host}/{order.label}", label=order.label, host=host)

    def poll(self, job: PlacedJob) -> JobPoll:
        return JobPoll.from_json(self._connection_of(job).run("status", job.label))

    def wait(self, job: PlacedJob, seconds: float) -> JobPoll:
        """As `poll`, once the job is over or after this many seconds."""
        return JobPoll.from_json(self._connection_of(job).run("wait", job.label, f"{seconds:.3f}"))

    def log(self, job: PlacedJob) -> str:
        text: str = json.loads(self._connection_of(job).run("log", job.label))
        return text

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        try:
            take_packed(lambda packed: self._connection_of(job).run("pack", job.label, into=packed), folder)
        except NotThere:
            raise unknown_job(self.name, job.label) from None

    def stop(self, job: PlacedJob, *, at_once: bool = False) -> None:
        self._connection_of(job).run("stop", job.label, *(["now"] if at_once else []))

    def list(self) -> tuple[PlacedJob, ...]:
        """Jobs of the hosts that answer; `unreached` names the others."""
        return tuple(
            PlacedJob(place=self.name, id=f"{host}/{label}", label=label, host=host)
            for host, labels in self._ask_all("list").items()
            for label in json.loads(labels)
            if LABEL.fullmatch(label)
        )

    def remove(self, job: PlacedJob) -> None:
        """Remove the job's folder at the host; files that other jobs share stay."""
        self._connection_of(job).run("remove", job.label)

    def _connection_of(self, job: PlacedJob) -> HostConnection:
        connection = self._connections.get(job.host)
        if connection is None:
            raise UserError(
                f"the job {job.label} is on the host {job.host}, which is not configured",
                fix=f"add {job.host} to `fleet.hosts`; known: {', '.join(self._connections)}",
                where="fleet.hosts",
            )
        return connection

    def _choose_host(self, label: str) -> str:
        """The host that has a job of this label, for a job never runs on two; else the one with the most
        free memory on a GPU; without GPUs the one with the fewest jobs.

        Hosts that do not answer are skipped: the label of a new job is on none of them.
        """
        if len(self._connections) == 1:
            return next(iter(self._connections))
        for host, status in self._ask_all("status", label).items():
            if json.loads(status)["phase"] != "gone":
                return host
        load = {
            host: (max((float(gpu["free_mib"]) for gpu in facts["gpus"]), default=0.0), -facts["jobs"])
            for host, facts in self.probe().items()
        }
        return max(load, key=lambda host: load[host])


def local_place(root: Path) -> HostsPlace:
    """This machine: jobs in a folder of their own, which outlive this process."""
    return HostsPlace("local", {"local": OwnConnection("local", root)})


def ssh_place(hosts: Mapping[str, HostSettings]) -> HostsPlace:
    if not hosts:
        raise UserError(
            "no hosts are configured",
            fix="add one to graft.yaml: `fleet: {hosts: {gpu1: {address: user@machine}}}`",
            where="fleet.hosts",
        )
    ssh = ssh_command(*ALIVE, *shared_connection())
    connections = {
        key: ProcessConnection(
            key, [*ssh, host.address, host.python], root=host.folder, far=True, address=host.address
        )
        for key, host in hosts.items()
    }
    return HostsPlace("ssh", connections)


@cache
def shared_connection() -> tuple[str, ...]:
    """Options that let commands share a connection, if a private folder for its socket is available."""
    folder = Path(tempfile.gettempdir()) / f"graft-ssh-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return ()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or len(str(folder)) > 50:
        return ()
    persist = ("-o", "ControlMaster=auto", "-o", f"ControlPersist={SHARED_SECONDS}")
    return (*persist, "-o", f"ControlPath={folder}/%C")


@cache
def _script() -> bytes:
    return (Path(__file__).parents[1] / "far_side.py").read_bytes()


def _read_back(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read()


def _feed(content: Any) -> Feed:
    """Writes plain data for a command."""
    body = json.dumps(content).encode()

    def write(stream: IO[bytes]) -> None:
        stream.write(body)

    return write


def send_missing(connection: HostConnection, folder: Path, bundle: Bundle, missing: list[str]) -> int:
    """Send the files with these hashes; returns their bytes."""
    if not missing:
        return 0
    by_hash = {file.sha256: (folder / name, file.size) for name, file in bundle.files.items()}
    connection.send({name: by_hash[name][0] for name in missing})
    return sum(by_hash[name][1] for name in missing)


class SharedFolderPlace:
    """A cluster whose nodes all see the folder of jobs: what Slurm and Ray have in common."""

    name: str
    paid = False

    def __init__(self, folder: str) -> None:
        self.root = Path(folder).expanduser()
        self._files = ProcessConnection(self.name, [sys.executable], root=str(self.root), far=False)
        self.sent_bytes = 0

    def job_folder(self, label: str) -> Path:
        return self.root / "jobs" / label

    def lay_out(self, order: JobOrder) -> bool:
        """Put the bundle there. Returns whether the job has not written an end yet."""
        folder = Path(order.bundle)
        bundle = read_bundle(folder)
        hashes = sorted({file.sha256 for file in bundle.files.values()})
        missing = json.loads(self._files.run("missing", feed=_feed(hashes)))
        self.sent_bytes = send_missing(self._files, folder, bundle, missing)
        request = {"label": order.label, "bundle": (folder / BUNDLE_FILE).read_text()}
        self._files.run("prepare", feed=_feed(request))
        ended = self.status(order.label).phase == "ended"
        return not (ended and (self.job_folder(order.label) / "work/exit.json").exists())

    def status(self, label: str, *, queued: bool = False) -> JobPoll:
        """Only by the files of the job, unless the cluster says that it is `queued` and runs."""
        status = JobPoll.from_json(self._files.run("status", label))
        if not queued:
            return status
        phase = "running" if status.beat else "starting"
        return status.model_copy(update={"phase": phase, "exit_code": None, "message": ""})

    def log(self, job: PlacedJob) -> str:
        text: str = json.loads(self._files.run("log", job.label))
        return text

    def fetch(self, job: PlacedJob, folder: Path) -> None:
        if self.status(job.label).phase == "gone":
            raise unknown_job(self.name, job.label)
        take_packed(lambda packed: self._files.run("pack", job.label, into=packed), folder)

    def bootstrap(self, order: JobOrder, python: str) -> list[str]:
        """The command that runs the job on a node."""
        folder = self.job_folder(order.label)
        command = [python or sys.executable, str(folder / "bundle" / "bootstrap.py")]
        command += ["--work", str(folder / "work"), "--cache", str(self.root / "cache")]
        return [*command, "--seconds", f"{order.seconds:.0f}"]
