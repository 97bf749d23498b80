"""Task sets of verifiers v1: prompts and rewards by a worker in an environment of their own.

Input: the interpreter of that environment, the task set and its options. Output: tasks as cases, and rewards
of answers. The worker gets texts and never a runtime, so nothing that an answer holds is run by verifiers.
"""

import json
import queue
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from graftwork.grading import taskset_worker
from graftwork.grading.settings import TasksetSettings
from graftwork.process.stdio import LineProcess
from graftwork.records.base import fingerprint
from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

MOST_WORKERS = 4
"""Each imports verifiers, which takes seconds and some hundred MiB."""
LOAD_SECONDS = 600.0
OF_ANOTHER_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
CASES_FILE, TASKS_FILE = "cases.jsonl", "tasks.jsonl"
_FINGERPRINT = """
import hashlib, importlib.util, pathlib, sys
sys.path[:0] = sys.argv[2:]
name = sys.argv[1].rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
def origin_of(module):
    found = importlib.util.find_spec(module)
    return pathlib.Path(found.origin) if found and found.origin else None
package = origin_of("verifiers")
included = package and package.parent / "v1" / "tasksets" / name / "__init__.py"
origin = included if included and included.is_file() else origin_of(name)
files = [] if origin is None else [origin] if origin.name != "__init__.py" else sorted(
    path for path in origin.parent.rglob("*") if path.is_file() and path.suffix != ".pyc"
)
digest = hashlib.sha256()
for path in files:
    digest.update(str(path.relative_to(origin.parent)).encode() + b"\\0" + path.read_bytes())
print(digest.hexdigest() if files else "")
"""


class TasksetSpec(TasksetSettings):
    """A task set, and the interpreter that runs it: absolute or in the project's folder."""

    package: str = ""
    """The hash of its files: a changed task set counts as another one."""


def start_worker(spec: TasksetSpec, *, folder: Path, seconds: float) -> LineProcess:
    """`-P`: nothing is imported from the worker's folder."""
    return LineProcess(
        [find_python(spec, folder), "-P", str(Path(taskset_worker.__file__))],
        hello={"name": spec.name, "options": spec.options, "folders": _folders(spec, folder)},
        seconds=seconds,
        environment={"OMP_NUM_THREADS": "1"},
        without=OF_ANOTHER_PYTHON,
    )


def find_python(spec: TasksetSpec, folder: Path) -> str:
    # Not resolved: the interpreter of a virtual environment is a link, and its own path names its packages.
    path = folder / Path(spec.python).expanduser()
    if path.is_file():
        return str(path)
    raise EnvironmentFailure(
        f"there is no Python at {spec.python}",
        why="task sets of verifiers run in a separate environment",
        fix=f"run `python -m venv {path.parent.parent}` and `{path} -m pip install verifiers`, or use "
        "another interpreter",
        where="train.rollouts.taskset.python",
    )


def fingerprint_taskset(spec: TasksetSpec, *, folder: Path) -> str:
    """The hash of the package's files, without importing it; empty if it is not found."""
    return _fingerprint(find_python(spec, folder), spec.name, *_folders(spec, folder))


@lru_cache(maxsize=16)
def _fingerprint(python: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [python, "-I", "-c", _FINGERPRINT, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentFailure(
            f"{python} is not a usable Python",
            why=str(error)[:200],
            fix="specify the interpreter of an environment with verifiers",
            where="train.rollouts.taskset.python",
        ) from error
    return done.stdout.strip()


def load_tasks(spec: TasksetSpec, *, folder: Path) -> list[tuple[Case, dict[str, Any]]]:
    """Load the tasks as cases, each with the data that verifiers stores for it. Their ids are those of the
    task set if it names every task, and numbers if not.
    """
    worker = start_worker(spec, folder=folder, seconds=LOAD_SECONDS)
    try:
        reply = worker.ask({"load": spec.tasks})
    finally:
        worker.end()
    if "refused" in reply:
        raise EnvironmentFailure(**reply["refused"])
    if "failed" in reply:
        raise EnvironmentFailure(
            f"the task set {spec.name} cannot be loaded",
            why=reply["failed"],
            fix="load it on its own: `vf-validate --only-setup`, and set `rollouts.taskset.tasks` to fewer",
        )
    cases = make_cases(reply["tasks"], name=spec.name, reference=spec.reference)
    return [(case, task["data"]) for case, task in zip(cases, reply["tasks"], strict=True)]


def make_cases(tasks: Sequence[dict[str, Any]], *, name: str, reference: str | None) -> list[Case]:
    """Convert what the worker read to cases. Pure."""
    ids = [task["id"] for task in tasks]
    by_name = all(ids) and len(set(ids)) == len(ids)
    return [
        Case(
            id=str(task["id"]) if by_name else f"{name}-{index}",
            origin=Origin(file=name, line=index + 1),
            messages=tuple(Message.model_validate(message) for message in task["messages"]),
            reference=_fill(reference, task["data"], name=name),
        )
        for index, task in enumerate(tasks)
    ]


def _fill(reference: str | None, data: dict[str, Any], *, name: str) -> str:
    if reference is None:
        return ""
    try:
        return reference.format_map(data)
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise UserError(
            f"`{reference}` does not fit the tasks of {name}: {type(error).__name__} {error}",
            why=f"a task has the fields {', '.join(sorted(data))}",
            fix='specify a field in braces: reference: "{answer}"',
            where="train.rollouts.taskset.reference",
        ) from error


class TasksetGrader:
    """Rewards by a task set, from a few workers that the threads of `pool` start: importing verifiers takes
    seconds, and the first answers are sampled meanwhile.
    """

    def __init__(
        self, spec: TasksetSpec, *, folder: str, seconds: float, most: int, pool: ThreadPoolExecutor
    ) -> None:
        self._spec, self._folder = spec, Path(folder)
        self._idle: queue.SimpleQueue[LineProcess] = queue.SimpleQueue()
        self._workers = [
            start_worker(spec, folder=self._folder, seconds=seconds) for _ in range(min(most, MOST_WORKERS))
        ]
        for worker in self._workers:
            pool.submit(self._start, worker)

    def _start(self, worker: LineProcess) -> None:
        try:
            # One that does not start says so when it is asked.
            with suppress(GraftError):
                worker.start()
        finally:
            self._idle.put(worker)

    def grade(self, case: Case, text: str, *, truncated: bool) -> dict[str, Any]:
        task = self._tasks.get(case.id)
        if task is None:
            # A decoy: its prompt is none of the task set.
            return {"grade": None}
        worker = self._idle.get()
        try:
            return worker.ask({"task": task, "text": text, "truncated": truncated})
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()

    @cached_property
    def _tasks(self) -> dict[str, dict[str, Any]]:
        path = taskset_folder(self._spec, self._folder) / TASKS_FILE
        tasks = (json.loads(line) for line in path.read_text().splitlines())
        return {task["id"]: task["data"] for task in tasks}


def taskset_folder(spec: TasksetSpec, folder: Path) -> Path:
    """Cache folder of a loaded task set: by its package, its options and the number of tasks."""
    content = spec.model_dump(mode="json", exclude={"python"})
    return folder / ".graft" / "tasksets" / fingerprint(content)[:16]


def _folders(spec: TasksetSpec, folder: Path) -> list[str]:
    return [str((folder / spec.folder).resolve())] if spec.folder else []
