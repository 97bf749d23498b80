"""Custom metrics: a function of the project, named in graft.yaml as `file.py:function` or `module:function`.

Input: the name, the project's folder. Output: the function, and its grades. Only files in the project's
folder are loaded, and only those that graft.yaml names. One that fails is reported with metric, case and
line. A function whose check names `files` gets an environment to run tool calls in: programs of the project,
in the sandbox, each run with fresh copies of the files. A program reads `arguments.json`; the metric judges
what it printed, outside the sandbox.
"""

import importlib.util
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import Field, PrivateAttr

from graftwork.grading.code import runner_of
from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.report import Case
from graftwork.text.tool_calls import ToolCall, read_calls

OwnFunction = Callable[..., float | bool | None]
"""Takes the case and the text, and where its check names `files`, a CallEnvironment."""

ARGUMENTS_FILE = "arguments.json"
LONGEST_WORDS = 200
_NAMED = re.compile(r"(?P<place>[^:\0]+):(?P<function>[A-Za-z_]\w*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class FilesOfCheck(Record):
    """Options of a check with a custom function that needs files: the function gets an environment."""

    files: tuple[str, ...] = Field(min_length=1)
    """Files of the project: programs, and what they read."""


class CallResult(NamedTuple):
    """`value` is the last output of the program, as JSON; `why` says in a line why there is none."""

    ok: bool
    value: Any = None
    why: str = ""


class CallEnvironment:
    """The third argument of a custom function whose check names `files`."""

    def __init__(self, files: Sequence[str], context: GradeContext) -> None:
        assert context.folder is not None
        paths = find_files(files, folder=context.folder)
        self._texts = {path.name: path.read_text("utf-8") for path in paths}
        self._context = context

    def read_calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """The tool calls of an answer, each with `name` and `arguments`; None if one is not a call."""
        return read_calls(text)

    def run(self, program: str, arguments: Any) -> CallResult:
        """Run one of the files by its name, as `python program`, next to the others."""
        files = {**self._texts, ARGUMENTS_FILE: json.dumps(arguments)}
        result = runner_of(self._context).run(files.pop(program), files)
        if not result.ok:
            lines = result.stderr.strip().splitlines()
            return CallResult(False, why=f"{result.reason}: {lines[-1]}" if lines else result.reason)
        try:
            return CallResult(True, json.loads(result.stdout.strip().splitlines()[-1]))
        except (IndexError, ValueError, RecursionError):
            return CallResult(False, why="its last line is not JSON")


def is_own(name: str) -> bool:
    return ":" in name


def require_own_name(name: str) -> None:
    match = _NAMED.fullmatch(name)
    if not match or not (match["place"].endswith(".py") or _MODULE.fullmatch(match["place"])):
        raise ValueError(
            f"{name} names no function: write path/file.py:function or module:function, "
            "within the project's folder"
        )


def load_own(name: str, *, folder: Path) -> OwnFunction:
    """Load the function; UserError with file and line if that fails."""
    require_own_name(name)
    location, _, function = name.rpartition(":")
    path = _find(location, name=name, folder=folder.resolve())
    return _load(str(path), function, sha256(path.read_bytes()).hexdigest())


def find_own(name: str, *, folder: Path) -> Path:
    """The function's file."""
    location, _, _ = name.rpartition(":")
    return _find(location, name=name, folder=folder.resolve())


def hash_own(name: str, *, folder: Path) -> str:
    """The hash of the function's file: if it changes, answers are graded again."""
    return sha256(find_own(name, folder=folder).read_bytes()).hexdigest()


def grade_own(name: str, case: Case, text: str, context: GradeContext) -> Grade:
    if context.folder is None:
        raise CannotGrade(f"{name}: there is no project folder to load it from")
    function = load_own(name, folder=context.folder)
    watched = None
    if context.is_reference:
        watched = _WatchedCase.model_construct(**{name: getattr(case, name) for name in Case.model_fields})
        watched._read.clear()
    arguments: list[Any] = [case if watched is None else watched, text]
    if isinstance(context.parameters, FilesOfCheck):
        arguments.append(CallEnvironment(context.parameters.files, context))
    try:
        returned = plain_number(function(*arguments))
    except CannotGrade:
        raise
    except (Exception, SystemExit) as error:
        path = getattr(getattr(function, "__code__", None), "co_filename", "")
        location = _line_in(error, path) or path or getattr(function, "__name__", "the function")
        raise CannotGrade(f"{location}: {describe_error(error)}") from error
    if returned is None or (watched is not None and watched.has_read_reference):
        # The log's answer is the reference: compared with itself it would always be correct.
        return None
    if isinstance(returned, bool | int | float) and 0 <= returned <= 1:
        return float(returned)
    printed = _show(returned, repr)[:40]
    raise CannotGrade(f"{name} gave {printed}: a grade must be true, false, None or a number from 0 to 1")


def require_named(name: str, context: GradeContext) -> None:
    """A case may use a function of the project only if graft.yaml uses it too."""
    if is_own(name) and name not in {check.metric for check in context.checks.values()}:
        raise CannotGrade(f"the case asks for {name}, and graft.yaml does not name it under evaluate.checks")


class _WatchedCase(Case):
    """A case that records whether its reference was read: the log's own answer is that reference."""

    _read: list[bool] = PrivateAttr(default_factory=list)

    def __getattribute__(self, name: str) -> Any:
        if name in ("reference", "model_dump", "model_dump_json", "__iter__", "__dict__"):
            object.__getattribute__(self, "__pydantic_private__")["_read"].append(True)
        return super().__getattribute__(name)

    @property
    def has_read_reference(self) -> bool:
        return bool(self._read)


def describe_error(error: BaseException) -> str:
    message = _show(error, str)
    return f"{type(error).__name__}{f': {message}' if message else ''}"


def name_line(error: BaseException, function: OwnFunction) -> str:
    """` (file.py:7)`: the deepest line of the function's file; empty if the error was raised elsewhere."""
    path = getattr(getattr(function, "__code__", None), "co_filename", "")
    location = _line_in(error, path)
    return f" ({Path(path).name}:{location.rpartition(':')[2]})" if location else ""


def plain_number(value: Any) -> Any:
    """A single number of numpy or torch as Python's own."""
    return value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value


def _show(value: object, how: Callable[[object], str]) -> str:
    """Describe a value on one line, whatever its `__repr__` does."""
    try:
        joined = " ".join(how(value).split())
    except Exception:
        return f"something that cannot be shown ({type(value).__name__})"
    return joined if len(joined) <= LONGEST_WORDS else f"{joined[:LONGEST_WORDS]}…"


def _find(location: str, *, name: str, folder: Path) -> Path:
    if location.endswith(".py"):
        candidates = [folder / location]
    else:
        inner = folder.joinpath(*location.split("."))
        candidates = [inner.with_suffix(".py"), inner / "__init__.py"]
    for candidate in candidates:
        path = candidate.resolve()
        if not path.is_relative_to(folder):
            raise UserError(
                f"the metric {name} is outside the project's folder",
                why="only code of the project is run",
                fix=f"copy the file into {folder}",
                where=str(path),
            )
        if path.is_file():
            return path
    raise UserError(
        f"there is no file for the metric {name}",
        why="custom metrics are only loaded from the project's folder",
        fix=f"write {candidates[0]}, or fix the name under evaluate.checks",
        where=str(candidates[0]),
    )


class _AsWritten(SourceFileLoader):
    """Loads the current file, and leaves no compiled copy in the user's folder."""

    def path_stats(self, path: object) -> NoReturn:
        raise OSError("no compiled copy is looked for")


@lru_cache(maxsize=64)
def _load(path: str, function: str, content: str) -> OwnFunction:
    module_name = f"graftwork_own_{content[:16]}"
    loader = _AsWritten(module_name, path)
    spec = importlib.util.spec_from_loader(module_name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and the like look their module up by name.
    sys.modules[module_name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise UserError(
            f"{Path(path).name} cannot be loaded: {type(error).__name__}: {error}",
            fix="run it on its own with python, and fix what it reports",
            where=_line_in(error, path) or path,
        ) from error
    attribute = getattr(module, function, None)
    if not callable(attribute):
        functions = [name for name, value in vars(module).items() if callable(value) and name[0] != "_"]
        raise UserError(
            f"{Path(path).name} has no function {function}",
            fix=f"it has {', '.join(functions)}" if functions else "write it: def name(case, text) -> float",
            where=path,
        )
    own_function: OwnFunction = attribute
    return own_function


def _line_in(error: BaseException, path: str) -> str:
    """file:line of the deepest step within the user's file."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    lines = [step.lineno for step in traceback.extract_tb(error.__traceback__) if step.filename == path]
    return f"{path}:{lines[-1]}" if lines else ""


def find_files(files: Sequence[str], *, folder: Path) -> list[Path]:
    """Find the files: texts in the project's folder, under different names."""
    root = folder.resolve()
    paths = [(root / name).resolve() for name in files]
    for name, path in zip(files, paths, strict=True):
        if not path.is_relative_to(root) or not path.is_file():
            raise UserError(
                f"there is no file {name} in the project's folder",
                why="a check that runs calls only takes programs and data of the project",
                fix="write it, or fix `files` under evaluate.checks",
                where=str(path),
            )
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name} is not text in UTF-8",
                why="the files of a check are put into the sandbox as text",
                fix="write its data as SQL, JSON or CSV",
                where=str(path),
            ) from error
    if len({ARGUMENTS_FILE, *(path.name for path in paths)}) <= len(paths):
        raise UserError(
            "two files of a check have the same name",
            why=f"in the sandbox they are in one folder, next to {ARGUMENTS_FILE} of a call",
            fix="rename one of them",
            where="evaluate.checks",
        )
    return paths
