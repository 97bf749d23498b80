"""What an own metric runs tool calls in: a program of the project, in the sandbox, with the call's arguments.

In: the files that a check names, arguments. Out: what the program printed as JSON. Every run has a fresh
folder with copies of the files, so a call that destroys something destroys it for itself alone. The program
reads `arguments.json`; what it printed is parsed here, and judged by the metric, outside the sandbox.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from graftwork.grading.code import runner_of
from graftwork.grading.interface import GradeContext
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.text.tool_calls import ToolCall, read_calls

ARGUMENTS_FILE = "arguments.json"


class FilesOfCheck(Record):
    """What a check by an own function may take: with it, the function gets an environment."""

    files: tuple[str, ...] = Field(min_length=1)
    """Files of the project: programs, and what they read."""


class CallResult(NamedTuple):
    """`value` is what the program printed last, as JSON; `why` says in a line why there is none."""

    ok: bool
    value: Any = None
    why: str = ""


class CallEnvironment:
    """The third argument of an own function whose check names `files`."""

    def __init__(self, files: Sequence[str], context: GradeContext) -> None:
        assert context.folder is not None
        paths = find_files(files, folder=context.folder)
        self._texts = {path.name: path.read_text("utf-8") for path in paths}
        self._context = context

    def read_calls(self, text: str) -> tuple[ToolCall, ...] | None:
        """The tool calls of an answer, each with `name` and `arguments`; None if one of them is no call."""
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
            return CallResult(False, why="its last line is no JSON")


def find_files(files: Sequence[str], *, folder: Path) -> list[Path]:
    """Where the files are: texts in the project's folder, under different names."""
    root = folder.resolve()
    paths = [(root / name).resolve() for name in files]
    for name, path in zip(files, paths, strict=True):
        if not path.is_relative_to(root) or not path.is_file():
            raise UserMistake(
                f"there is no file {name} in the project's folder",
                why="a check that runs calls takes programs and data of the project alone",
                fix="write it, or fix `files` under evaluate.checks",
                where=str(path),
            )
        try:
            path.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UserMistake(
                f"{name} is no text in UTF-8",
                why="the files of a check are put into the sandbox as text",
                fix="write its data as SQL, JSON or CSV",
                where=str(path),
            ) from error
    if len({ARGUMENTS_FILE, *(path.name for path in paths)}) <= len(paths):
        raise UserMistake(
            "two files of a check have the same name",
            why=f"in the sandbox they lie in one folder, next to {ARGUMENTS_FILE} of a call",
            fix="rename one of them",
            where="evaluate.checks",
        )
    return paths
