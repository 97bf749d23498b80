"""The commands of a host that runs jobs. Sent over the connection and run by the host's own Python 3.11.

Input: commands on standard input, each a line of JSON and its data. Output: JSON or a tar file, and a code;
44 comes with an error as JSON. Files are below one folder: `blobs/` by content, `jobs/<label>/` with the
bundle, the work folder and the log. Uses only the standard library and leaves no daemon: it ends with the
connection, and a job is a process in a session of its own, alive as long as it holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO, Any

# Modules that only some commands need are imported there: a host is asked often.

REFUSED = 44
READY = b"\0graft\0"
"""Before the first answer: what a shell prints at a login comes before it."""
GONE = "the host does not have the job"
NO_END = "it was killed, could not be started, or its machine was restarted"
PIECE = 2**20
NEEDED = (3, 11)
WAIT_SECONDS = 0.05
ASKED_SECONDS = 0.001
FULL = (28, 122)
"""Error numbers of a full disk and an exceeded quota."""


DATASET_KEYS = (
    "content_hash", "model", "base", "base_fingerprint", "template_fingerprint", "tokenizer_fingerprint",
)  # fmt: skip
SUMMARY_KEYS = ("rows", "groups", "tokens", "trained_tokens", "longest", "lengths")
"""Facts of a dataset that may leave its host."""


class HostRefusal(Exception):
    """Ends the command with what, why and fix."""


def main(arguments: list[str]) -> int:
    """Carry out commands until the connection ends."""
    (root,), stdin, stdout = arguments, sys.stdin.buffer, sys.stdout.buffer
    stdout.write(READY)
    stdout.flush()
    while line := stdin.readline():
        reader, reply = PieceReader(stdin), PieceWriter(stdout)
        code = answer(Path(root).expanduser(), json.loads(line), reader, reply)
        reply.end(code)
        if not reader.ended:
            # What is still on its way belongs to a command that has failed.
            return code
    return 0


class PieceReader:
    """The data of one command: pieces, each after its length, until an empty one."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._left, self.ended = stream, 0, False

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        while not self.ended and size:
            if not self._left:
                head = self._stream.read(4)
                self._left = int.from_bytes(head, "big")
                self.ended = head == bytes(4)
                if len(head) == 4:
                    continue
            part = self._stream.read(self._left if size < 0 else min(size, self._left))
            if not part:
                raise OSError("the connection was cut")
            self._left -= len(part)
            size -= len(part) if size > 0 else 0
            parts.append(part)
        return b"".join(parts)


class PieceWriter:
    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        if data:
            self._stream.write(len(data).to_bytes(4, "big") + data)
        return len(data)

    def flush(self) -> None:
        self._stream.flush()

    def end(self, code: int | None = None) -> None:
        self._stream.write(bytes(4) + (bytes([code]) if code is not None else b""))
        self._stream.flush()


def answer(root: Path, command_line: list[str], stdin: Any, stdout: Any) -> int:
    """Carry out one command and write its answer; returns the exit code."""
    host, command, arguments = JobHost(root), command_line[0], command_line[1:]
    try:
        if command == "pack":
            stdin.read()
            host.pack(arguments[0], stdout)
            return 0
        reply = run_command(host, command, arguments, stdin)
    except HostRefusal as refusal:
        what, why, fix = refusal.args
        stdout.write(json.dumps({"what": what, "why": why, "fix": fix}).encode())
        return REFUSED
    except OSError as error:
        stdout.write(json.dumps(explain_failure(error, host.root)).encode())
        return REFUSED
    stdout.write(json.dumps(reply).encode())
    return 0


def explain_failure(error: OSError, root: Path) -> dict[str, str]:
    full = error.errno in FULL
    what = "the disk of the host is full" if full else f"the host reports: {error.strerror or error}"
    fix = "free some space there: old jobs are in jobs/ of the folder, shared files in blobs/"
    fix = fix if full else "check its folder"
    return {"what": what, "why": f"{error.filename or root}", "fix": fix}


def run_command(host: JobHost, command: str, arguments: list[str], stdin: Any) -> Any:
    if sys.version_info[:2] < NEEDED:
        version = ".".join(map(str, sys.version_info[:2]))
        raise HostRefusal(f"the host has Python {version}", "3.11 or later is needed", "use another `python`")
    if command == "receive":
        return host.receive(stdin)
    if command in ("missing", "prepare", "start"):
        return getattr(host, command)(json.loads(stdin.read()))
    stdin.read()
    if command in ("probe", "list", "status", "wait", "stop", "log", "remove", "dataset"):
        return getattr(host, command)(*arguments)
    raise HostRefusal(f"the host does not have the command {command}", "", "")


class JobHost:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs, self.jobs = root / "blobs", root / "jobs"

    def probe(self) -> dict[str, Any]:
        """Report what the host is and has."""
        import shutil

        self.jobs.mkdir(parents=True, exist_ok=True)
        return {
            "python": ".".join(map(str, sys.version_info[:3])),
            "free_bytes": shutil.disk_usage(self.root).free,
            "gpus": list_gpus(),
            "jobs": len(self.list()),
        }

    def dataset(self, path: str, model: str) -> dict[str, Any]:
        """The counts and hashes of a dataset here: of its folder, or the newest one of a project's model.

        Rows, file names and settings of the dataset are left out: they stay on this host.
        """
        folder = Path(path).expanduser()
        manifest = _read_json(folder / "manifest.json")
        if manifest is None:
            manifests = sorted(
                (folder / ".graft" / "datasets").glob("*/manifest.json"),
                key=lambda file: file.stat().st_mtime,
            )
            for file in reversed(manifests):
                candidate = _read_json(file)
                if candidate is not None and candidate.get("model") == model:
                    folder, manifest = file.parent, candidate
                    break
        if manifest is None:
            raise HostRefusal(
                f"there is no prepared dataset of the model {model} at {path}",
                "it contains no manifest.json, and no project prepared one there",
                "run `graft data prepare` there, or specify the folder of a dataset",
            )
        splits = {
            name: {key: split[key] for key in SUMMARY_KEYS if key in split}
            for name, split in manifest["splits"].items()
        }
        facts = {key: manifest[key] for key in DATASET_KEYS}
        return {"folder": str(folder.resolve()), "dataset": {**facts, "splits": splits}}

    def missing(self, hashes: list[str]) -> list[str]:
        return [name for name in hashes if not (self.blobs / name).exists()]

    def receive(self, stream: IO[bytes]) -> dict[str, int]:
        """Files named by their hash; each gets its name only if it has its bytes."""
        import hashlib
        import tarfile

        self.blobs.mkdir(parents=True, exist_ok=True)
        received = 0
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                source = archive.extractfile(entry)
                if source is None or not entry.name.isalnum():
                    raise HostRefusal("a file of the bundle has an invalid name", entry.name, "send it again")
                part = self.blobs / f".{entry.name}.{os.getpid()}"
                digest = hashlib.sha256()
                try:
                    with part.open("wb") as target:
                        while piece := source.read(PIECE):
                            digest.update(piece)
                            target.write(piece)
                            received += len(piece)
                except OSError:
                    # A full disk is not left full.
                    part.unlink(missing_ok=True)
                    raise
                if digest.hexdigest() != entry.name:
                    part.unlink()
                    raise HostRefusal("a file arrived damaged", entry.name[:12], "send it again")
                part.replace(self.blobs / entry.name)
        stream.read()
        return {"received": received}

    def take(self, name: str, source: Path) -> None:
        """A file of this machine, named by its hash. The bundle's bootstrap checks it."""
        import shutil

        self.blobs.mkdir(parents=True, exist_ok=True)
        part = self.blobs / f".{name}.{os.getpid()}"
        try:
            shutil.copyfile(source, part)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        part.replace(self.blobs / name)

    def prepare(self, order: dict[str, Any]) -> dict[str, bool]:
        """Lay out the bundle of a job that is started by other means."""
        folder = self.jobs / order["label"]
        if not folder.exists():
            self._lay_out(order, folder)
        (self.root / "cache").mkdir(exist_ok=True)
        return {"prepared": True}

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the job, or say that it exists. A job that died without an end is started again.

        Files of the bundle that are not here are named instead, and nothing is started.
        """
        folder = self.jobs / order["label"]
        if not folder.exists():
            files = json.loads(order["bundle"])["files"].values()
            missing = self.missing(sorted({file["sha256"] for file in files}))
            if missing:
                return {"created": False, "missing": missing}
            self._lay_out(order, folder)
        descriptor = os.open(folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _take(descriptor) or (folder / "work" / "exit.json").exists():
                return {"created": False}
            return self._start(order, folder, descriptor)
        finally:
            # The job has its own copy: the lock is free when the job is over, however it ended.
            os.close(descriptor)

    def _start(self, order: dict[str, Any], folder: Path, descriptor: int) -> dict[str, Any]:
        import subprocess

        gpu = self._pick_gpu(order, folder)
        environment = {**os.environ, **order["secrets"], "GRAFT_FLEET_JOB": order["label"]}
        environment |= {"PYTHONUNBUFFERED": "1"}
        environment |= {"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu is not None else {}
        command = [sys.executable, str(folder / "bundle" / "bootstrap.py"), "--work", str(folder / "work")]
        command += ["--cache", str(self.root / "cache"), "--seconds", str(order["seconds"])]
        (self.root / "cache").mkdir(exist_ok=True)
        with (folder / "job.log").open("ab") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
                start_new_session=True,
                pass_fds=(descriptor,),
            )
        (folder / "pid").write_text(str(child.pid))
        return {"created": True, "pid": child.pid, "gpu": gpu}

    def _lay_out(self, order: dict[str, Any], folder: Path) -> None:
        import shutil

        bundle = json.loads(order["bundle"])
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        for name, file in bundle["files"].items():
            target = part / "bundle" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.blobs / file["sha256"], target)
            except FileNotFoundError:
                shutil.rmtree(part, ignore_errors=True)
                raise HostRefusal(f"{name} of the bundle is not on the host", "", "send it again") from None
            except OSError:
                shutil.copyfile(self.blobs / file["sha256"], target)
        (part / "bundle" / "bundle.json").write_text(order["bundle"])
        (part / "created").write_text(str(time.time()))
        try:
            part.rename(folder)
        except OSError:  # another start was first
            shutil.rmtree(part, ignore_errors=True)

    def _pick_gpu(self, order: dict[str, Any], folder: Path) -> int | None:
        """Pick the GPU with the fewest jobs of ours and then the most free memory."""
        gpus = list_gpus()
        if not gpus:
            return None
        claims = [
            int((self.jobs / label / "gpu").read_text())
            for label in self.list()
            if label != order["label"] and (self.jobs / label / "gpu").exists()
        ]
        best = min(gpus, key=lambda gpu: (claims.count(gpu["index"]), -gpu["free_mib"], gpu["index"]))
        (folder / "gpu").write_text(str(best["index"]))
        return int(best["index"])

    def status(self, label: str) -> dict[str, Any]:
        folder = self.jobs / label
        if not folder.exists():
            return {"phase": "gone"}
        alive = self._is_alive(folder)
        answer: dict[str, Any] = {"phase": "running" if alive else "ended", "exit_code": None, "message": ""}
        # Read after the lock: a job writes its end before it lets go.
        ended = _read_json(folder / "work" / "exit.json")
        beat = _read_json(folder / "work" / "run" / "heartbeat.json")
        error = _read_json(folder / "work" / "run" / "error.json")
        if not alive:
            answer["exit_code"] = ended["code"] if ended else -9
            answer["message"] = (ended or {}).get("reason") or (error or {}).get("what")
            if not answer["message"]:
                lines = [line.strip() for line in self.log(label).split("\n") if line.strip()]
                answer["message"] = f"{NO_END}; its log ends with: {lines[-1][:200]}" if lines else NO_END
        elif beat is None:
            answer["phase"] = "starting"
        answer["beat"] = beat
        return answer

    def wait(self, label: str, seconds: str) -> dict[str, Any]:
        """The status once the job is over, or after this many seconds."""
        folder, until = self.jobs / label, time.monotonic() + float(seconds)
        while folder.exists() and self._is_alive(folder) and time.monotonic() < until:
            time.sleep(WAIT_SECONDS)
        return self.status(label)

    def list(self) -> list[str]:
        folders = self.jobs.iterdir() if self.jobs.exists() else ()
        return sorted(f.name for f in folders if not f.name.startswith(".") and self._is_alive(f))

    def stop(self, label: str, how: str = "") -> dict[str, bool]:
        import signal

        folder = self.jobs / label
        if not folder.exists() or not self._is_alive(folder):
            return {"stopped": False}
        pid = int((folder / "pid").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if how == "now" else signal.SIGTERM)
        for entry in Path("/proc").glob("[0-9]*/environ") if how == "now" else ():
            with contextlib.suppress(OSError):
                if f"GRAFT_FLEET_JOB={label}".encode() in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        return {"stopped": True}

    def log(self, label: str) -> str:
        path = self.jobs / label / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pack(self, label: str, stream: IO[bytes]) -> None:
        """The run's folder; without checkpoints once there is a result."""
        import tarfile

        if not (self.jobs / label).exists():
            raise HostRefusal(GONE, label, "")
        run = self.jobs / label / "work" / "run"
        done = (run / "outcome.json").exists()
        # A job that still runs removes folders meanwhile, at which `rglob` fails and `walk` does not.
        listed = [Path(folder, name) for folder, _, names in os.walk(run) for name in names]
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for path in sorted(listed):
                name = path.relative_to(run).as_posix()
                if not path.is_file() or name == "lock" or "/." in f"/{name}":
                    continue
                if not (done and name.startswith("checkpoints/")):
                    with contextlib.suppress(FileNotFoundError):
                        archive.add(path, arcname=name, recursive=False)

    def remove(self, label: str) -> dict[str, bool]:
        import shutil

        folder = self.jobs / label
        if folder.exists() and self._is_alive(folder):
            raise HostRefusal("the job still runs", label, "stop it first")
        shutil.rmtree(folder, ignore_errors=True)
        return {"removed": True}

    def _is_alive(self, folder: Path) -> bool:
        try:
            descriptor = os.open(folder / "alive", os.O_RDWR)
        except OSError:
            return False
        try:
            return _is_held(descriptor)
        finally:
            os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take the lock unless a job has it. A process that queries the job shares it briefly, which is
    waited for."""
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _is_held(descriptor):
                return False
            time.sleep(ASKED_SECONDS)
        else:
            return True


def _is_held(descriptor: int) -> bool:
    """Whether a job has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def list_gpus() -> list[dict[str, Any]]:
    """By nvidia-smi; none if there is none."""
    import subprocess

    query = ["nvidia-smi", "--query-gpu=index,name,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
    return [
        {"index": int(index), "name": name, "free_mib": float(free), "total_mib": float(total)}
        for index, name, free, total in rows
    ]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
