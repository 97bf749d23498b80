"""The job at its place: `python -m graftwork.fleet.runner --bundle FOLDER --work FOLDER`.

Input: an unpacked bundle. Output: the run's folder, `work/run`, as a local run leaves it; heartbeat, journals
and result also at the mirror. Starts the worker, restarts it after a crash, and stops it in order on SIGTERM,
when the file `stop` appears at the mirror or in the work folder, and before the time limit.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from graftwork.files.disk import make_folder, write_atomic
from graftwork.files.remote import RemoteFiles
from graftwork.fleet.bundle import BASE, BUNDLE_FILE, DATASET, JOB_FILE, RESUME, START_ADAPTER
from graftwork.process import clock
from graftwork.process.clock import WAITED, add_waited
from graftwork.process.heartbeat import read_beat, remove_beat
from graftwork.process.local_workers import LOG_FILE, LocalWorkers, read_log_tail
from graftwork.process.worker import ERROR_FILE, set_in_handler, tie_to_parent
from graftwork.records.errors import EXIT_DONE, EXIT_RESUME, EnvironmentFailure, GraftError, WorkerFailed
from graftwork.records.fleet import Bundle, Job
from graftwork.text.redact import publish_text

POLL_SECONDS = 0.5
MIRROR_SECONDS = 10.0
STOP_FILE = "stop"
MIRRORS_VARIABLE = "GRAFT_TRAIN_MIRRORS"
"""As the training worker reads it: the addresses of mirrors with a login, by the run's id."""
NOT_COPIED = {"lock", "checkpoints", JOB_FILE}
LONGEST_LINE = 300
MOST_CRASHES = 3
"""Crashes in a row without progress."""


def run_bundle(bundle_folder: Path, work: Path, *, seconds: float | None) -> int:
    """Run the job to its end, or to a stop; returns the exit code of the worker."""
    bundle = Bundle.from_json((bundle_folder / BUNDLE_FILE).read_bytes())
    run = work / "run"
    make_folder(run)
    try:
        job = make_job(bundle, bundle_folder, run, seconds=seconds)
        write_atomic(run / JOB_FILE, json.dumps(job, indent=2))
        restore(bundle, bundle_folder, run)
        passed: dict[str, str] = json.loads(os.environ.get(MIRRORS_VARIABLE, "{}"))
        mirror = RunMirror(passed.get(bundle.run_id) or bundle.mirror, bundle.run_id)
    except GraftError as error:
        write_atomic(run / ERROR_FILE, json.dumps(error.as_json()))
        print(f"{error.what}: {error.why}", file=sys.stderr)
        return error.exit_code
    started_at = clock.steady()
    try:
        return _Runner(bundle, run, mirror, seconds=seconds).run()
    finally:
        with suppress(GraftError):  # a full disk has a reason of its own
            add_waited(run, clock.steady() - started_at)
        mirror.copy(run)


def make_job(bundle: Bundle, folder: Path, run: Path, *, seconds: float | None) -> dict[str, Any]:
    """The worker's job with the folders of this place."""
    job: dict[str, Any] = json.loads((folder / JOB_FILE).read_bytes())
    started = clock.now()
    job["folder"] = str(run)
    job["base_folder"] = "" if bundle.base.kind == "none" else _find_base(bundle, folder)
    job["dataset_folder"] = bundle.dataset or str(folder / DATASET)
    job["start_adapter"] = str(folder / START_ADAPTER) if (folder / START_ADAPTER).is_dir() else None
    if seconds is not None:
        job |= {"deadline": started.at + seconds, "deadline_from": started.model_dump()}
    return job


def restore(bundle: Bundle, folder: Path, run: Path) -> None:
    """Put the checkpoint of the bundle into the run, unless the run has come further here already."""
    target = run / "checkpoints"
    if bundle.resume_step is None or any(target.glob("step-*")):
        return
    make_folder(target)
    if (waited := folder / RESUME / WAITED).exists():
        shutil.copyfile(waited, run / WAITED)
    for step in (folder / RESUME).glob("step-*"):
        part = target / f".{step.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(step, part)
        part.rename(target / step.name)


def _find_base(bundle: Bundle, folder: Path) -> str:
    base = bundle.base
    from graftwork.model.base import find_base

    name = {"bundled": str(folder / BASE), "path": base.path}.get(base.kind, base.name)
    base_model = find_base(name, project_folder=Path("/"), weights=True)
    if base_model.revision != base.revision:
        raise EnvironmentFailure(
            f"the base model {base.name} has different files here than where the run was planned",
            why=f"expected {base.revision[:12]}…, found {base_model.revision[:12]}…",
            fix="copy the files of the base to this place, or include them in the bundle",
            where=base_model.folder,
        )
    return base_model.folder


class _Runner:
    def __init__(self, bundle: Bundle, run: Path, mirror: "RunMirror", *, seconds: float | None) -> None:
        self._job = Job(
            module=bundle.module,
            job_file=str(run / JOB_FILE),
            folder=str(run),
            environment={"GRAFT_PRELOAD": "0"},
        )
        self._run, self._mirror = run, mirror
        self._until = clock.steady() + seconds if seconds is not None else None
        self._stop = threading.Event()
        self._workers = LocalWorkers()

    def run(self) -> int:
        signal.signal(signal.SIGTERM, lambda _number, _frame: set_in_handler(self._stop))
        # Without the bootstrap nothing would end this job at its time limit.
        tie_to_parent(os.getppid())
        furthest, crashes = 0.0, 0
        while True:
            code = self._attempt()
            beat = read_beat(self._run)
            done = beat.done if beat is not None else 0.0
            crashes = 1 if done > furthest else crashes + 1
            furthest = max(furthest, done)
            if code == EXIT_RESUME:
                # A signal to the whole job reaches the worker before this process asks it.
                print("stopped at a safe point", flush=True)
            is_final = code in (EXIT_DONE, EXIT_RESUME) or (self._run / ERROR_FILE).exists()
            if is_final or self._stop.is_set():
                return code if code >= 0 else EXIT_RESUME if self._stop.is_set() else 1
            if crashes > MOST_CRASHES:
                break
            print(f"the worker ended with {code}; starting it again", flush=True)
        lines = read_log_tail(self._run, lines=1)
        failure = WorkerFailed(
            f"the worker ended with exit code {code} {MOST_CRASHES + 1} times without progress"
            f"{f'; its log ends with: {publish_text(lines)[:LONGEST_LINE]}' if lines else ''}",
            why=publish_text(read_log_tail(self._run)) or "it left no output",
            fix="`graft fleet logs` shows its output; what was saved is kept, and the run continues "
            "from there",
            where=str(self._run / LOG_FILE),
        )
        write_atomic(self._run / ERROR_FILE, json.dumps(failure.as_json()))
        return code if code > 0 else failure.exit_code

    def _attempt(self) -> int:
        remove_beat(self._run)
        (self._run / ERROR_FILE).unlink(missing_ok=True)
        log = LogFollower(self._run / LOG_FILE)
        handle = self._workers.submit(self._job)
        copied, stop_sent = float("-inf"), False
        while (status := self._workers.poll(handle, seconds=POLL_SECONDS)).running:
            log.print_new()
            if clock.steady() - copied >= MIRROR_SECONDS:
                copied = clock.steady()
                self._mirror.copy(self._run)
                if self._mirror.wants_stop():
                    self._stop.set()
            if (self._run.parent / STOP_FILE).exists():
                self._stop.set()
            late = self._until is not None and clock.steady() >= self._until
            if (self._stop.is_set() or late) and not stop_sent:
                stop_sent = True
                self._stop.set()
                print("stopping at the next safe point", flush=True)
                self._workers.stop(handle)
        log.print_new(last=True)
        return status.exit_code or 0


class LogFollower:
    """Prints what is appended to a file: the job has one log, in time order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = path.stat().st_size if path.exists() else 0

    def print_new(self, *, last: bool = False) -> None:
        """Print whole lines; an unfinished line only at the `last` call."""
        with suppress(OSError), self._path.open("rb") as file:
            file.seek(self._at)
            added = file.read()
            whole = added if last else added[: added.rfind(b"\n") + 1]
            self._at += len(whole)
            text = whole.decode(errors="replace")
            print(text, end="" if not text or text.endswith("\n") else "\n", flush=True)


class RunMirror:
    """The small files of a run at the mirror: enough to follow it elsewhere and to take its result."""

    def __init__(self, url: str | None, run_id: str) -> None:
        self._files: RemoteFiles | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        if url is not None:
            self._files = RemoteFiles(url, kind="mirror", setting="the mirror of the bundle", folder=run_id)

    def copy(self, run: Path) -> None:
        """Copy what has changed; a failed copy is retried the next time."""
        if self._files is None:
            return
        # The worker removes folders meanwhile, at which `rglob` fails and `walk` does not.
        files = [Path(folder, name) for folder, _, names in os.walk(run) for name in names]
        # The result comes last: where it is, the rest is.
        for path in sorted(files, key=lambda path: (path.name == "outcome.json", path)):
            name = path.relative_to(run).as_posix()
            if name.split("/")[0] in NOT_COPIED or path.name.startswith(".") or not path.is_file():
                continue
            try:
                stamp = (path.stat().st_size, path.stat().st_mtime_ns)
                if self._seen.get(name) == stamp:
                    continue
                self._files.put(path, f"run/{name}")
                self._seen[name] = stamp
            except FileNotFoundError:
                continue
            except Exception as error:  # whatever a network library may raise
                print(f"the mirror failed: {type(error).__name__}; trying again later", flush=True)
                return

    def wants_stop(self) -> bool:
        """Whether someone has put a stop file there: the way to stop a run that has no other one."""
        if self._files is None:
            return False
        try:
            return self._files.size(STOP_FILE) is not None
        except Exception:  # whatever a network library may raise
            return False


def main() -> int:
    parser = argparse.ArgumentParser(description="Run an unpacked bundle.")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seconds", type=float)
    options = parser.parse_args()
    return run_bundle(options.bundle.resolve(), options.work.resolve(), seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
