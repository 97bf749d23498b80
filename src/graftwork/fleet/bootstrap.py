"""Run the bundle in this folder on any machine with Python 3.11: `python bootstrap.py --work FOLDER`.

Input: the folder of a bundle. Output: what the job leaves in `WORK/run`, and `WORK/exit.json` last. Checks
every file, unpacks the wheel, installs missing packages into an environment of its own, starts the runner and
ends it at the time limit, whatever else has failed. Uses only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

NEEDED = ("numpy", "orjson", "pyarrow", "pydantic", "safetensors", "tokenizers", "torch", "transformers")
PYTHON = (3, 11)
JOB_VARIABLE = "GRAFT_FLEET_JOB"
"""In the environment of every process of the job: a hard stop finds them by it."""
EXIT_FILE = "exit.json"
ERROR_FILE = "run/error.json"
FULL = (28, 122)
"""Error numbers of a full disk and an exceeded quota."""
STARTED_FILE = "started.json"
DONE, ENVIRONMENT, RESUME = 0, 3, 75
LAST_SECONDS = 60.0
"""Time to stop for a job at its time limit, or a tenth of its time if that is less."""


class Trouble(Exception):
    """An expected failure: what, why and fix."""

    def __init__(self, what: str, *, why: str, fix: str) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the bundle of a job.")
    parser.add_argument("--bundle", type=Path, default=Path(__file__).resolve().parent, help="its folder")
    parser.add_argument("--work", type=Path, required=True, help="where the job works; kept for a resume")
    parser.add_argument("--seconds", type=float, help="time limit; default: that of the bundle")
    parser.add_argument("--cache", type=Path, help="for the unpacked wheel and installed packages")
    parser.add_argument("--secrets", type=Path, help="variables of the environment as JSON; removed")
    options = parser.parse_args(arguments)
    if options.secrets is not None and options.secrets.exists():
        # Into the environment, where no file may keep them.
        os.environ.update(json.loads(options.secrets.read_text()))
        options.secrets.unlink()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    # Of an attempt before: a queue may start the job again.
    (work / EXIT_FILE).unlink(missing_ok=True)
    try:
        require_python()
        bundle = read_bundle(options.bundle)
        library = unpack_wheel(options.bundle, bundle, options.cache or work.parent)
        python = find_python(options.bundle, bundle, options.cache or work.parent)
        limit = options.seconds if options.seconds is not None else bundle.get("seconds")
        code, reason = run(options.bundle, work, python=python, library=library, limit=limit)
    except Trouble as trouble:
        code, reason = report(trouble, work)
    except OSError as error:
        code, reason = report(explain_failure(error, work), work)
    try:
        write(work / EXIT_FILE, {"code": code, "reason": reason, "at": time.time()})
    except OSError as error:
        # The place reports an end without a result; the log has the reason.
        print(f"{EXIT_FILE} could not be written: {error}", file=sys.stderr)
    return code


def require_python() -> None:
    """An older Python reads this file, but not the package."""
    if sys.version_info[:2] < PYTHON:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Trouble(
            f"the machine has Python {version}",
            why=f"{sys.executable} runs the job, and 3.11 or later is needed",
            fix="use another `python` or `image` in the settings of the place",
        )


def report(trouble: Trouble, work: Path) -> tuple[int, str]:
    """Write the error where a reader looks for it; returns the exit code and the reason."""
    print(f"{trouble.what}\n  why  {trouble.why}\n  fix  {trouble.fix}", file=sys.stderr)
    error = {"error": "EnvironmentFailure", "what": trouble.what, "why": trouble.why, "fix": trouble.fix}
    with contextlib.suppress(OSError):
        write(work / ERROR_FILE, {**error, "where": str(work), "exit_code": ENVIRONMENT})
    return ENVIRONMENT, trouble.what


def explain_failure(error: OSError, work: Path) -> Trouble:
    if error.errno in FULL:
        return Trouble(
            "the disk of the machine is full",
            why=str(error),
            fix=f"free some space there, or let the job work elsewhere than {work}",
        )
    return Trouble(f"the machine reports: {error.strerror or error}", why=str(error), fix="check its folders")


def read_bundle(folder: Path) -> dict[str, Any]:
    """The manifest; every file has the bytes that it names."""
    try:
        bundle: dict[str, Any] = json.loads((folder / "bundle.json").read_bytes())
        for name, file in bundle["files"].items():
            with (folder / name).open("rb") as handle:
                if hashlib.file_digest(handle, "sha256").hexdigest() != file["sha256"]:
                    raise Trouble(
                        f"{name} of the bundle does not match the hash in its manifest",
                        why="it was damaged in transit, or changed",
                        fix="send the bundle again",
                    )
    except (OSError, ValueError, KeyError) as error:
        raise Trouble(
            "the bundle is incomplete", why=f"{type(error).__name__}: {error}", fix="send it again"
        ) from error
    return bundle


def unpack_wheel(folder: Path, bundle: dict[str, Any], cache: Path) -> Path:
    """The package as files, once for every wheel."""
    name = next(name for name in bundle["files"] if name.endswith(".whl"))
    target = cache / f"graftwork-{bundle['files'][name]['sha256'][:16]}"
    if not target.exists():
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with zipfile.ZipFile(folder / name) as archive:
                archive.extractall(part)
        except OSError:
            # A full disk is not left full: the error must fit on it.
            shutil.rmtree(part, ignore_errors=True)
            raise
        with contextlib.suppress(OSError):  # another job was first
            part.rename(target)
    return target


def find_python(folder: Path, bundle: dict[str, Any], cache: Path) -> str:
    """Return this interpreter if it has all packages; else one with an environment made for the wheel."""
    needed = NEEDED if bundle["base"]["kind"] != "none" else ("pydantic",)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if not missing:
        return sys.executable
    name = next(name for name in bundle["files"] if name.endswith(".whl"))
    environment = cache / f"env-{bundle['files'][name]['sha256'][:16]}"
    python = environment / "bin" / "python"
    with locked(cache / f".{environment.name}.lock"):
        if not (environment / "complete").exists():
            install(environment, (folder / name).resolve(), missing)
    return str(python)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; without a lock where the file system has none."""
    with path.open("w") as handle:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def install(environment: Path, wheel: Path, missing: list[str]) -> None:
    """Make the environment and mark it as complete."""
    python = environment / "bin" / "python"
    print(f"installing {', '.join(missing)} into {environment}", flush=True)
    steps = (
        [sys.executable, "-m", "venv", "--system-site-packages", str(environment)],
        [str(python), "-m", "pip", "install", "--quiet", f"{wheel}[train,mirror]"],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            shutil.rmtree(environment, ignore_errors=True)
            raise Trouble(
                f"the packages {', '.join(missing)} are missing and could not be installed",
                why=last[:300],
                fix=f"install graftwork[train] for {sys.executable} on this machine, or use another Python",
            )
    (environment / "complete").touch()


def run(bundle: Path, work: Path, *, python: str, library: Path, limit: float | None) -> tuple[int, str]:
    """Start the runner, pass signals on to it, and end it at the time limit."""
    seconds_left = remaining(work, limit)
    if seconds_left is not None and seconds_left <= 0:
        return RESUME, "its time limit was reached before"
    command = [python, "-m", "graftwork.fleet.runner", "--bundle", str(bundle), "--work", str(work)]
    command += (
        ["--seconds", str(seconds_left - last_seconds(seconds_left))] if seconds_left is not None else []
    )
    path = os.pathsep.join(filter(None, (str(library), os.environ.get("PYTHONPATH", ""))))
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdin=subprocess.DEVNULL)

    until, signals = time.monotonic() + seconds_left if seconds_left is not None else None, []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        child.terminate()

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        # The runner ends the worker before; this is for a runner that hangs.
        code = child.wait(seconds_left)
    except subprocess.TimeoutExpired:
        kill_all(child)
        return RESUME, "its time limit was reached; the job did not end in time and was killed"
    if code == DONE:
        return code, "done"
    reason = read_error(work) or f"ended with exit code {code}"
    if code != RESUME:
        return code, reason
    if signals:
        return code, f"stopped by a signal from the place; {reason}"
    late = (
        until is not None
        and seconds_left is not None
        and time.monotonic() >= until - last_seconds(seconds_left)
    )
    return code, f"{'its time limit was reached' if late else 'stopped as asked'}; {reason}"


def read_error(work: Path) -> str:
    """Return the worker's error; empty if it left none."""
    try:
        return str(json.loads((work / ERROR_FILE).read_bytes())["what"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def last_seconds(seconds_left: float) -> float:
    return min(LAST_SECONDS, seconds_left / 10)


def remaining(work: Path, limit: float | None) -> float | None:
    """Seconds left, counted from the first start in this folder: a restart does not get more."""
    started = work / STARTED_FILE
    if not started.exists():
        write(started, {"at": time.time(), "pid": os.getpid()})
    if limit is None:
        return None
    started_at = float(json.loads(started.read_text())["at"])
    return limit - max(time.time() - started_at, 0.0)


def kill_all(child: subprocess.Popen[bytes]) -> None:
    """End the runner and every process of the job, those in sessions of their own included."""
    child.kill()
    name = os.environ.get(JOB_VARIABLE)
    mark = f"{JOB_VARIABLE}={name}".encode() if name else None
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if mark is not None and pid != os.getpid() and mark in entry.read_bytes().split(b"\0"):
                os.kill(pid, signal.SIGKILL)
    child.wait()


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


if __name__ == "__main__":
    sys.exit(main())
