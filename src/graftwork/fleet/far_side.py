"""The commands of a host that runs jobs. Sent over the connection and run by the host's own Python 3.11.

In: a command and its arguments, data on standard input. Out: JSON or a tar file on standard output. Files are
below one folder: `blobs/` by content, `jobs/<label>/` with the bundle, the work folder and the log. Uses the
standard library alone and leaves no daemon: a job is a process in a session of its own, alive as long as it
holds its lock. Exit code 44 comes with an error as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import IO, Any

REFUSED = 44
PIECE = 2**20
NEEDED = (3, 11)
FULL = (28, 122)
"""Error numbers of a full disk and an exceeded quota."""


class HostRefusal(Exception):
    """Ends the command with what, why and fix."""


def main(arguments: list[str]) -> int:
    root, command, *given = arguments
    host, stdout = JobHost(Path(root).expanduser()), sys.stdout.buffer
    try:
        if command == "pack":
            host.pack(given[0], stdout)
            return 0
        answer = run_command(host, command, given)
    except HostRefusal as refusal:
        what, why, fix = refusal.args
        stdout.write(json.dumps({"what": what, "why": why, "fix": fix}).encode())
        return REFUSED
    except OSError as error:
        full = error.errno in FULL
        what = "the disk of the host is full" if full else f"the host says: {error.strerror or error}"
        why, fix = f"{error.filename or host.root}", "free some space there" if full else "check its folder"
        stdout.write(json.dumps({"what": what, "why": why, "fix": fix}).encode())
        return REFUSED
    stdout.write(json.dumps(answer).encode())
    return 0


def run_command(host: JobHost, command: str, given: list[str]) -> Any:
    if sys.version_info[:2] < NEEDED:
        found = ".".join(map(str, sys.version_info[:2]))
        raise HostRefusal(f"the host has Python {found}", "3.11 or later is needed", "name another `python`")
    if command == "receive":
        return host.receive(sys.stdin.buffer)
    if command in ("missing", "prepare", "start"):
        return getattr(host, command)(json.load(sys.stdin.buffer))
    if command in ("probe", "list", "status", "stop", "log", "remove"):
        return getattr(host, command)(*given)
    raise HostRefusal(f"the host does not know the command {command}", "", "")


class JobHost:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs, self.jobs = root / "blobs", root / "jobs"

    def probe(self) -> dict[str, Any]:
        """What the host is and has."""
        self.jobs.mkdir(parents=True, exist_ok=True)
        return {
            "python": ".".join(map(str, sys.version_info[:3])),
            "free_bytes": shutil.disk_usage(self.root).free,
            "gpus": list_gpus(),
            "jobs": len(self.list()),
        }

    def missing(self, hashes: list[str]) -> list[str]:
        return [name for name in hashes if not (self.blobs / name).exists()]

    def receive(self, stream: IO[bytes]) -> dict[str, int]:
        """Files named by their hash; each gets its name only if it has its bytes."""
        self.blobs.mkdir(parents=True, exist_ok=True)
        received = 0
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for entry in archive:
                source = archive.extractfile(entry)
                if source is None or not entry.name.isalnum():
                    raise HostRefusal("a file of the bundle has an odd name", entry.name, "send it again")
                part = self.blobs / f".{entry.name}.{os.getpid()}"
                digest = hashlib.sha256()
                with part.open("wb") as target:
                    while piece := source.read(PIECE):
                        digest.update(piece)
                        target.write(piece)
                        received += len(piece)
                if digest.hexdigest() != entry.name:
                    part.unlink()
                    raise HostRefusal("a file arrived damaged", entry.name[:12], "send it again")
                part.replace(self.blobs / entry.name)
        return {"received": received}

    def prepare(self, order: dict[str, Any]) -> dict[str, bool]:
        """Lay out the bundle of a job that something else starts."""
        folder = self.jobs / order["label"]
        if not folder.exists():
            self._lay_out(order, folder)
        (self.root / "cache").mkdir(exist_ok=True)
        return {"prepared": True}

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """Start the job, or say that it exists. A job that died without an end is started again."""
        folder = self.jobs / order["label"]
        if not folder.exists():
            self._lay_out(order, folder)
        descriptor = os.open(folder / "alive", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return {"created": False}
        if (folder / "work" / "exit.json").exists():
            return {"created": False}
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
                # The lock is the job's: it is free when the job is over, however it ended.
                pass_fds=(descriptor,),
            )
        (folder / "pid").write_text(str(child.pid))
        return {"created": True, "pid": child.pid, "gpu": gpu}

    def _lay_out(self, order: dict[str, Any], folder: Path) -> None:
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
        """The card with the fewest jobs of ours and then the most free memory."""
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
            answer["message"] = (error or {}).get("what") or (ended or {}).get("reason") or "it was killed"
        elif beat is None:
            answer["phase"] = "starting"
        answer["beat"] = beat
        return answer

    def list(self) -> list[str]:
        folders = self.jobs.iterdir() if self.jobs.exists() else ()
        return sorted(f.name for f in folders if not f.name.startswith(".") and self._is_alive(f))

    def stop(self, label: str, how: str = "") -> dict[str, bool]:
        folder = self.jobs / label
        if not folder.exists() or not self._is_alive(folder):
            return {"stopped": False}
        pid = int((folder / "pid").read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if how == "now" else signal.SIGTERM)
        if how == "now":
            _kill_marked(f"GRAFT_FLEET_JOB={label}".encode())
        return {"stopped": True}

    def log(self, label: str) -> str:
        texts = [self.jobs / label / "job.log", self.jobs / label / "work" / "run" / "worker.log"]
        return "".join(path.read_text(errors="replace") for path in texts if path.exists())

    def pack(self, label: str, stream: IO[bytes]) -> None:
        """The run's folder; without checkpoints once there is a result."""
        run = self.jobs / label / "work" / "run"
        done = (run / "outcome.json").exists()
        with tarfile.open(fileobj=stream, mode="w|") as archive:
            for path in sorted(run.rglob("*")) if run.exists() else ():
                name = path.relative_to(run).as_posix()
                if not path.is_file() or name == "lock" or "/." in f"/{name}":
                    continue
                if not (done and name.startswith("checkpoints/")):
                    with contextlib.suppress(FileNotFoundError):
                        archive.add(path, arcname=name, recursive=False)

    def remove(self, label: str) -> dict[str, bool]:
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
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(descriptor)


def list_gpus() -> list[dict[str, Any]]:
    """By nvidia-smi; none where there is none."""
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


def _kill_marked(mark: bytes) -> None:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
